"""Gives tensors a home: their storages are laid out in ranges, once, and the same tensor objects then point there.

Ten thousand small tensors thus cross the link as one large one does, and their addresses never change.
"""

import dataclasses
import gc
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from nemo_offload_rl.offload.gpu_range import CHUNK_BYTES, OutOfGpuMemoryError, RangeMaker, make_range
from nemo_offload_rl.offload.pinned_arena import PinnedArena
from nemo_offload_rl.offload.transfer import ChunkError, Home, map_chunk

ALIGNMENT = 512  # bytes, as torch's allocator aligns, so that kernels make the same choices


@dataclass(frozen=True)
class Tenant:
    """A storage that is to live in a range, with everything that looks into it.

    Attributes:
        name: what messages call it.
        storage: its memory of before.
        tensors: all tensors of that storage, strided views of whatever dtype.
    """

    name: str
    storage: torch.UntypedStorage
    tensors: Sequence[torch.Tensor]

    def num_unknown_views(self) -> int:
        """How many more tensors or graphs use the storage, which would go on doing so."""
        return torch._C._storage_Use_Count(self.storage._cdata) - len(self.tensors) - 1  # one count is ours


@dataclass(frozen=True)
class Slot:
    """Where a tenant lives.

    Attributes:
        name: of the tenant.
        home: the range it lives in.
        offset: where in the range it begins, bytes.
        nbytes: its size.
        tensors: of the tenant.
    """

    name: str
    home: Home
    offset: int
    nbytes: int
    tensors: Sequence[torch.Tensor]

    def on_device(self) -> torch.Tensor:
        """uint8 [nbytes]; to be touched only while the range is mapped."""
        return self.home.range.tensor[self.offset : self.offset + self.nbytes]


