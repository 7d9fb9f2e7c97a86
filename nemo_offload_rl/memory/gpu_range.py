"""Provides GPU memory at fixed addresses: virtual address ranges that are mapped and unmapped in chunks.

Freeing memory through torch's allocator changes the addresses (which captured graphs contain) and needs `empty_cache`,
which waits for every stream of the GPU: 1,010 ms beside a busy stream on an H200, where unmapping 6 GB takes 3 ms.

A range counts its own bytes; torch's `memory_allocated` does not include them.
"""

import contextlib
import logging
import mmap
from collections.abc import Callable
from typing import Any, Protocol

import torch

from nemo_offload_rl.memory.units import MIB, round_up


def checked(result: tuple[Any, ...]) -> Any:
    """Returns the value of a driver call.

    Raises:
        RuntimeError: the driver reported an error.
    """
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"The CUDA driver reported {error!r}; the worker cannot continue.")
    return values[0] if len(values) == 1 else None


def device_tensor(address: int, nbytes: int, device_index: int) -> torch.Tensor:
    """Wraps GPU memory at `address` as a tensor, uint8 [nbytes]; the tensor does not own the memory."""
    tensor = torch.as_tensor(_ArrayInterface(address, nbytes), device=torch.device("cuda", device_index))
    assert tensor.data_ptr() == address
    return tensor


class _ArrayInterface:
    """Exposes device memory to torch as a uint8 array."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


logger = logging.getLogger(__name__)

CHUNK_BYTES = 256 * MIB
"""An H200 leaves some 25 us between two copies: 2% of the time with 64 MiB chunks, 0.5% with 256 MiB. Larger chunks are
unmapped later, and mapped later."""


class OutOfGpuMemoryError(torch.OutOfMemoryError):
    """Raised when the GPU has no memory for a chunk of a range, or for a buffer."""


class GpuRange(Protocol):
    """Defines an address range on one device whose memory is mapped chunk by chunk.

    A chunk loses its contents when it is unmapped; they are undefined when it is mapped again.
    """

    nbytes: int
    chunks: tuple[slice, ...]
    """Byte ranges of the chunks, in order; each is mapped and unmapped as a whole."""
    tensor: torch.Tensor
    """uint8 [nbytes]; only its mapped chunks may be accessed."""

    @property
    def mapped_bytes(self) -> int:
        """Returns the bytes of device memory that are mapped now."""
        ...

    def map(self, index: int) -> None:
        """Map memory to an unmapped chunk.

        Raises:
            OutOfGpuMemoryError: the device has no memory for it.
        """
        ...

    def unmap(self, index: int) -> None:
        """Unmap a chunk and free its memory; no kernel or copy may be using it any more."""
        ...

    def close(self) -> None:
        """Free the memory and the addresses; the tensor must not be used afterwards."""
        ...


RangeMaker = Callable[[int, torch.device, int], GpuRange]
"""Makes a range from its size, its device and the size of a chunk: `make_range`, or a function with its contract."""


def make_range(nbytes: int, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> GpuRange:
    """Makes a range on a device, with no chunk mapped.

    Args:
        nbytes: size, above 0.
        device: a CUDA device, or the CPU, where a range is plain memory.
        chunk_bytes: size of the chunks that are mapped and unmapped; a multiple of 2 MiB.

    Raises:
        OutOfGpuMemoryError: the device has no memory for it.
    """
    assert nbytes > 0 and chunk_bytes % (2 * MIB) == 0
    if device.type != "cuda":
        return HostRange(nbytes, chunk_bytes)
    try:
        return VirtualRange(nbytes, device, chunk_bytes)
    except VirtualMemoryUnsupportedError as error:
        logger.warning(
            "%s; offloaded tensors use torch's allocator instead, which is slower and changes their addresses at "
            "every move",
            error,
        )
        return TorchRange(nbytes, device)


class VirtualMemoryUnsupportedError(RuntimeError):
    """Raised when the driver or the device lacks the virtual memory management that a range needs."""


class VirtualRange:
    """Implements a range with CUDA's virtual memory management (cuMemAddressReserve, cuMemMap), through cuda.bindings.

    Raises:
        VirtualMemoryUnsupportedError: the device lacks it.
        OutOfGpuMemoryError: the device has no memory for it.
    """

    def __init__(self, nbytes: int, device: torch.device, chunk_bytes: int) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise VirtualMemoryUnsupportedError(f"cuda.bindings cannot be imported ({error})") from error
        torch.cuda.current_stream(device).synchronize()  # creates torch's CUDA context if there is none
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
        try:
            self.map(0)  # torch asks the driver for the device of the address, which only mapped memory has
            self.tensor = device_tensor(self._address, nbytes, index)
            self.unmap(0)
        except BaseException:
            self.close()
            raise

    @property
    def mapped_bytes(self) -> int:
        """Returns the bytes of device memory that are mapped now."""
        return sum(size for size, handle in zip(self._sizes, self._handles, strict=True) if handle is not None)

    def map(self, index: int) -> None:
        """Map memory to a chunk; callable from any thread."""
        assert self._handles[index] is None, f"chunk {index} is mapped already"
        driver, size = self._driver, self._sizes[index]
        checked(driver.cuCtxSetCurrent(self._context))  # a helper thread starts without a current context
        handle = self._allocate(size)
        address = self._address + self.chunks[index].start
        (error,) = driver.cuMemMap(address, size, 0, handle, 0)
        if int(error) == 0:
            self._handles[index] = handle
            (error,) = driver.cuMemSetAccess(address, size, [self._access], 1)
            if int(error) != 0:
                self.unmap(index)
        else:
            checked(driver.cuMemRelease(handle))
        if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:  # no memory for page tables
            raise OutOfGpuMemoryError(
                f"The CUDA driver ran out of memory while mapping {size / MIB:.0f} MiB of a memory range."
            )
        checked((error,))

    def _handle_type(self, driver: Any) -> Any:
        """Returns the handle type with which other processes can map a chunk's memory: none."""
        return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE

    def _allocate(self, size: int) -> Any:
        """Allocates memory for a chunk and returns the driver's handle of it."""
        driver = self._driver
        error, handle = driver.cuMemCreate(size, self._properties, 0)
        if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfGpuMemoryError(
                f"cuMemCreate could not allocate {size / MIB:.0f} MiB of GPU memory for a chunk of a memory range."
            )
        checked((error,))
        return handle

    def unmap(self, index: int) -> None:
        """Unmap a chunk and free its memory; callable from any thread."""
        handle, self._handles[index] = self._handles[index], None
        assert handle is not None, f"chunk {index} is not mapped"
        driver = self._driver
        checked(driver.cuCtxSetCurrent(self._context))
        checked(driver.cuMemUnmap(self._address + self.chunks[index].start, self._sizes[index]))
        checked(driver.cuMemRelease(handle))

    def close(self) -> None:
        """Free the memory and the addresses; waits for the device."""
        torch.cuda.synchronize()
        for index, handle in enumerate(self._handles):
            if handle is not None:
                self.unmap(index)
        checked(self._driver.cuMemAddressFree(self._address, self._reserved))


