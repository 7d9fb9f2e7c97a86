"""Prepares CUDA graph captures: switches hooks off, sets the number of micro-batches, and undoes a failed capture."""

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
