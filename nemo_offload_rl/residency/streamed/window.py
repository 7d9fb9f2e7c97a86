"""Provides the window: a ring of slots of GPU memory that chunks of optimizer state pass through."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from nemo_offload_rl.memory.gpu_range import RangeMaker
from nemo_offload_rl.memory.pinned import HostSegment
from nemo_offload_rl.memory.streams import Event
from nemo_offload_rl.memory.units import MIB, round_up
from nemo_offload_rl.residency.streamed.host_copies import HostCopies
from nemo_offload_rl.residency.streamed.layout import Chunk, FlatLayout
from nemo_offload_rl.residency.transfer import BackedRange

NUM_SLOTS = 4
"""One slot is copied into, one is computed on, and one is copied out of; one more keeps copies from waiting for the
exact end of one another."""
DEFAULT_WINDOW_BYTES = 512 * MIB
"""With four slots of three fields each, copies are of 43 MiB, and run at the link's limit."""
_SLOT_ALIGNMENT = 512  # bytes, as torch's allocator aligns


@dataclass(frozen=True, eq=False)
class HostArrays:
    """Holds the arrays of a layout in host memory."""

    layout: FlatLayout
    segment: HostSegment


@dataclass(eq=False)
class Slot:
    """Describes a part of the window, which holds one chunk at a time, and its last copies.

    Attributes:
        memory: uint8 [slot_bytes].
        arrived: the end of the last copy into it.
        left: the end of the last copy out of it.
    """

    memory: torch.Tensor
    arrived: Event | None = None
    left: Event | None = None

    def view(self, layout: FlatLayout, field: int, offset: int, length: int) -> torch.Tensor:
        """Returns `length` elements of a field of the slot's chunk: a 1-D tensor of the field's dtype."""
        return self.memory[layout.in_slot(field, offset, length)].view(layout.fields[field].dtype)


def slot_bytes(window_bytes: int) -> int:
    """Returns the size of one slot of a window."""
    return window_bytes // NUM_SLOTS // _SLOT_ALIGNMENT * _SLOT_ALIGNMENT


class Window:
    """Passes chunks through a ring of slots in a range of GPU memory.

    Args:
        nbytes: size of the window.
        device: the GPU.
        ranges: makes the range, which is not mapped yet.
        copies: copies between the window and the host.

    Attributes:
        copies: copies between the window and the host.
        backed: the range of the window.
        last_out: the end of the last copy to the host.
    """

    def __init__(self, nbytes: int, device: torch.device, ranges: RangeMaker, copies: HostCopies) -> None:
        size = slot_bytes(nbytes)
        self.copies = copies
        self.backed = BackedRange(ranges(NUM_SLOTS * size, device, round_up(NUM_SLOTS * size, 2 * MIB)), None)
        self._slot_bytes = size
        self._slots: list[Slot] = []
        self._next = 0
        self._is_closed = False
        self.last_out: Event | None = None
        self._discard: Callable[[], None] | None = None

    def claim(self, discard: Callable[[], None]) -> None:
        """Make the caller the owner of the slots; the chunks of another owner are discarded.

        Args:
            discard: makes the caller forget its chunks; called when another claims the window, or its memory is freed.
        """
        if self._discard != discard:
            self.discard()
        self._discard = discard

    def discard(self) -> None:
        """Make the owner of the slots forget its chunks."""
        if self._discard is not None:
            self._discard()
        self._discard = None

    def fetch(self, arrays: HostArrays, chunk: Chunk) -> Slot:
        """Queue the copy of a chunk into the next slot, after the last copy out of it and all earlier copies out."""
        slot = self._next_slot()
        if slot.left is not None:
            self.copies.back.follow(slot.left)
        self.copies.to_gpu(arrays.segment, _parts(arrays, chunk, slot))
        slot.arrived = self.copies.back.mark()
        return slot

    def take(self) -> Slot:
        """Returns the next slot without copying into it; makes the current stream wait for the last copy out of it."""
        slot = self._next_slot()
        if slot.left is not None:
            slot.left.wait_on_current_stream()
        return slot

    def store(self, arrays: HostArrays, chunk: Chunk, slot: Slot) -> None:
        """Queue the copy of a slot's chunk to the host, after the work queued on the current stream."""
        self.copies.out.follow_current_stream()
        self.copies.to_host(arrays.segment, _parts(arrays, chunk, slot))
        slot.left = self.last_out = self.copies.out.mark()

    def wait(self) -> None:
        """Wait until all stored chunks are on the host."""
        if self.last_out is not None:
            self.last_out.wait()

    def release_slots(self) -> None:
        """Make the current stream wait for every copy, and forget the slots: their memory is about to be freed."""
        self.discard()
        for slot in self._slots:
            for event in (slot.arrived, slot.left):
                if event is not None:
                    event.wait_on_current_stream()
        self._slots = []

    def close(self) -> None:
        """Free the memory once all copies are done; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for slot in self._slots:
            if slot.arrived is not None:
                slot.arrived.wait()
        self.wait()
        self._slots = []
        self.backed.range.close()
        self.copies.close()

    def _next_slot(self) -> Slot:
        if not self._slots:  # made here, since a `TorchRange` has an address only while it is mapped
            self._slots = [Slot(memory) for memory in self.backed.range.tensor.split(self._slot_bytes)]
        self._next = (self._next + 1) % NUM_SLOTS
        return self._slots[self._next]


def _parts(arrays: HostArrays, chunk: Chunk, slot: Slot) -> list[tuple[slice, torch.Tensor]]:
    layout, length = arrays.layout, chunk.end - chunk.begin
    return [
        (layout.in_host(field, chunk.begin, length), slot.memory[layout.in_slot(field, 0, length)])
        for field in range(len(layout.fields))
    ]
