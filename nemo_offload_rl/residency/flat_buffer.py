"""Packs the storages of tensors into GPU ranges, once; the same tensor objects then point into these.

Ten thousand small tensors thus cross the link like one large one, and their addresses never change.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from nemo_offload_rl.memory.gpu_range import CHUNK_BYTES, OutOfGpuMemoryError, RangeMaker, make_range
from nemo_offload_rl.memory.pinned import LeakError, PinnedArena
from nemo_offload_rl.memory.units import round_up
from nemo_offload_rl.residency.table import Placement
from nemo_offload_rl.residency.target import Move, ResidencyError
from nemo_offload_rl.residency.transfer import BackedRange, ChunkError, Mover, map_chunk


def bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """Returns all bytes of a storage on a device: uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def point_at(tensors: Iterable[torch.Tensor], memory: torch.Tensor, shift: int) -> None:
    """Points tensors at other memory, keeping their dtype, shape and strides.

    Args:
        tensors: tensors of one storage.
        memory: uint8, covering its whole storage.
        shift: bytes to add to their offsets in their present storage.
    """
    for tensor in tensors:
        tensor.data = view_like(tensor, memory, int(tensor.storage_offset()) * tensor.element_size() + shift)


def view_like(tensor: torch.Tensor, memory: torch.Tensor, offset: int) -> torch.Tensor:
    """Views `memory`, which covers its storage, from byte `offset` with the dtype, shape and strides of a tensor."""
    start, rest = divmod(offset, tensor.element_size())
    assert rest == 0
    view = torch.empty(0, dtype=tensor.dtype, device=memory.device)
    return view.set_(memory.untyped_storage(), start, tensor.shape, tensor.stride())


ALIGNMENT = 512  # bytes, as torch's allocator aligns, so that kernels make the same choices


@dataclass(frozen=True)
class BufferEntry:
    """Describes a storage that is to move into a range, and all tensors that view it.

    Attributes:
        name: its name in messages.
        storage: the storage that the data moves out of.
        tensors: all tensors that view that storage, strided and of any dtype.
    """

    name: str
    storage: torch.UntypedStorage
    tensors: Sequence[torch.Tensor]

    def num_unknown_views(self) -> int:
        """Counts the tensors or graphs that use the storage but are not in `tensors`, and would keep using it."""
        return torch._C._storage_Use_Count(self.storage._cdata) - len(self.tensors) - 1  # one is of `self.storage`


@dataclass(frozen=True)
class BufferSlice:
    """Locates an entry in the ranges of a flat buffer.

    Attributes:
        name: the entry's name.
        backed: the range that holds the entry.
        offset: where in the range the entry begins, in bytes.
        nbytes: size of the entry.
    """

    name: str
    backed: BackedRange
    offset: int
    nbytes: int

    def on_device(self) -> torch.Tensor:
        """Returns the entry's bytes in the range: uint8 [nbytes]; may be accessed only while the range is mapped."""
        return self.backed.range.tensor[self.offset : self.offset + self.nbytes]


