"""Records what a function has a GPU do, as a CUDA graph, so that it can be done again without Python."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Replay = Callable[[], object]
"""Does what was recorded again, on the current stream."""


class CaptureError(RuntimeError):
    """Says that the work to be recorded does something that a graph cannot repeat."""


class Recorder(Protocol):
    """Records work on one device. All that one recorder has recorded is replayed in turn, never at once."""

    pool_bytes: int
    """Memory of temporaries, which is kept from the first recording on."""

    def record(self, work: Callable[[], object]) -> Replay:
        """Record some work, which has run before; whether it is done now, too, is open.

        Args:
            work: Reads and writes tensors that stay where they are, or that other recorded work has made.

        Raises:
            CaptureError: It cannot be recorded; nothing is left of it.
        """
        ...

    def forget(self) -> None:
        """Give the temporaries' memory back, once every replay is gone; the next recording begins anew."""
        ...


_ABANDONED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture the driver has ended with an error; torch's allocator of host memory still points to them."""


class CudaRecorder:
    """Records on the current GPU; recording does not do the work."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self.pool_bytes = 0

    def record(self, work: Callable[[], object]) -> Replay:
        """Capture a graph (see `Recorder`)."""
        if not self._graphs:
            self.forget()  # torch 2.11 refuses a pool again whose last graph is gone
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
        # Other threads of the process map memory and copy meanwhile, which another mode would forbid them.
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
            graph.capture_end()
        except RuntimeError:
            # The driver has ended the capture, but torch goes no further: without this, its allocators would ask the
            # graph about every stream.
            _ABANDONED.append(graph)
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            self._stream = torch.cuda.Stream()
            raise

    def forget(self) -> None:
        """Give the pool back to the driver."""
        self._pool = torch.cuda.graph_pool_handle()
        self.pool_bytes = 0
        torch.cuda.empty_cache()


class RepeatableOnly(TorchDispatchMode):
    """Lets no operation pass that reads host memory, or that waits for an answer of the GPU.

    The driver refuses most of them in a capture. It would take a number from a CPU tensor of one element, though, and
    replay it for ever.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation.

        Raises:
            CaptureError: It cannot be repeated from a graph.
        """
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags:
            raise CaptureError(f"{func} waits for an answer of the GPU")
        devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        if kwargs.get("device") is not None:
            devices.add(torch.device(kwargs["device"]).type)
        if {"cpu", "cuda"} <= devices:
            raise CaptureError(f"{func} goes between host memory and the GPU")
        return func(*args, **kwargs)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python's garbage collector away; a capture would fail if it ended graphs or events of others meanwhile."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _random_state_set_aside() -> Iterator[None]:
    """Have a capture take a copy of the state of the GPU's random numbers, which a failed one leaves unusable."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    own = generator.graphsafe_get_state()
    generator.graphsafe_set_state(own.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(own)


@contextlib.contextmanager
def _current_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Make a stream current, and the one before again, also where a capture has failed."""
    before = torch.cuda.current_stream()
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(before)


def addresses_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Returns where tensors are: what recorded work depends on."""
    return tuple(tensor.data_ptr() for tensor in tensors)


def why_not_recorded(tensors: Sequence[torch.Tensor]) -> str:
    """Returns why work that reads some tensors cannot be recorded; nothing where it can."""
    if not tensors or any(tensor.device.type != "cuda" for tensor in tensors):
        return "the weights are not on a GPU"
    wrapped = next((tensor for tensor in tensors if type(tensor).__torch_dispatch__ is not _PLAIN), None)
    if wrapped is not None:  # its address is not that of its data
        return f"a weight is a {type(wrapped).__name__}, whose address is not known"
    return ""


_PLAIN = torch.Tensor.__torch_dispatch__