class TorchRange:
    """Allocates one chunk with torch's allocator on devices without virtual memory management; its address changes."""

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
        """Returns the bytes of device memory that are mapped now."""
        return self.tensor.untyped_storage().size()

    def map(self, index: int) -> None:
        """Allocate the memory; all views of the tensor see it, since they share its storage."""
        assert index == 0 and self.mapped_bytes == 0
        try:
            self.tensor.untyped_storage().resize_(self.nbytes)
        except torch.OutOfMemoryError as error:
            raise OutOfGpuMemoryError(str(error)) from error
        if self.tensor.is_cuda:  # a kernel on this stream may still read the block that the allocator reuses
            torch.cuda.current_stream(self.tensor.device).synchronize()

    def unmap(self, index: int) -> None:
        """Free the memory to the driver (`empty_cache`), which waits for every stream."""
        assert index == 0 and self.mapped_bytes
        self.tensor.untyped_storage().resize_(0)
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Free the memory."""
        if self.mapped_bytes:
            self.unmap(0)


class HostRange:
    """Provides a range in host memory, for machines without a GPU; unmapped pages are freed, and read as zeros."""

    def __init__(self, nbytes: int, chunk_bytes: int) -> None:
        self.nbytes = nbytes
        self.chunks = _cut(nbytes, chunk_bytes)
        # MAP_PRIVATE, since MADV_DONTNEED does not free the pages of a shared mapping.
        self._memory = mmap.mmap(-1, round_up(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._mapped = [False] * len(self.chunks)
        # torch.frombuffer(self._memory) would release the buffer at once, and `close` would unmap it under its views.
        self.tensor = torch.frombuffer(memoryview(self._memory), dtype=torch.uint8, count=nbytes)

    @property
    def mapped_bytes(self) -> int:
        """Returns the bytes of the chunks that are mapped now."""
        sizes = (chunk.stop - chunk.start for chunk in self.chunks)
        return sum(size for size, mapped in zip(sizes, self._mapped, strict=True) if mapped)

    def map(self, index: int) -> None:
        """Mark a chunk as mapped; the kernel allocates its pages at the first touch."""
        assert not self._mapped[index], f"chunk {index} is mapped already"
        self._mapped[index] = True

    def unmap(self, index: int) -> None:
        """Return a chunk's pages to the kernel."""
        assert self._mapped[index], f"chunk {index} is not mapped"
        chunk = self.chunks[index]
        self._memory.madvise(mmap.MADV_DONTNEED, chunk.start, round_up(chunk.stop - chunk.start, mmap.PAGESIZE))
        self._mapped[index] = False

    def close(self) -> None:
        """Free the pages; the addresses are freed when no tensor views them any more."""
        for index, mapped in enumerate(self._mapped):
            if mapped:
                self.unmap(index)
        del self.tensor
        with contextlib.suppress(BufferError):  # tensors still view it
            self._memory.close()


def _cut(nbytes: int, chunk_bytes: int) -> tuple[slice, ...]:
    return tuple(slice(start, min(start + chunk_bytes, nbytes)) for start in range(0, nbytes, chunk_bytes))
