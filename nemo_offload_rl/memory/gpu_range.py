"""GPU memory at addresses that stay: a virtual address range, mapped and unmapped in chunks.

Giving memory back through torch's allocator moves addresses (which captured graphs remember) and ends in `empty_cache`,
which waits for every stream of the GPU: 1,010 ms beside a busy stream on an H200, where unmapping 6 GB takes 3 ms.

A range counts its own bytes; torch's `memory_allocated` does not know of them.
"""

import contextlib
import logging
import mmap
from collections.abc import Callable
from typing import Any, Protocol

import torch

from nemo_offload_rl.memory.cuda_driver import checked, device_tensor
from nemo_offload_rl.memory.units import MIB, round_up

logger = logging.getLogger(__name__)

CHUNK_BYTES = 256 * MIB
"""Some 25 us pass between two copies on an H200: 2% of the time with 64 MiB, 0.5% with 256 MiB. Larger chunks are given
back later, and mapped later."""


class OutOfGpuMemoryError(torch.OutOfMemoryError):
    """Says that the GPU has no memory for a chunk of a range, or for a buffer."""


class GpuRange(Protocol):
    """Defines a range of one device's memory at one address, which is mapped chunk by chunk.

    Contents of a chunk are lost when it is unmapped, and undefined when it is mapped again.
    """

    nbytes: int
    chunks: tuple[slice, ...]
    """Byte ranges, in order, that are mapped and unmapped as one."""
    tensor: torch.Tensor
    """uint8 [nbytes]; only mapped chunks of it may be touched."""

    @property
    def mapped_bytes(self) -> int:
        """Returns the bytes that are taken from the device now."""
        ...

    def map(self, index: int) -> None:
        """Take memory for a chunk that has none.

        Raises:
            OutOfGpuMemoryError: there is none.
        """
        ...

    def unmap(self, index: int) -> None:
        """Give a mapped chunk's memory back; nothing may be using it any more."""
        ...

    def close(self) -> None:
        """Give everything back, the addresses too; the tensor is of no use afterwards."""
        ...


RangeMaker = Callable[[int, torch.device, int], GpuRange]
"""From a size, a device and the size of a chunk: `make_range`, or another that keeps its contract."""


