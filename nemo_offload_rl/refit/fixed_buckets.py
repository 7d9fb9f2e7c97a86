"""Buckets at addresses that stay from refit to refit, on both sides; their memory is there during a refit alone."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

import torch

from nemo_offload_rl.memory.shared_buffer import SharedBufferError
from nemo_offload_rl.memory.shared_range import PeerRange, RangeHandle, SharedRange, make_shared_range
from nemo_offload_rl.refit.bucket_memory import keys_named_where_memory_runs_out
from nemo_offload_rl.refit.plan import BucketLayout, NamedTensor


@dataclass(frozen=True, eq=False)
class FixedTensors(Sequence[NamedTensor]):
    """Holds the tensors of a bucket: the same object brings them in every refit, at the same addresses.

    An engine may record what it does with them, under the object itself, and do it again in the next refit.

    Attributes:
        tensors: (Hugging Face name, whole tensor) pairs.
    """

    tensors: tuple[NamedTensor, ...]

    @overload
    def __getitem__(self, index: int) -> NamedTensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[NamedTensor]: ...
    def __getitem__(self, index: int | slice) -> NamedTensor | Sequence[NamedTensor]:
        """Return a pair, or some."""
        return self.tensors[index]

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.tensors)


class FixedBuckets:
    """Lays out a sender's buckets in one buffer or two, in which they take turns.

    Args:
        layouts: Of all buckets, in the order in which they are sent.
        num_buffers: Bucket i is in buffer i modulo this.
        device: The current CUDA device, or the CPU.

    Raises:
        OutOfGpuMemoryError: The GPU has not that much.
        VirtualMemoryUnsupportedError: The GPU's memory cannot be shared so.
    """

    def __init__(self, layouts: Sequence[BucketLayout], num_buffers: int, device: torch.device) -> None:
        self.num_buffers = min(num_buffers, len(layouts))
        self.layouts = layouts
        self._ranges: list[SharedRange] = []
        self.slots: list[list[torch.Tensor]] = []
        """Of each bucket, its tensors as views of its buffer."""
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
        """Take the buffers' memory, whose contents are lost at the end; yields the handle of each."""
        with contextlib.ExitStack() as stack:
            handles = []
            for one in self._ranges:
                with keys_named_where_memory_runs_out(self._nbytes):
                    handles.append(one.map())
                stack.callback(one.unmap)
            yield handles

    def bucket(self, sender: str, number: int, handles: Sequence[RangeHandle], *, is_known: bool) -> "FixedBucket":
        """Make what a receiver gets for a bucket.

        Args:
            sender: As the receiver knows it.
            number: Of the bucket.
            handles: Of the buffers, as they are mapped.
            is_known: Whether the receiver has got this bucket before.
        """
        buffer = number % self.num_buffers
        is_last = number + self.num_buffers >= len(self.layouts)
        if is_known:
            return FixedBucket(sender, number, buffer, handles[buffer], is_last)
        return FirstFixedBucket(sender, number, buffer, handles[buffer], is_last, self.layouts[number])

    def close(self) -> None:
        """Give the addresses back."""
        self.slots = []
        while self._ranges:
            self._ranges.pop().close()


@dataclass
class _Sender:
    """What a receiver's process has of a sender."""

    layouts: dict[int, BucketLayout] = field(default_factory=dict)  # by bucket
    tensors: dict[int, FixedTensors] = field(default_factory=dict)  # by bucket, once it has come
    ranges: dict[int, PeerRange] = field(default_factory=dict)  # by buffer
    mapped: dict[int, RangeHandle] = field(default_factory=dict)  # by buffer, while it is

    def map(self, buffer: int, handle: RangeHandle) -> None:
        if self.mapped.get(buffer) == handle:
            return
        if buffer in self.mapped:  # the refit before was given up
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


# Of a receiver's process: they outlive the buckets that come from them.
_SENDERS: dict[str, _Sender] = {}


@dataclass(frozen=True)
class FixedBucket:
    """Names a bucket that the receiver has got before (see `WeightBucket`).

    Attributes:
        sender: The sender's name, which no other has.
        number: The bucket's number.
        buffer: The number of the buffer that it is in.
        handle: Names the buffer's memory to the receiver's process.
        is_last: Whether no later bucket of this refit is in that buffer.
    """

    sender: str
    number: int
    buffer: int
    handle: RangeHandle
    is_last: bool

    @contextlib.contextmanager
    def opened(self) -> Iterator[FixedTensors]:
        """Map the buffer until its last bucket has been read; the GPU has done all that was started in the context."""
        sender = _SENDERS.get(self.sender)
        if sender is None or self.number not in sender.layouts:
            raise SharedBufferError(
                f"Bucket {self.number} of a refit comes by its number alone, but this engine has never had it; an "
                "engine that was started anew needs a new transport."
            )
        sender.map(self.buffer, self.handle)
        try:
            if self.number not in sender.tensors:
                views = sender.layouts[self.number].views(sender.ranges[self.buffer].tensor)
                sender.tensors[self.number] = FixedTensors(tuple(views))
            yield sender.tensors[self.number]
            if sender.ranges[self.buffer].tensor.is_cuda:
                torch.cuda.synchronize()  # the sender's process writes there next
        except BaseException:
            for buffer in list(sender.mapped):
                sender.unmap(buffer)
            raise
        if self.is_last:
            sender.unmap(self.buffer)


@dataclass(frozen=True)
class FirstFixedBucket(FixedBucket):
    """Describes a bucket that the receiver gets for the first time.

    Attributes:
        layout: Where its tensors are in the buffer.
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
    """Ends what a receiver keeps of a sender; it brings no tensors (see `WeightBucket`).

    Attributes:
        sender: The sender's name.
    """

    sender: str

    @contextlib.contextmanager
    def opened(self) -> Iterator[list[NamedTensor]]:
        """Forget the sender's buckets, and with them what was recorded."""
        if (sender := _SENDERS.pop(self.sender, None)) is not None:
            sender.close()
        yield []
