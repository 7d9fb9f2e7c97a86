"""Buckets with the same addresses in every refit, on both sides; their memory is allocated only during a refit."""

import contextlib
import itertools
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import overload

import torch

from nemo_offload_rl.memory.gpu_range import OutOfGpuMemoryError
from nemo_offload_rl.memory.shared_buffer import SharedBufferError
from nemo_offload_rl.memory.shared_range import PeerRange, RangeHandle, SharedRange, make_shared_range
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.refit.interface import Receiver
from nemo_offload_rl.refit.loads import Loads, OpenBucket
from nemo_offload_rl.refit.plan import BucketLayout, NamedTensor, buffer_sizes


@contextlib.contextmanager
def explain_refit_oom(nbytes: int) -> Iterator[None]:
    """Adds the keys to lower to an out-of-memory error of the allocation inside this context.

    Args:
        nbytes: the size of all buckets' buffers in bytes.

    Raises:
        OutOfGpuMemoryError: The GPU does not have that much memory.
    """
    try:
        yield
    except OutOfGpuMemoryError as error:
        raise OutOfGpuMemoryError(
            f"Cannot allocate {nbytes / GIB:.2f} GiB of GPU memory for the refit's buckets beside the policy's and "
            "the engine's weights; lower policy.refit_buffer_size_gb or "
            "policy.generation.vllm_cfg.gpu_memory_utilization."
        ) from error


@dataclass(frozen=True, eq=False)
class FixedTensors(Sequence[NamedTensor]):
    """Holds the tensors of a bucket: the same object in every refit, with the same addresses.

    An engine may record its work on them, keyed by this object, and replay it in the next refit.

    Attributes:
        tensors: (Hugging Face name, whole tensor) pairs.
    """

    tensors: tuple[NamedTensor, ...]

    @overload
    def __getitem__(self, index: int) -> NamedTensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[NamedTensor]: ...
    def __getitem__(self, index: int | slice) -> NamedTensor | Sequence[NamedTensor]:
        """Returns one pair, or several for a slice."""
        return self.tensors[index]

    def __len__(self) -> int:
        """Returns the number of tensors."""
        return len(self.tensors)


class FixedBuckets:
    """Lays out a sender's buckets in one buffer, or alternately in two, and registers them at the receivers.

    Args:
        layouts: Layouts of all buckets, in the order in which they are sent.
        num_buffers: Number of buffers; bucket i is in buffer i modulo this.
        receivers: All of them get every bucket.
        device: The current CUDA device, or the CPU.

    Raises:
        EngineLostError: A receiver's process has ended.
        OutOfGpuMemoryError: The GPU does not have enough memory.
        RuntimeError: A receiver cannot map the buffers.
        VirtualMemoryUnsupportedError: The GPU's memory cannot be shared in this way.
    """

    def __init__(
        self, layouts: Sequence[BucketLayout], num_buffers: int, receivers: Sequence[Receiver], device: torch.device
    ) -> None:
        sizes = buffer_sizes(layouts, num_buffers)
        self.num_buffers = len(sizes)
        self._layouts = layouts
        self._receivers = receivers
        self._name = uuid.uuid4().hex
        self._ranges: list[SharedRange] = []
        self._slots: list[list[torch.Tensor]] = []  # by bucket
        self._nbytes = sum(sizes)
        with contextlib.ExitStack() as undo:
            undo.callback(self._free)
            for size in sizes:
                self._ranges.append(make_shared_range(size, device))
            buffers = itertools.cycle(self._ranges)
            self._slots.extend(layout.slots(one.tensor) for layout, one in zip(layouts, buffers, strict=False))
            with self._allocated() as handles:
                self._register(RegisterBuckets(self._name, tuple(layouts), tuple(handles)))
            undo.pop_all()

    @contextlib.contextmanager
    def mapped(self) -> Iterator[list[OpenBucket]]:
        """Allocates the buffers' memory during this context, and yields the buckets, at the same addresses each time.

        Raises:
            OutOfGpuMemoryError: The GPU does not have enough memory.
        """
        with self._allocated() as handles:
            yield [
                OpenBucket(partial(self._slots.__getitem__, number), layout.tensors, self._message(number, handles))
                for number, layout in enumerate(self._layouts)
            ]

    @contextlib.contextmanager
    def _allocated(self) -> Iterator[list[RangeHandle]]:
        with contextlib.ExitStack() as stack:
            handles = []
            for one in self._ranges:
                with explain_refit_oom(self._nbytes):
                    handles.append(one.map())
                stack.callback(one.unmap)
            yield handles

    def _message(self, number: int, handles: Sequence[RangeHandle]) -> "FixedBucket":
        buffer = number % self.num_buffers
        is_last = number + self.num_buffers >= len(self._layouts)
        return FixedBucket(self._name, number, buffer, handles[buffer], is_last)

    def _register(self, buckets: "RegisterBuckets") -> None:
        try:
            self._tell(buckets)
        except RuntimeError:
            self._tell(UnregisterBuckets(self._name))  # the other receivers forget them
            raise

    def _tell(self, message: "RegisterBuckets | UnregisterBuckets") -> None:
        loads = Loads(self._receivers, 1)
        with loads.settled():
            loads.start(message)
            loads.wait()

    def close(self) -> None:
        """Frees the addresses, here and at the receivers.

        Raises:
            EngineLostError: A receiver's process has ended; the addresses here are freed all the same.
        """
        try:
            self._tell(UnregisterBuckets(self._name))
        finally:  # a dead engine holds no memory
            self._free()

    def _free(self) -> None:
        self._slots.clear()
        while self._ranges:
            self._ranges.pop().close()


