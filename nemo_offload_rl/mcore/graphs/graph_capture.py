"""Prepares CUDA graph captures and undoes failed ones; warns once if replays are slower than eager steps."""

import contextlib
import gc
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import reconfigure_num_microbatches_calculator
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.moe.moe_layer import MoELayer

from nemo_offload_rl.config.megatron import GRAPH_IMPL_KEY, GRAPH_MODULES_KEY
from nemo_offload_rl.memory.streams import Event


class CaptureObserver(Protocol):
    """Is notified of captures, replays and deletions of graphs; for code whose own calls run in captured layers."""

    def prepare_capture(self) -> None:
        """Prepare for captures; the GPU is idle."""
        ...

    def exclude_graph_input(self, storage: torch.UntypedStorage) -> None:
        """Note that a graph reads its input from this storage for as long as the graph lives."""
        ...

    def count_replay(self) -> None:
        """Count a replay of a layer's forward graph that contains calls of this observer."""
        ...

    def forget_captures(self) -> None:
        """Forget graphs that were deleted."""
        ...


class NoObserver(CaptureObserver):
    """Observes nothing."""

    def prepare_capture(self) -> None:
        """Does nothing."""

    def exclude_graph_input(self, storage: torch.UntypedStorage) -> None:
        """Does nothing."""

    def count_replay(self) -> None:
        """Does nothing."""

    def forget_captures(self) -> None:
        """Does nothing."""


def addresses(layers: Sequence[Any]) -> list[int]:
    """Returns the addresses of all tensors that graphs were captured with."""
    held = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
    held += [tensor.main_grad for tensor in held if hasattr(tensor, "main_grad")]
    return [tensor.data_ptr() for tensor in held]


@contextlib.contextmanager
def undone_on_failure() -> Iterator[None]:
    """Run a capture inside; if it fails, reset the global state that it has set.

    megatron-core's helper and Transformer Engine's `make_graphed_callables` reset it only at their ends: the flag that
    a capture is under way, with which hooks do nothing, and the settings of the garbage collector.
    """
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(cuda_graphs._set_capture_end)
        if cuda_graphs.HAVE_TE_GRAPHS:
            on_failure.callback(cuda_graphs.te_set_capture_end)
        if cuda_graphs.FREEZE_GC:
            on_failure.callback(gc.unfreeze)
        if gc.isenabled():
            on_failure.callback(gc.enable)
        yield
        on_failure.pop_all()


def forget_replayed_routing(layers: Sequence[Any]) -> None:
    """Clear the routing that a layer keeps if it fails after its router's replay; later passes would use it."""
    for layer in layers:
        if isinstance(layer.mlp, MoELayer):
            layer.mlp.cudagraph_tensor_store.clear()


class FrozenShapes:
    """Restores the shapes and numbers that moe_preprocess sets in the token dispatcher.

    A replay sets only the tensors among these values: after a pass in another shape, such as log-probs, experts would
    use that shape, with an error or, if the number of tokens is equal, without one.

    Args:
        layers: as they are after their capture.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._values: list[tuple[Any, str, Any]] = []
        for layer in layers:
            dispatcher = getattr(layer.mlp, "token_dispatcher", None)
            if dispatcher is None or dispatcher.valid_cudagraph_attrs is None:  # not part of the graph
                continue
            shapes = {name for name, value in vars(dispatcher).items() if isinstance(value, torch.Size)}
            named = shapes.union(dispatcher.cudagraph_attrs).difference(dispatcher.valid_cudagraph_attrs)
            self._values += [(dispatcher, name, vars(dispatcher)[name]) for name in named if name in vars(dispatcher)]

    def restore(self) -> None:
        """Restores the values that the dispatchers had after the capture; called before replays."""
        for dispatcher, name, value in self._values:
            setattr(dispatcher, name, value)


@contextlib.contextmanager
def param_gather_hooks_off(model: Sequence[Any]) -> Iterator[bool]:
    """Remove the hooks of overlap_param_gather inside: Transformer Engine cannot capture modules that have them.

    Yields:
        Whether there were such hooks.
    """
    were_on = [chunk for chunk in model if chunk.remove_forward_pre_hook_handles]
    for chunk in were_on:
        chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield bool(were_on)
    finally:
        for chunk in were_on:
            chunk.enable_forward_pre_hook()


@contextlib.contextmanager
def num_microbatches_told(num_microbatches: int) -> Iterator[None]:
    """Set the global from which megatron-core's helper reads the number of micro-batches, which is 1 otherwise."""
    rank, data = torch.distributed.get_rank(), mpu.get_data_parallel_world_size()
    reconfigure_num_microbatches_calculator(rank, None, num_microbatches * data, 1, data)
    try:
        yield
    finally:
        reconfigure_num_microbatches_calculator(rank, None, data, 1, data)


