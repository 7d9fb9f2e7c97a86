"""Prepares the capture of a CUDA graph: hooks off, the number of micro-batches set, a failure undone."""

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import reconfigure_num_microbatches_calculator
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.moe.moe_layer import MoELayer


class CaptureObserver(Protocol):
    """Learns when graphs are captured, replayed and deleted, as it makes calls of its own in captured layers."""

    def prepare_capture(self) -> None:
        """Prepare for captures; the GPU is idle."""
        ...

    def exclude_graph_input(self, storage: torch.UntypedStorage) -> None:
        """Note that a graph reads its input there for as long as it lives."""
        ...

    def count_replay(self) -> None:
        """Count a replay of a layer's forward graph in which it made calls."""
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
    """Run a capture inside; undo all that one that fails has set.

    megatron-core's helper and Transformer Engine's `make_graphed_callables` take back only at their ends what they have
    set: that a capture is under way, with which hooks do nothing, and what they do to the garbage collector.
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
    """Clear the routing that a layer keeps if it fails behind its router's replay; later passes would take it."""
    for layer in layers:
        if isinstance(layer.mlp, MoELayer):
            layer.mlp.cudagraph_tensor_store.clear()


class FrozenShapes:
    """Restores shapes and numbers that preparing a tokens' exchange (moe_preprocess) sets in its dispatcher.

    A replay sets the tensors among them, and nothing else: after a pass in another shape, such as log-probs, experts
    would go on with that shape, with an error or, for as many tokens, without one.

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
        """Restores the shapes of after the capture; called before replays."""
        for dispatcher, name, value in self._values:
            setattr(dispatcher, name, value)


@contextlib.contextmanager
def param_gather_hooks_off(model: Sequence[Any]) -> Iterator[bool]:
    """Remove hooks of overlap_param_gather, with which Transformer Engine captures no module; yields if there were."""
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