class Housing:
    """The homes of one target.

    Args:
        owner: the target, for messages and for the arena's books.
        device: where the tensors are used.
        arena: gives the host's side; None for what is only ever dropped.
        chunk_bytes: what is mapped and unmapped as one.
        ranges: makes the ranges.
    """

    def __init__(
        self,
        owner: str,
        device: torch.device,
        arena: PinnedArena | None,
        chunk_bytes: int = CHUNK_BYTES,
        ranges: RangeMaker = make_range,
    ) -> None:
        self.owner = owner
        self.device = device
        self.homes: list[Home] = []
        self.slots: list[Slot] = []
        self._arena = arena
        self._chunk_bytes = chunk_bytes
        self._make_range = ranges

    @property
    def has_host_side(self) -> bool:
        """Whether the contents can leave, and not only be dropped."""
        return self._arena is not None

    @property
    def nbytes(self) -> int:
        """Of all homes, mapped or not."""
        return sum(home.range.nbytes for home in self.homes)

    @property
    def mapped_bytes(self) -> int:
        """What the homes take from the device now."""
        return sum(home.range.mapped_bytes for home in self.homes)

    def add(self, tenants: Sequence[Tenant]) -> None:
        """House more tenants in a range of their own, which stays mapped.

        A tenant's old memory is free as soon as it has moved, so that both copies of everything are never there.

        Raises:
            MemoryError: the host has no room; nothing has changed.
            OutOfGpuMemoryError: the device has no room for a tenant beside its old memory; the message names it. What
                had moved in has moved out again, to memory of its own.
            ValueError: a tenant's storage is used by something that was not named. The model cannot be used further.
        """
        if not tenants:
            return
        *offsets, total = itertools.accumulate(map(_aligned_bytes, tenants), initial=0)
        home = self._new_home(total)
        slots = [
            Slot(tenant.name, home, offset, tenant.storage.nbytes(), tenant.tensors)
            for tenant, offset in zip(tenants, offsets, strict=True)
        ]
        mapped = 0
        for number, (tenant, slot) in enumerate(zip(tenants, slots, strict=True)):
            while mapped < len(home.range.chunks) and home.range.chunks[mapped].start < slot.offset + slot.nbytes:
                try:
                    map_chunk(home.range, mapped)
                except OutOfGpuMemoryError as error:
                    _move_out(home, tenants[:number], slots[:number], mapped)
                    self._give_back(home)
                    raise OutOfGpuMemoryError(f"{tenant.name} cannot move into a range: {error}") from error
                mapped += 1
            try:
                _move_in(tenant, slot)
            except ValueError:  # the range stays, for tensors look into it
                self._release_host_side(home)
                raise
        self.homes.append(home)
        self.slots += slots

    def add_or_replace(self, tenants: Sequence[Tenant]) -> None:
        """House tenants, those of a known name and size in the place of their predecessors; see `add`."""
        places = {(slot.name, slot.nbytes): index for index, slot in enumerate(self.slots)} if tenants else {}
        new = []
        for tenant in tenants:
            index = places.get((tenant.name, tenant.storage.nbytes()))
            if index is None:
                new.append(tenant)
                continue
            self.slots[index] = dataclasses.replace(self.slots[index], tensors=tenant.tensors)
            _move_in(tenant, self.slots[index])
        self.add(new)

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A CPU tensor of the same dtype, shape and strides that looks at a housed tensor's place on the host's side.

        Its storage is its own and ends where it ends: what serialises a whole storage writes no neighbours.

        Args:
            tensor: any; None comes back for one that is not housed here.
        """
        address = tensor.untyped_storage().data_ptr()
        for home in self.homes:
            if home.range.tensor.data_ptr() == address:
                assert home.host is not None
                size = tensor.element_size()
                steps = zip(tensor.shape, tensor.stride(), strict=True)
                length = sum((count - 1) * stride for count, stride in steps) + 1 if tensor.numel() else 0
                window = home.host.window(int(tensor.storage_offset()) * size, max(length, 1) * size)
                return _view(tensor, window, 0)
        return None

    def name_at(self, error: ChunkError) -> str:
        """The tenant whose bytes begin in, or reach into, the chunk that an error is about."""
        return next(
            slot.name for slot in self.slots if slot.home is error.home and slot.offset + slot.nbytes > error.offset
        )

    def close(self) -> None:
        """Give all memory back; the tensors are of no use afterwards."""
        for home in self.homes:
            self._give_back(home)
        self.homes, self.slots = [], []

    def _new_home(self, nbytes: int) -> Home:
        gpu_range = self._make_range(nbytes, self.device, self._chunk_bytes)
        try:
            return Home(gpu_range, None if self._arena is None else self._arena.allocate(self.owner, nbytes))
        except MemoryError:
            gpu_range.close()
            raise

    def _give_back(self, home: Home) -> None:
        home.range.close()
        self._release_host_side(home)

    def _release_host_side(self, home: Home) -> None:
        if home.host is not None:
            assert self._arena is not None
            self._arena.release(home.host)


def housed_bytes(tenants: Iterable[Tenant]) -> int:
    """What tenants will take in a range, and of the arena."""
    return sum(map(_aligned_bytes, tenants))


def _aligned_bytes(tenant: Tenant) -> int:
    return -(-tenant.storage.nbytes() // ALIGNMENT) * ALIGNMENT


@torch.no_grad()
def _move_in(tenant: Tenant, slot: Slot) -> None:
    there = slot.on_device()
    there.copy_(_bytes_of(tenant.storage, there.device))
    _point(tenant.tensors, slot.home.range.tensor, slot.offset)
    # One count is ours. More of them are views that would go on using the old memory.
    others = torch._C._storage_Use_Count(tenant.storage._cdata) - 1
    if others:
        raise ValueError(
            f"{slot.name} is also used by {others} tensors or graphs that could not be found, which would not see it "
            "move; attach the engine before the first forward pass, and keep no views of parameters or buffers."
        )
    if tenant.storage.resizable():
        tenant.storage.resize_(0)  # whoever lists the tenants still holds it


@torch.no_grad()
def _move_out(home: Home, tenants: Sequence[Tenant], slots: Sequence[Slot], num_mapped: int) -> None:
    """Back into their old memory, by way of the host: the GPU is full.

    Args:
        home: they have moved into.
        tenants: that have moved.
        slots: where they live.
        num_mapped: how many of the home's chunks are mapped; none of them is afterwards.
    """
    kept = [slot.on_device().to("cpu", copy=True) for slot in slots]
    for index in range(num_mapped):
        home.range.unmap(index)
    for tenant, slot, contents in zip(tenants, slots, kept, strict=True):
        if tenant.storage.resizable():
            tenant.storage.resize_(slot.nbytes)
        there = _bytes_of(tenant.storage, slot.home.range.tensor.device)
        there.copy_(contents)
        _point(tenant.tensors, there, -slot.offset)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _point(tensors: Iterable[torch.Tensor], memory: torch.Tensor, shift: int) -> None:
    """Let tensors look at other memory, with the dtype, shape and strides that they have.

    Args:
        tensors: of one storage.
        memory: uint8, the whole of its storage.
        shift: how many bytes further into it than into their present storage.
    """
    for tensor in tensors:
        tensor.data = _view(tensor, memory, int(tensor.storage_offset()) * tensor.element_size() + shift)


def _view(tensor: torch.Tensor, memory: torch.Tensor, offset: int) -> torch.Tensor:
    """With the dtype, shape and strides of a tensor, what begins at a byte of `memory`, the whole of a storage."""
    start, rest = divmod(offset, tensor.element_size())
    assert rest == 0
    view = torch.empty(0, dtype=tensor.dtype, device=memory.device)
    return view.set_(memory.untyped_storage(), start, tensor.shape, tensor.stride())


def tensors_by_storage(storages: Iterable[torch.UntypedStorage]) -> dict[int, list[torch.Tensor]]:
    """Every tensor object in this process that looks into one of some storages, by the storage's address.

    megatron-core keeps views of a DDP buffer in parameters, `main_grad`, buckets and optimizer groups; to ask the
    garbage collector finds them all, and those of its next version.
    """
    found: dict[int, list[torch.Tensor]] = {storage.data_ptr(): [] for storage in storages}
    for candidate in gc.get_objects():
        # type(), since isinstance() asks proxies for a __class__, which some of them then import something for.
        if issubclass(type(candidate), torch.Tensor) and (address := _address(candidate)) in found:
            found[address].append(candidate)
    return found


def _address(tensor: torch.Tensor) -> int | None:
    """Of a tensor's storage; None for one that has no memory itself, such as a DTensor or a lazy module's parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return tensor.untyped_storage().data_ptr() if torch._C._has_storage(tensor) else None
        except (RuntimeError, ValueError):  # what torch says of a wrapper; the tensors in it are found by themselves
            return None