def make_range(nbytes: int, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> GpuRange:
    """Makes a range on a device, none of it mapped.

    Args:
        nbytes: size, above 0.
        device: a CUDA device, or the CPU, where a range is plain memory.
        chunk_bytes: a multiple of 2 MiB; what is mapped and unmapped as one.

    Raises:
        OutOfGpuMemoryError: the device has no room.
    """
    assert nbytes > 0 and chunk_bytes % (2 * MIB) == 0
    if device.type != "cuda":
        return HostRange(nbytes, chunk_bytes)
    try:
        return VirtualRange(nbytes, device, chunk_bytes)
    except VirtualMemoryUnsupportedError as error:
        logger.warning(
            "%s; offloaded tensors use torch's allocator instead: slower, and their addresses change at every move",
            error,
        )
        return TorchRange(nbytes, device)


class VirtualMemoryUnsupportedError(RuntimeError):
    """Says that the driver or the device does not offer the virtual memory management that a range needs."""


class VirtualRange:
    """Maps a range by CUDA's virtual memory management (cuMemAddressReserve, cuMemMap), through cuda.bindings.

    Raises:
        VirtualMemoryUnsupportedError: the device lacks it.
        OutOfGpuMemoryError: the device has no room.
    """

    def __init__(self, nbytes: int, device: torch.device, chunk_bytes: int) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise VirtualMemoryUnsupportedError(f"cuda.bindings cannot be imported ({error})") from error
        torch.cuda.current_stream(device).synchronize()  # torch has its context by now
        self._driver = driver
        self._context = checked(driver.cuCtxGetCurrent())
        index = torch.cuda.current_device() if device.index is None else device.index
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not checked(driver.cuDeviceGetAttribute(attribute, checked(driver.cuDeviceGet(index)))):
            raise VirtualMemoryUnsupportedError(f"cuda:{index} does not support virtual memory management")
        location = driver.CUmemLocation()
        location.type, location.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, index
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = location
        self._properties.requestedHandleTypes = self._handle_type(driver)
        self._access = driver.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = checked(driver.cuMemGetAllocationGranularity(self._properties, minimum))
        self.nbytes = nbytes
        self.chunks = _cut(nbytes, chunk_bytes)
        self._sizes = [round_up(chunk.stop - chunk.start, granularity) for chunk in self.chunks]
        self._reserved = sum(self._sizes)
        self._address = int(checked(driver.cuMemAddressReserve(self._reserved, 0, 0, 0)))
        self._handles: list[Any] = [None] * len(self.chunks)
        self.map(0)  # torch asks the driver whose the address is, and only mapped memory has an answer
        self.tensor = device_tensor(self._address, nbytes, index)
        self.unmap(0)

    @property
    def mapped_bytes(self) -> int:
        """Returns the bytes that are taken from the device now."""
        return sum(size for size, handle in zip(self._sizes, self._handles, strict=True) if handle is not None)

    def map(self, index: int) -> None:
        """Take memory for a chunk; callable from any thread."""
        assert self._handles[index] is None, f"chunk {index} is mapped already"
        driver, size = self._driver, self._sizes[index]
        checked(driver.cuCtxSetCurrent(self._context))  # a helper thread starts without one
        handle = self._take(size)
        address = self._address + self.chunks[index].start
        (error,) = driver.cuMemMap(address, size, 0, handle, 0)
        if int(error) == 0:
            self._handles[index] = handle
            (error,) = driver.cuMemSetAccess(address, size, [self._access], 1)
            if int(error) != 0:
                self.unmap(index)
        else:
            checked(driver.cuMemRelease(handle))
        if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:  # for page tables
            raise OutOfGpuMemoryError(f"The driver has no memory to map {size / MIB:.0f} MiB of a range.")
        checked((error,))

    def _handle_type(self, driver: Any) -> Any:
        """Returns how a chunk's memory may be handed to another process: in no way."""
        return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE

    def _take(self, size: int) -> Any:
        """Returns the driver's handle of new memory."""
        driver = self._driver
        error, handle = driver.cuMemCreate(size, self._properties, 0)
        if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfGpuMemoryError(f"The driver has no {size / MIB:.0f} MiB for a chunk of a range.")
        checked((error,))
        return handle

    def unmap(self, index: int) -> None:
        """Give a chunk's memory back; callable from any thread."""
        handle, self._handles[index] = self._handles[index], None
        assert handle is not None, f"chunk {index} is not mapped"
        driver = self._driver
        checked(driver.cuCtxSetCurrent(self._context))
        checked(driver.cuMemUnmap(self._address + self.chunks[index].start, self._sizes[index]))
        checked(driver.cuMemRelease(handle))

    def close(self) -> None:
        """Give everything back, the addresses too; waits for the device."""
        torch.cuda.synchronize()
        for index, handle in enumerate(self._handles):
            if handle is not None:
                self.unmap(index)
        checked(self._driver.cuMemAddressFree(self._address, self._reserved))


class TorchRange:
    """Takes one chunk from torch's allocator on devices without virtual memory management; its address changes."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.chunks: tuple[slice, ...] = (slice(0, nbytes),)
        try:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise OutOfGpuMemoryError(str(error)) from error
        self.unmap(0)

    @property
    def mapped_bytes(self) -> int:
        """Returns the bytes that are taken from the device now."""
        return self.tensor.untyped_storage().size()

    def map(self, index: int) -> None:
        """Take memory; every view follows, since views share the storage."""
        assert index == 0 and self.mapped_bytes == 0
        try:
            self.tensor.untyped_storage().resize_(self.nbytes)
        except torch.OutOfMemoryError as error:
            raise OutOfGpuMemoryError(str(error)) from error
        if self.tensor.is_cuda:  # a kernel of this stream may still read the block that the allocator gives
            torch.cuda.current_stream(self.tensor.device).synchronize()

    def unmap(self, index: int) -> None:
        """Give the memory back to the driver, which waits for every stream."""
        assert index == 0 and self.mapped_bytes
        self.tensor.untyped_storage().resize_(0)
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Give the memory back."""
        if self.mapped_bytes:
            self.unmap(0)


class HostRange:
    """Maps a range in host memory, for machines without a GPU; unmapped pages are freed, and read as zeros."""

    def __init__(self, nbytes: int, chunk_bytes: int) -> None:
        self.nbytes = nbytes
        self.chunks = _cut(nbytes, chunk_bytes)
        # Private: of shared memory, MADV_DONTNEED gives nothing back.
        self._memory = mmap.mmap(-1, round_up(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._mapped = [False] * len(self.chunks)
        # frombuffer(self._memory) would let go of the buffer at once, and `close` would unmap it under its views.
        self.tensor = torch.frombuffer(memoryview(self._memory), dtype=torch.uint8, count=nbytes)

    @property
    def mapped_bytes(self) -> int:
        """Returns the bytes of the chunks that are mapped now."""
        sizes = (chunk.stop - chunk.start for chunk in self.chunks)
        return sum(size for size, mapped in zip(sizes, self._mapped, strict=True) if mapped)

    def map(self, index: int) -> None:
        """Allow a chunk to be used; the kernel gives its pages at the first touch."""
        assert not self._mapped[index], f"chunk {index} is mapped already"
        self._mapped[index] = True

    def unmap(self, index: int) -> None:
        """Give a chunk's pages back to the kernel."""
        assert self._mapped[index], f"chunk {index} is not mapped"
        chunk = self.chunks[index]
        self._memory.madvise(mmap.MADV_DONTNEED, chunk.start, round_up(chunk.stop - chunk.start, mmap.PAGESIZE))
        self._mapped[index] = False

    def close(self) -> None:
        """Give the pages back; the addresses follow when the last view is gone."""
        for index, mapped in enumerate(self._mapped):
            if mapped:
                self.unmap(index)
        del self.tensor
        with contextlib.suppress(BufferError):  # views of it are still about
            self._memory.close()


def _cut(nbytes: int, chunk_bytes: int) -> tuple[slice, ...]:
    return tuple(slice(start, min(start + chunk_bytes, nbytes)) for start in range(0, nbytes, chunk_bytes))
