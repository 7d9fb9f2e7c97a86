"""Memory at addresses that stay in two processes, and that is there only while both need it.

A range keeps its address for as long as it lives, in the process that made it and in each one that maps it, so graphs
that were captured with it can be replayed. Its memory is taken and given back in between, contents and all. It comes
from the driver's virtual memory management and goes to another process as a file descriptor: CUDA's older IPC, which
`shared_buffer` uses, exports no part of a virtual range. On a CPU it is a file without a name.
"""

import contextlib
import ctypes
import mmap
import os
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nemo_offload_rl.memory.cuda_driver import checked
from nemo_offload_rl.memory.descriptors import DescriptorAddress, DescriptorError, DescriptorOffer
from nemo_offload_rl.memory.gpu_range import VirtualMemoryUnsupportedError, VirtualRange
from nemo_offload_rl.memory.shared_buffer import HostBufferHandle, SharedBufferError, SharedHostBuffer
from nemo_offload_rl.memory.units import MIB, round_up


class PeerRange(Protocol):
    """Defines a range of another process as this one maps it, at one address."""

    tensor: torch.Tensor
    """uint8 [nbytes]; to be touched only while it is mapped."""

    def map(self, handle: Any) -> None:
        """Map the memory that the owner has now.

        Raises:
            SharedBufferError: It cannot be opened from here.
        """
        ...

    def unmap(self) -> None:
        """Let go of the memory, which the owner's `unmap` alone does not give back; nothing may be using it now."""
        ...

    def close(self) -> None:
        """Give the addresses back, of what is not mapped; the tensor is of no use afterwards."""
        ...


class RangeHandle(Protocol):
    """Names the memory that a `SharedRange` has now to another process; it can be pickled and compared."""

    def make_peer(self) -> PeerRange:
        """Reserve addresses in this process, not the one that made the range; nothing is mapped there yet.

        Raises:
            SharedBufferError: The memory cannot be opened from here.
        """
        ...


class SharedRange(Protocol):
    """Defines a range of this process that others map."""

    tensor: torch.Tensor
    """uint8 [nbytes], at one address; to be touched only while it is mapped."""

    def map(self) -> RangeHandle:
        """Take memory, with undefined contents, and return what others map it by until `unmap`.

        Raises:
            OutOfGpuMemoryError: There is none.
        """
        ...

    def unmap(self) -> None:
        """Give the memory back, as soon as no other process maps it."""
        ...

    def close(self) -> None:
        """Give the addresses back, of what is not mapped; the tensor is of no use afterwards."""
        ...


def make_shared_range(nbytes: int, device: torch.device) -> SharedRange:
    """Makes a range on a device, not mapped.

    Args:
        nbytes: Size, above 0.
        device: The current CUDA device, or the CPU.

    Raises:
        OutOfGpuMemoryError: The GPU has not that much.
        VirtualMemoryUnsupportedError: The GPU's memory cannot be shared so.
    """
    assert nbytes > 0
    return SharedGpuRange(nbytes, device) if device.type == "cuda" else SharedHostRange(nbytes)


