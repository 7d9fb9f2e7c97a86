"""Records a function's GPU work as a CUDA graph, so that it can be repeated without Python."""

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Replay = Callable[[], object]
"""Repeats the recorded work on the current stream."""


class CaptureError(RuntimeError):
    """Says that a graph cannot repeat the work that was to be recorded."""


class Recorder(Protocol):
    """Records work on one device.

    Recordings of one recorder must be replayed one after the other, never concurrently.
    """

    pool_bytes: int
    """Memory of temporaries, which stays allocated after the first recording."""

    def record(self, work: Callable[[], object]) -> Replay:
        """Records work that has run before; it is unspecified whether recording also runs it.

        Args:
            work: Reads and writes tensors with fixed addresses, or tensors made by other recorded work.

        Raises:
            CaptureError: The work cannot be recorded; nothing of the recording is left.
        """
        ...

    def forget(self) -> None:
        """Frees the temporaries' memory, once every replay has been deleted; the next recording begins anew."""
        ...


_ABANDONED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture the CUDA driver ended with an error; torch's host allocator still points to them."""


class CudaRecorder:
    """Records on the current GPU; recording does not run the work."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self.pool_bytes = 0

    def record(self, work: Callable[[], object]) -> Replay:
        """Captures a graph (see `Recorder`)."""
        if not self._graphs:
            self.forget()  # torch 2.11 does not accept a pool again after its last graph is deleted
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_reserved()
        torch.cuda.current_stream().synchronize()
        try:
            with no_garbage_collection(), _random_state_set_aside(), _current_stream(self._stream):
                self._capture(graph, work)
        except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CaptureError(str(error).partition("\n")[0]) from error
        finally:
            self.pool_bytes += max(0, torch.cuda.memory_reserved() - before)
        self._graphs.add(graph)
        return graph.replay

    def _capture(self, graph: torch.cuda.CUDAGraph, work: Callable[[], object]) -> None:
        # Other threads of the process map memory and copy during the capture, which other modes would forbid.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            with RepeatableOnly():
                work()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._end(graph)
            raise
        self._end(graph)

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            with warnings.catch_warnings():
                # A bucket may have nothing for a GPU: experts that are all on others.
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                graph.capture_end()
        except RuntimeError:
            # The CUDA driver has ended the capture, but torch has not: without the call below, its allocators would
            # ask the graph about every stream.
            _ABANDONED.append(graph)
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            self._stream = torch.cuda.Stream()
            raise

    def forget(self) -> None:
        """Returns the pool's memory to the CUDA driver."""
        self._pool = torch.cuda.graph_pool_handle()
        self.pool_bytes = 0
        torch.cuda.empty_cache()


class RepeatableOnly(TorchDispatchMode):
    """Refuses operations that read host memory, or that wait for a result of the GPU.

    In a capture, the CUDA driver refuses most of them. But it would accept a number from a CPU tensor of one element,
    and every replay would use that number.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation.

        Raises:
            CaptureError: A graph cannot repeat the operation.
        """
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags:
            raise CaptureError(f"{func} waits for a result from the GPU")
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        if kwargs.get("device") is not None:
            devices.add(torch.device(kwargs["device"]).type)
        if {"cpu", "cuda"} <= devices:
            raise CaptureError(f"{func} uses both host memory and the GPU")
        return func(*args, **kwargs)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disables Python's garbage collector during this context.

    A capture fails if the collector destroys other graphs or events meanwhile.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _random_state_set_aside() -> Iterator[None]:
    """Gives a capture a copy of the GPU's random state, since a failed capture leaves it unusable."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(own.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(own)


@contextlib.contextmanager
def _current_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Makes a stream current, and restores the previous one, even if a capture fails."""
    before = torch.cuda.current_stream()
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(before)


def addresses_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Returns the addresses of tensors, on which recorded work depends."""
    return tuple(tensor.data_ptr() for tensor in tensors)


def why_not_recorded(tensors: Sequence[torch.Tensor]) -> str:
    """Returns why work that reads these tensors cannot be recorded; empty if it can."""
    if not tensors or any(tensor.device.type != "cuda" for tensor in tensors):
        return "the weights are not on a GPU"
    wrapped = next((tensor for tensor in tensors if type(tensor).__torch_dispatch__ is not _PLAIN), None)
    if wrapped is not None:  # its data_ptr is not the address of its data
        return f"a weight is a {type(wrapped).__name__}, whose address is not known"
    return ""


_PLAIN = torch.Tensor.__torch_dispatch__