class FlatBuffer:
    """Holds the tensors of one target in ranges of GPU memory, and the host memory that the ranges are copied to.

    Args:
        owner: name of the target in messages and in the arena.
        device: where the tensors are used.
        arena: provides the host side; None for contents that are only ever dropped.
        chunk_bytes: size of the chunks that are mapped and unmapped.
        ranges: makes the ranges.
        pin: whether to page-lock the host side.
    """

    def __init__(
        self,
        owner: str,
        device: torch.device,
        arena: PinnedArena | None,
        chunk_bytes: int = CHUNK_BYTES,
        ranges: RangeMaker = make_range,
        *,
        pin: bool = True,
    ) -> None:
        self.owner = owner
        self.device = device
        self.backed_ranges: list[BackedRange] = []
        self.slices: list[BufferSlice] = []
        self._arena = arena
        self._chunk_bytes = chunk_bytes
        self._make_range = ranges
        self._pin = pin

    @property
    def has_host_side(self) -> bool:
        """Returns whether the contents can be copied to the host, and not only dropped."""
        return self._arena is not None

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all backed ranges, mapped or not."""
        return sum(backed.range.nbytes for backed in self.backed_ranges)

    @property
    def mapped_bytes(self) -> int:
        """Returns the device memory that the backed ranges have mapped now."""
        return sum(backed.range.mapped_bytes for backed in self.backed_ranges)

    def add(self, entries: Sequence[BufferEntry]) -> None:
        """Move more entries into a new range, which stays mapped.

        An entry's old memory is freed as soon as it has moved, so that two copies of all entries never exist.

        Raises:
            MemoryError: the host has no room; nothing has changed.
            OutOfGpuMemoryError: the device has no room for an entry beside its old memory; the message names it.
                Entries that had moved in have moved out again, to memory of their own.
            ValueError: an entry's storage is used by tensors or graphs that the entry does not list. The model must not
                be used afterwards.
        """
        if not entries:
            return
        *offsets, total = itertools.accumulate(map(_aligned_bytes, entries), initial=0)
        backed = self._new_range(total)
        slices = [
            BufferSlice(entry.name, backed, offset, entry.storage.nbytes())
            for entry, offset in zip(entries, offsets, strict=True)
        ]
        mapped = 0
        for number, (entry, buffer_slice) in enumerate(zip(entries, slices, strict=True)):
            while (
                mapped < len(backed.range.chunks)
                and backed.range.chunks[mapped].start < buffer_slice.offset + buffer_slice.nbytes
            ):
                try:
                    map_chunk(backed.range, mapped)
                except OutOfGpuMemoryError as error:
                    _move_out(backed, entries[:number], slices[:number], mapped)
                    self._give_back(backed)
                    raise OutOfGpuMemoryError(
                        f"Cannot allocate the GPU memory range for {entry.name}: {error}"
                    ) from error
                mapped += 1
            try:
                _move_in(entry, buffer_slice)
            except ValueError:  # the range stays, since tensors view it
                self._release_host_side(backed)
                raise
        self.backed_ranges.append(backed)
        self.slices += slices

    def add_or_replace(
        self, entries: Sequence[BufferEntry], viewed: Callable[[BufferSlice], bool] = lambda _: False
    ) -> None:
        """Move entries in; one with the name and size of an earlier entry takes its slice (see `add`).

        Args:
            entries: the new entries.
            viewed: returns whether something still uses an earlier entry's slice, which then keeps its contents.
        """
        places = (
            {(buffer_slice.name, buffer_slice.nbytes): index for index, buffer_slice in enumerate(self.slices)}
            if entries
            else {}
        )
        new = []
        for entry in entries:
            index = places.get((entry.name, entry.storage.nbytes()))
            if index is None or viewed(self.slices[index]):
                new.append(entry)
            else:
                _move_in(entry, self.slices[index])
        self.add(new)

    def drop_replaced(self) -> None:
        """Free ranges that no tensor views, and whose entries have all got later slices; no move may be under way.

        A buffer that is made anew with another size, such as a rotary table that has grown, leaves such a range.
        """
        newest = {buffer_slice.name: id(buffer_slice.backed) for buffer_slice in self.slices}
        needed = set(newest.values())
        for backed in [backed for backed in self.backed_ranges if id(backed) not in needed]:
            storage = backed.range.tensor.untyped_storage()
            if torch._C._storage_Use_Count(storage._cdata) > 2:  # the range's tensor, and `storage`
                continue
            del storage
            self.backed_ranges.remove(backed)
            self.slices = [buffer_slice for buffer_slice in self.slices if buffer_slice.backed is not backed]
            with contextlib.suppress(LeakError):  # the reader of a host view keeps its memory
                self._give_back(backed)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor is in one of the backed ranges, mapped or not."""
        return self._range_of(tensor) is not None

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns a CPU tensor of the same dtype, shape and strides that views the host copy of a tensor.

        It has its own storage of just its size, so that code that serialises whole storages writes no neighbours.

        Args:
            tensor: any tensor; the result is None if it is not in this buffer.
        """
        backed = self._range_of(tensor)
        if backed is None:
            return None
        assert backed.host is not None
        size = tensor.element_size()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        length = sum((count - 1) * stride for count, stride in steps) + 1 if tensor.numel() else 0
        return view_like(tensor, backed.host.window(int(tensor.storage_offset()) * size, max(length, 1) * size), 0)

    def name_at(self, error: ChunkError) -> str:
        """Returns the name of the first entry with bytes in the chunk that an error is about."""
        return next(
            buffer_slice.name
            for buffer_slice in self.slices
            if buffer_slice.backed is error.backed and buffer_slice.offset + buffer_slice.nbytes > error.offset
        )

    def close(self) -> None:
        """Free all memory; the tensors must not be used afterwards."""
        for backed in self.backed_ranges:
            self._give_back(backed)
        self.backed_ranges, self.slices = [], []

    def _range_of(self, tensor: torch.Tensor) -> BackedRange | None:
        """Returns the range that a tensor is in. Compares storages: every unmapped `TorchRange` has address 0."""
        wanted = tensor.untyped_storage()._cdata
        found = (backed for backed in self.backed_ranges if backed.range.tensor.untyped_storage()._cdata == wanted)
        return next(found, None)

    def _new_range(self, nbytes: int) -> BackedRange:
        gpu_range = self._make_range(nbytes, self.device, self._chunk_bytes)
        try:
            host = None if self._arena is None else self._arena.allocate(self.owner, nbytes, pin=self._pin)
        except MemoryError:
            gpu_range.close()
            raise
        return BackedRange(gpu_range, host)

    def _give_back(self, backed: BackedRange) -> None:
        backed.range.close()
        self._release_host_side(backed)

    def _release_host_side(self, backed: BackedRange) -> None:
        if backed.host is not None:
            assert self._arena is not None
            self._arena.release(backed.host)


def flat_buffer_bytes(entries: Iterable[BufferEntry]) -> int:
    """Returns the bytes that entries will take in a range and in the arena."""
    return sum(map(_aligned_bytes, entries))


def _aligned_bytes(entry: BufferEntry) -> int:
    return round_up(entry.storage.nbytes(), ALIGNMENT)


@torch.no_grad()
def _move_in(entry: BufferEntry, buffer_slice: BufferSlice) -> None:
    there = buffer_slice.on_device()
    source = bytes_of(entry.storage, there.device)
    there.copy_(source)
    if source.is_cuda:
        # megatron-core makes its buffers on a stream of their own: torch would give them away during the copy.
        source.record_stream(torch.cuda.current_stream(source.device))
    del source
    point_at(entry.tensors, buffer_slice.backed.range.tensor, buffer_slice.offset)
    # One count is of `entry.storage`. Others are of views that would keep using the old memory.
    others = torch._C._storage_Use_Count(entry.storage._cdata) - 1
    if others:
        raise ValueError(
            f"{buffer_slice.name} is also referenced by {others} tensors or graphs that could not be found and that "
            "would keep using its old memory after a move; attach the offloader before the first forward pass, and "
            "keep no views of parameters or buffers."
        )
    if entry.storage.resizable():
        entry.storage.resize_(0)  # the caller's list of entries still holds it


@torch.no_grad()
def _move_out(
    backed: BackedRange, entries: Sequence[BufferEntry], slices: Sequence[BufferSlice], num_mapped: int
) -> None:
    """Moves tensors back into their old memory, through the host, since the GPU is full.

    Args:
        backed: the range that they have moved into.
        entries: the entries that have moved.
        slices: their slices of the range.
        num_mapped: how many of the backed range's chunks are mapped; none of them is afterwards.
    """
    kept = [buffer_slice.on_device().to("cpu", copy=True) for buffer_slice in slices]
    for index in range(num_mapped):
        backed.range.unmap(index)
    for entry, buffer_slice, contents in zip(entries, slices, kept, strict=True):
        if entry.storage.resizable():
            entry.storage.resize_(buffer_slice.nbytes)
        there = bytes_of(entry.storage, buffer_slice.backed.range.tensor.device)
        there.copy_(contents)
        point_at(entry.tensors, there, -buffer_slice.offset)


class CorruptedTransferError(ResidencyError):
    """Raised when the bytes that came back from the host differ from those that were copied out."""


class FlatBufferTarget:
    """Moves a target's flat buffer to the host and back, range by range.

    Args:
        flat_buffer: holds its tensors.
        mover: copies the ranges.
        verify: whether to compare checksums of every chunk before it leaves and after it is back; waits for the GPU.
    """

    lazy_wait = False

    def __init__(self, flat_buffer: FlatBuffer, mover: Mover, *, verify: bool = False) -> None:
        self.flat_buffer = flat_buffer
        self._mover = mover
        self._verify = verify
        self._checksums: list[torch.Tensor] = []

    @property
    def placements(self) -> frozenset[Placement]:
        """Returns GPU and host; without host memory, only the GPU."""
        return frozenset({Placement.GPU, Placement.HOST} if self.flat_buffer.has_host_side else {Placement.GPU})

    @property
    def nbytes(self) -> int:
        """Returns the GPU memory that the target takes while it is on the GPU."""
        return self.flat_buffer.nbytes

    @property
    def mapped_bytes(self) -> int:
        """Returns the GPU memory that its ranges have mapped now."""
        return self.flat_buffer.mapped_bytes

    @property
    def needs_gpu_to_save(self) -> bool:
        """Returns False: a checkpoint reads the tensors where they are."""
        return False

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See `OffloadTarget`."""
        return self.flat_buffer.host_view(tensor)

    def close(self) -> None:
        """Free all memory."""
        self.flat_buffer.close()

    def start(self, placement: Placement) -> Move:
        """See `OffloadTarget`."""
        if placement is Placement.HOST:
            self.flat_buffer.drop_replaced()
            return self._leave()
        return self._come_back()

    def name_for_error(self, error: Exception) -> str:
        """Returns the name of the tensor that an error of a move is about."""
        return (
            self.flat_buffer.name_at(error)
            if isinstance(error, ChunkError)
            else f"new tensors of {self.flat_buffer.owner}"
        )

    def _leave(self) -> Move:
        if self._verify:
            self._checksums = chunk_checksums(self.flat_buffer.backed_ranges)
        return self._mover.out(self.flat_buffer.backed_ranges)

    def _come_back(self) -> Move:
        transfer = self._mover.back(self.flat_buffer.backed_ranges)
        if self._verify:
            transfer.on_arrival = self._compare
        return transfer

    def _compare(self) -> None:
        """Compare the checksums of the chunks that have come back with those of the chunks that left.

        Raises:
            CorruptedTransferError: they differ.
        """
        chunks = [(backed, chunk) for backed in self.flat_buffer.backed_ranges for chunk in backed.range.chunks]
        found = chunk_checksums(self.flat_buffer.backed_ranges)
        for (backed, chunk), before, after in zip(chunks, self._checksums, found, strict=True):
            if not torch.equal(before, after):
                name = self.flat_buffer.name_at(ChunkError(backed, chunk.start, ""))
                raise CorruptedTransferError(
                    f"The checksums of {self.flat_buffer.owner} differ after it was copied to the host and back, at "
                    f"{name} (bytes {chunk.start} to {chunk.stop} of its range); training cannot continue: restart "
                    "from the last checkpoint."
                )


def chunk_checksums(backed_ranges: Sequence[BackedRange]) -> list[torch.Tensor]:
    """Sums the 8-byte words of every chunk, 0-dim int64 modulo 2**64, on the device; ranges must be mapped."""
    return [
        backed.range.tensor[chunk].view(torch.int64).sum() for backed in backed_ranges for chunk in backed.range.chunks
    ]