@dataclass
class _Sender:
    """Holds the state of one sender in a receiver's process."""

    layouts: Sequence[BucketLayout]  # by bucket
    tensors: dict[int, FixedTensors] = field(default_factory=dict)  # by bucket, once it has been received
    ranges: dict[int, PeerRange] = field(default_factory=dict)  # by buffer
    mapped: dict[int, RangeHandle] = field(default_factory=dict)  # by buffer, while it is mapped

    def map(self, buffer: int, handle: RangeHandle) -> None:
        if self.mapped.get(buffer) == handle:
            return
        if buffer in self.mapped:  # the previous refit was aborted
            self.unmap(buffer)
        if buffer not in self.ranges:
            self.ranges[buffer] = handle.make_peer()
        self.ranges[buffer].map(handle)
        self.mapped[buffer] = handle

    def unmap(self, buffer: int) -> None:
        del self.mapped[buffer]
        self.ranges[buffer].unmap()

    def close(self) -> None:
        for buffer in list(self.mapped):
            self.unmap(buffer)
        self.tensors.clear()
        while self.ranges:
            self.ranges.popitem()[1].close()


# By name, in a receiver's process: this state outlives the buckets.
_SENDERS: dict[str, _Sender] = {}


@dataclass(frozen=True)
class FixedBucket:
    """Identifies a bucket of a sender that the receiver knows (see `RegisterBuckets`, `WeightBucket`).

    Attributes:
        sender: The sender's unique name.
        number: The bucket's number.
        buffer: The number of its buffer.
        handle: Handle by which the receiver's process maps the buffer's memory.
        is_last: Whether this is the last bucket of the refit in that buffer.
    """

    sender: str
    number: int
    buffer: int
    handle: RangeHandle
    is_last: bool

    @contextlib.contextmanager
    def opened(self) -> Iterator[FixedTensors]:
        """Maps the buffer, and unmaps it after its last bucket.

        It waits at the end for all GPU work that was started in the context.
        """
        sender = _SENDERS.get(self.sender)
        if sender is None:
            raise SharedBufferError(
                f"Bucket {self.number} of a refit was sent by its number only, but this engine has never received "
                "its layout; a restarted engine needs a new transport."
            )
        try:
            sender.map(self.buffer, self.handle)
            if self.number not in sender.tensors:
                views = sender.layouts[self.number].views(sender.ranges[self.buffer].tensor)
                sender.tensors[self.number] = FixedTensors(tuple(views))
            yield sender.tensors[self.number]
            if sender.ranges[self.buffer].tensor.is_cuda:
                torch.cuda.synchronize()  # the sender's process writes to the buffer next
        except BaseException:
            for buffer in list(sender.mapped):
                sender.unmap(buffer)
            raise
        if self.is_last:
            sender.unmap(self.buffer)


@dataclass(frozen=True)
class RegisterBuckets:
    """Tells a receiver a sender's buckets before the first one, and maps their buffers once (see `WeightBucket`).

    Attributes:
        sender: The sender's unique name.
        layouts: Positions of the tensors in each bucket.
        handles: Handles of the buffers, whose memory is allocated now.
    """

    sender: str
    layouts: tuple[BucketLayout, ...]
    handles: tuple[RangeHandle, ...]

    @contextlib.contextmanager
    def opened(self) -> Iterator[list[NamedTensor]]:
        """Yields no tensors.

        Raises:
            SharedBufferError: This process cannot map the buffers.
        """
        sender = _Sender(self.layouts)
        try:
            for buffer, handle in enumerate(self.handles):
                sender.map(buffer, handle)
                sender.unmap(buffer)
        except BaseException:
            sender.close()
            raise
        _SENDERS[self.sender] = sender
        yield []


@dataclass(frozen=True)
class UnregisterBuckets:
    """Makes a receiver forget a sender; it has no tensors (see `WeightBucket`).

    Attributes:
        sender: The sender's name.
    """

    sender: str

    @contextlib.contextmanager
    def opened(self) -> Iterator[list[NamedTensor]]:
        """Drops the sender's buckets, and with them the recorded loads."""
        if (sender := _SENDERS.pop(self.sender, None)) is not None:
            sender.close()
        yield []