class SharedGpuRange:
    """Shares one chunk of a `VirtualRange` with other processes (see `SharedRange`).

    Raises:
        OutOfGpuMemoryError: The GPU has not that much.
        VirtualMemoryUnsupportedError: The GPU's memory cannot be shared so.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._range = _ExportedRange(nbytes, device, _whole(nbytes))
        self._offers: list[DescriptorOffer] = []
        self.tensor = self._range.tensor

    def map(self) -> RangeHandle:
        """Take memory and offer it to other processes."""
        self._range.map(0)
        self._offers.append(DescriptorOffer(self._range.export()))
        return GpuRangeHandle(self._range.nbytes, self._offers[-1].address)

    def unmap(self) -> None:
        """Give the memory back, as soon as no other process maps it."""
        torch.cuda.current_stream().synchronize()
        self._offers.pop().close()
        self._range.unmap(0)

    def close(self) -> None:
        """Give the addresses back."""
        self._range.close()


class _ExportedRange(VirtualRange):
    """A range whose memory other processes may map."""

    def _handle_type(self, driver: Any) -> Any:
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        if not checked(driver.cuDeviceGetAttribute(attribute, checked(driver.cuCtxGetDevice()))):
            raise VirtualMemoryUnsupportedError("this GPU's memory cannot be handed over as a file descriptor")
        return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def export(self) -> int:
        """Returns a new descriptor of the mapped memory, which it keeps until it is closed."""
        driver = self._driver
        return int(checked(driver.cuMemExportToShareableHandle(self._handles[0], self._handle_type(driver), 0)))


@dataclass(frozen=True)
class GpuRangeHandle:
    """Names a `SharedGpuRange` to another process (see `RangeHandle`).

    Attributes:
        nbytes: Bytes of the range.
        descriptor: Where the descriptor of its memory is offered.
    """

    nbytes: int
    descriptor: DescriptorAddress

    def make_peer(self) -> PeerRange:
        """Reserve addresses on the current device."""
        return PeerGpuRange(self)

    def receive(self) -> int:
        """Return a descriptor of the memory, which has to be closed."""
        try:
            return self.descriptor.receive()
        except DescriptorError as error:
            raise SharedBufferError(f"{self.nbytes / MIB:.0f} MiB of GPU memory cannot be shared: {error}") from error


class PeerGpuRange:
    """Maps a `SharedGpuRange` of another process (see `PeerRange`)."""

    def __init__(self, handle: GpuRangeHandle) -> None:
        self._range = _ImportedRange(handle)
        self.tensor = self._range.tensor

    def map(self, handle: GpuRangeHandle) -> None:
        """Map the memory that the owner has now."""
        self._range.handle = handle
        self._range.map(0)

    def unmap(self) -> None:
        """Let go of the memory, once the current stream has done its work."""
        torch.cuda.current_stream().synchronize()
        self._range.unmap(0)

    def close(self) -> None:
        """Give the addresses back."""
        self._range.close()


class _ImportedRange(VirtualRange):
    """A range that is mapped with another process's memory."""

    def __init__(self, handle: GpuRangeHandle) -> None:
        self.handle = handle
        device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(handle.nbytes, device, _whole(handle.nbytes))

    def _take(self, size: int) -> Any:
        driver = self._driver
        descriptor = self.handle.receive()
        try:
            kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            error, memory = driver.cuMemImportFromShareableHandle(descriptor, kind)
        finally:
            os.close(descriptor)  # it would keep the memory
        if int(error) != 0:
            raise SharedBufferError(
                f"The driver does not open {size / MIB:.0f} MiB of another process on "
                f"{torch.cuda.get_device_name()} ({error!r}); both must see the same GPU."
            )
        return memory


def _whole(nbytes: int) -> int:
    """The size of a chunk that is the whole range."""
    return round_up(nbytes, 2 * MIB)


class SharedHostRange:
    """Shares host memory with other processes; its file stays while its pages come and go (see `SharedRange`)."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = SharedHostBuffer(nbytes)
        self._nbytes = nbytes
        self.tensor = self._buffer.tensor

    def map(self) -> RangeHandle:
        """Allow the memory to be used; the kernel gives its pages at the first touch."""
        return HostRangeHandle(self._buffer.handle)

    def unmap(self) -> None:
        """Give the pages back to the kernel, those that other processes map, too; they read as zeros."""
        _give_pages_back(self.tensor.data_ptr(), round_up(self._nbytes, mmap.PAGESIZE))

    def close(self) -> None:
        """Give everything back, as soon as no view of the tensor is left."""
        del self.tensor
        self._buffer.close()


@dataclass(frozen=True)
class HostRangeHandle:
    """Names a `SharedHostRange` to another process (see `RangeHandle`).

    Attributes:
        buffer: Names the file.
    """

    buffer: HostBufferHandle

    def make_peer(self) -> PeerRange:
        """Map the file, whose pages come with the first touch."""
        return PeerHostRange(self.buffer)


class PeerHostRange:
    """Maps a `SharedHostRange` for good: its owner alone gives the pages back (see `PeerRange`)."""

    def __init__(self, buffer: HostBufferHandle) -> None:
        self._open = contextlib.ExitStack()
        self.tensor = self._open.enter_context(buffer.opened())

    def map(self, handle: HostRangeHandle) -> None:
        """Does nothing: the file is mapped."""

    def unmap(self) -> None:
        """Does nothing: the owner gives the pages back."""

    def close(self) -> None:
        """Unmap the file, as soon as no view of the tensor is left."""
        del self.tensor
        self._open.close()


def _give_pages_back(address: int, nbytes: int) -> None:
    """Punch a hole into the file behind a mapping; MADV_DONTNEED gives no page of a file back."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_REMOVE) != 0:
        raise OSError(ctypes.get_errno(), "the kernel does not take back pages of shared memory")