def reserved_bytes() -> int:
    """Returns the bytes that torch's allocator reserves, the graphs' pool included."""
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


logger = logging.getLogger(__name__)

SLOWER_LIMIT = 0.10
"""Share of an eager step's time by which a replayed step may be slower without a warning."""
_NUM_COMPARED = 3


@dataclass(frozen=True)
class _Timed:
    shape: Hashable
    is_eager: bool
    begin: Event
    end: Event


class GraphSpeedCheck:
    """Compares replayed training steps with eager ones of the same shape, as timed on the caller's stream.

    The fastest eager step is compared with the fastest of the first three replayed steps that have an eager step of
    their shape. The very first step and the first after each capture are left out, since they compile kernels and
    allocate memory. Without such a pair, as after a single eager step, nothing is logged.

    Args:
        modules: the captured modules, `policy.megatron_cfg.cuda_graph_modules`.
        copies_inside: whether activations are offloaded inside of the graphs.
        mark: records an event on the current stream.
    """

    def __init__(self, modules: Sequence[str], *, copies_inside: bool, mark: Callable[[], Event]) -> None:
        self._modules = list(modules)
        self._copies_inside = copies_inside
        self._mark = mark
        self._num_captures: int | None = None  # of the last step
        self._unread: _Timed | None = None
        self._eager_seconds: dict[Hashable, float] = {}
        self._compared: list[tuple[float, float]] = []  # seconds of a replayed step, and of the eager one

    @contextmanager
    def step(self, shape: Hashable, num_captures: int) -> Iterator[None]:
        """Time a training step that runs inside; once three steps have been compared, no events are recorded any more.

        Args:
            shape: shape of the step and its micro-batches; steps of one shape do the same work.
            num_captures: how often graphs have been captured; 0 in an eager step.
        """
        if len(self._compared) == _NUM_COMPARED:
            yield
            return
        is_first = num_captures != self._num_captures
        self._num_captures = num_captures
        is_timed = not is_first and (num_captures == 0 or shape in self._eager_seconds)
        begin = self._mark() if is_timed else None
        yield
        timed = None if begin is None else _Timed(shape, num_captures == 0, begin, self._mark())
        if self._unread is not None:
            # Read the previous step only now: this step's gradient norm has waited for all of it, its update included.
            self._read(self._unread)
        self._unread = timed

    def _read(self, timed: _Timed) -> None:
        timed.end.wait()
        seconds = timed.end.seconds_since(timed.begin)
        if timed.is_eager:
            known = self._eager_seconds.setdefault(timed.shape, seconds)
            self._eager_seconds[timed.shape] = min(known, seconds)
            return
        self._compared.append((seconds, self._eager_seconds[timed.shape]))
        if len(self._compared) == _NUM_COMPARED:
            replayed, eager = min(self._compared, key=lambda pair: pair[0] / pair[1])
            if replayed > (1 + SLOWER_LIMIT) * eager:
                logger.warning(
                    "%s", slower_than_eager(replayed, eager, self._modules, copies_inside=self._copies_inside)
                )


def slower_than_eager(replayed_s: float, eager_s: float, modules: Sequence[str], *, copies_inside: bool) -> str:
    """Returns the warning that steps from graphs are slower: by how much, and what to change.

    Args:
        replayed_s: seconds of a training step from graphs.
        eager_s: seconds of an eager one.
        modules: the captured modules.
        copies_inside: whether activations are offloaded inside of the graphs.
    """
    remedy = f"set {GRAPH_IMPL_KEY} to none"
    if len(modules) > 1:  # an empty list is refused
        what = "'mlp'" if "mlp" in modules else "modules"
        remedy = f"remove {what} from it, or {remedy}"
    why = " (a graph ends only after the copies of activations inside it)" if copies_inside else ""
    return (
        f"a training step from CUDA graphs takes {1e3 * replayed_s:,.1f} ms, {100 * (replayed_s / eager_s - 1):.0f}% "
        f"longer than the {1e3 * eager_s:,.1f} ms of an eager one of the same shape{why}; capturing "
        f"{GRAPH_MODULES_KEY} {list(modules)} may make it at most {SLOWER_LIMIT:.0%} slower: {remedy}."
    )
