"""Buckets with the same addresses in every refit, on both sides; their memory is allocated only during a refit."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import torch

from nemo_offload_rl.memory.shared_buffer import SharedBufferError
from nemo_offload_rl.memory.shared_range import PeerRange, RangeHandle, SharedRange, make_shared_range
from nemo_offload_rl.refit.bucket_memory import explain_refit_oom
from nemo_offload_rl.refit.plan import BucketLayout, NamedTensor


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
    """Lays out a sender's buckets in one buffer, or alternately in two.

    Args:
        layouts: Layouts of all buckets, in the order in which they are sent.
        num_buffers: Number of buffers; bucket i is in buffer i modulo this.
        device: The current CUDA device, or the CPU.

    Raises:
        OutOfGpuMemoryError: The GPU does not have enough memory.
        VirtualMemoryUnsupportedError: The GPU's memory cannot be shared in this way.
    """

    def __init__(self, layouts: Sequence[BucketLayout], num_buffers: int, device: torch.device) -> None:
        self.num_buffers = min(num_buffers, len(layouts))
        self.layouts = layouts
        self._ranges: list[SharedRange] = []
        self.slots: list[list[torch.Tensor]] = []
        """For each bucket, its tensors as views of its buffer."""
        sizes = [max(1, *(each.num_bytes for each in layouts[first::num_buffers])) for first in range(self.num_buffers)]
        self._nbytes = sum(sizes)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for size in sizes:
                self._ranges.append(make_shared_range(size, device))
            undo.pop_all()
        self.slots = [
            [slot for _, slot in layout.views(self._ranges[number % self.num_buffers].tensor)]
            for number, layout in enumerate(layouts)
        ]

    @contextlib.contextmanager
    def mapped(self) -> Iterator[list[RangeHandle]]:
        """Allocates the buffers' memory during this context, and yields the handle of each buffer."""
        with contextlib.ExitStack() as stack:
            handles = []
            for one in self._ranges:
                with explain_refit_oom(self._nbytes):
                    handles.append(one.map())
                stack.callback(one.unmap)
            yield handles

    def bucket(self, sender: str, number: int, handles: Sequence[RangeHandle], *, is_known: bool) -> "FixedBucket":
        """Makes the object that a receiver gets for a bucket.

        Args:
            sender: The sender's name.
            number: The bucket's number.
            handles: Handles of the mapped buffers.
            is_known: Whether the receiver has received this bucket before.
        """
        buffer = number % self.num_buffers
        is_last = number + self.num_buffers >= len(self.layouts)
        if is_known:
            return FixedBucket(sender, number, buffer, handles[buffer], is_last)
        return FirstFixedBucket(sender, number, buffer, handles[buffer], is_last, self.layouts[number])

    def close(self) -> None:
        """Frees the addresses."""
        self.slots = []
        while self._ranges:
            self._ranges.pop().close()


@dataclass
class _Sender:
    """Holds the state of one sender in a receiver's process."""

    layouts: dict[int, BucketLayout] = field(default_factory=dict)  # by bucket
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
    """Identifies a bucket that the receiver has received before (see `WeightBucket`).

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
        if sender is None or self.number not in sender.layouts:
            raise SharedBufferError(
                f"Bucket {self.number} of a refit was sent by its number only, but this engine has never received "
                "its layout; a restarted engine needs a new transport."
            )
        sender.map(self.buffer, self.handle)
        try:
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
class FirstFixedBucket(FixedBucket):
    """Describes a bucket that the receiver has not received before.

    Attributes:
        layout: Positions of its tensors in the buffer.
    """

    layout: BucketLayout

    @contextlib.contextmanager
    def opened(self) -> Iterator[FixedTensors]:
        """See `FixedBucket.opened`."""
        _SENDERS.setdefault(self.sender, _Sender()).layouts[self.number] = self.layout
        with super().opened() as tensors:
            yield tensors


@dataclass(frozen=True)
class LastBucket:
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
