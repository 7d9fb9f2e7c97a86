"""Shares memory between processes at fixed addresses, and allocates it only while it is needed.

A range keeps its address for as long as it lives, in the process that made it and in each one that maps it, so graphs
that were captured with it can be replayed. Its memory is allocated and freed in between, and loses its contents. It
comes from the driver's virtual memory management and is passed to another process as a file descriptor: CUDA's older
IPC, which `shared_buffer` uses, exports no part of a virtual range. On a CPU it is an anonymous file (memfd).
"""

import contextlib
import ctypes
import mmap
import os
import secrets
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nemo_offload_rl.memory.gpu_range import OutOfGpuMemoryError, VirtualMemoryUnsupportedError, VirtualRange, checked
from nemo_offload_rl.memory.shared_buffer import HostBufferHandle, SharedBufferError, SharedHostBuffer
from nemo_offload_rl.memory.units import MIB, round_up

_TIMEOUT_S = 30
_CREDENTIALS = struct.Struct("3i")  # process, user and group


class DescriptorError(RuntimeError):
    """Raised when this process cannot receive a descriptor that another process offers."""


@dataclass(frozen=True)
class DescriptorAddress:
    """Identifies the process and the socket that offer a descriptor; it can be pickled.

    Attributes:
        pid: The process that offers the descriptor.
        socket_name: The name of its abstract Unix socket.
    """

    pid: int
    socket_name: str

    def receive(self) -> int:
        """Receive the descriptor into this process; the caller has to close it.

        Raises:
            DescriptorError: If the descriptor is no longer offered, or not to this process's user.
        """
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(_TIMEOUT_S)
                connection.connect(f"\0{self.socket_name}")
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        except OSError as error:
            raise DescriptorError(
                f"Cannot receive a file descriptor from process {self.pid} ({error}); both processes must be on one "
                "node, and in one network namespace."
            ) from error
        if not descriptors:
            raise DescriptorError(
                f"Process {self.pid} did not send its file descriptor; both processes must belong to the same user."
            )
        return descriptors[0]


class DescriptorOffer:
    """Sends a descriptor to each process of the same user that connects, until the offer is closed.

    Args:
        descriptor: The descriptor to send; `close` closes it, too, and so does an error of the constructor.

    Raises:
        OSError: This machine has no abstract Unix sockets.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.address = DescriptorAddress(os.getpid(), f"nemo_offload_rl-{secrets.token_hex(16)}")
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, descriptor)
            self._listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._listener.bind(f"\0{self.address.socket_name}")
            self._listener.listen()
            self._thread = threading.Thread(target=self._serve, name="descriptor offer", daemon=True)
            self._thread.start()
            undo.pop_all()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # the listener was closed
                return
            with connection, contextlib.suppress(OSError):  # the peer has disconnected
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                if _CREDENTIALS.unpack(credentials)[1] == os.getuid():
                    socket.send_fds(connection, [b"d"], [self._descriptor])

    def close(self) -> None:
        """End the offer; descriptors that other processes have received stay open."""
        self._listener.shutdown(socket.SHUT_RDWR)  # close() alone would leave the thread blocked in accept()
        self._thread.join()
        self._listener.close()
        os.close(self._descriptor)


class PeerRange(Protocol):
    """Defines this process's mapping of another process's range, at a fixed address."""

    tensor: torch.Tensor
    """uint8 [nbytes]; may be accessed only while it is mapped."""

    def map(self, handle: Any) -> None:
        """Map the memory that the owner has allocated now.

        Raises:
            SharedBufferError: This process cannot open it.
        """
        ...

    def unmap(self) -> None:
        """Unmap the memory, which nothing may be using now; on a GPU the owner's `unmap` frees it only after this."""
        ...

    def close(self) -> None:
        """Free the addresses of an unmapped range; the tensor must not be used afterwards."""
        ...


class RangeHandle(Protocol):
    """Lets another process map the memory that a `SharedRange` has now; it can be pickled and compared."""

    def make_peer(self) -> PeerRange:
        """Reserve addresses in a process that did not make the range; nothing is mapped there yet.

        Raises:
            SharedBufferError: This process cannot open the memory.
        """
        ...


class SharedRange(Protocol):
    """Defines a range of this process that other processes map."""

    tensor: torch.Tensor
    """uint8 [nbytes], at a fixed address; may be accessed only while it is mapped."""

    def map(self) -> RangeHandle:
        """Allocate memory with undefined contents, and return the handle with which others map it until `unmap`.

        Raises:
            OutOfGpuMemoryError: The GPU does not have that much memory.
        """
        ...

    def unmap(self) -> None:
        """Unmap the memory; it is freed as soon as no other process maps it."""
        ...

    def close(self) -> None:
        """Free the addresses of an unmapped range; the tensor must not be used afterwards."""
        ...


def make_shared_range(nbytes: int, device: torch.device) -> SharedRange:
    """Makes an unmapped range on a device.

    Args:
        nbytes: Size, above 0.
        device: The current CUDA device, or the CPU.

    Raises:
        OutOfGpuMemoryError: The GPU does not have that much memory.
        VirtualMemoryUnsupportedError: The GPU's memory cannot be shared in this way.
    """
    assert nbytes > 0
    return SharedGpuRange(nbytes, device) if device.type == "cuda" else SharedHostRange(nbytes)


class SharedGpuRange:
    """Shares one chunk of a `VirtualRange` with other processes (see `SharedRange`).

    Raises:
        OutOfGpuMemoryError: The GPU does not have that much memory.
        VirtualMemoryUnsupportedError: The GPU's memory cannot be shared in this way.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._range = _ExportedRange(nbytes, device, _single_chunk_bytes(nbytes))
        self._offers: list[DescriptorOffer] = []
        self.tensor = self._range.tensor

    def map(self) -> RangeHandle:
        """Allocate memory and offer it to other processes."""
        self._range.map(0)
        try:
            self._offers.append(DescriptorOffer(self._range.export()))
        except BaseException:
            self._range.unmap(0)
            raise
        return GpuRangeHandle(self._range.nbytes, self._offers[-1].address)

    def unmap(self) -> None:
        """Unmap the memory; it is freed as soon as no other process maps it."""
        torch.cuda.current_stream().synchronize()
        self._offers.pop().close()
        self._range.unmap(0)

    def close(self) -> None:
        """Free the addresses."""
        self._range.close()


class _ExportedRange(VirtualRange):
    """Allocates range memory that other processes may map."""

    def _handle_type(self, driver: Any) -> Any:
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        if not checked(driver.cuDeviceGetAttribute(attribute, checked(driver.cuCtxGetDevice()))):
            raise VirtualMemoryUnsupportedError("this GPU's memory cannot be exported as a file descriptor")
        return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _allocate(self, size: int) -> Any:
        try:
            return super()._allocate(size)
        except OutOfGpuMemoryError:
            torch.cuda.empty_cache()  # frees blocks that torch caches and does not use
            return super()._allocate(size)

    def export(self) -> int:
        """Returns a new descriptor of the mapped memory, which stays allocated until the descriptor is closed."""
        driver = self._driver
        return int(checked(driver.cuMemExportToShareableHandle(self._handles[0], self._handle_type(driver), 0)))


@dataclass(frozen=True)
class GpuRangeHandle:
    """Lets another process map a `SharedGpuRange` (see `RangeHandle`).

    Attributes:
        nbytes: Bytes of the range.
        descriptor: Where the owner offers the descriptor of its memory.
    """

    nbytes: int
    descriptor: DescriptorAddress

    def make_peer(self) -> PeerRange:
        """Reserve addresses on the current device."""
        return PeerGpuRange(self)

    def receive(self) -> int:
        """Return a descriptor of the memory; the caller has to close it."""
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
        """Map the memory that the owner has allocated now."""
        self._range.handle = handle
        self._range.map(0)

    def unmap(self) -> None:
        """Unmap the memory, once the current stream has done its queued work."""
        torch.cuda.current_stream().synchronize()
        self._range.unmap(0)

    def close(self) -> None:
        """Free the addresses."""
        self._range.close()


class _ImportedRange(VirtualRange):
    """Maps another process's memory into a range of this process."""

    def __init__(self, handle: GpuRangeHandle) -> None:
        self.handle = handle
        device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(handle.nbytes, device, _single_chunk_bytes(handle.nbytes))

    def _allocate(self, size: int) -> Any:
        driver = self._driver
        descriptor = self.handle.receive()
        try:
            kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            error, memory = driver.cuMemImportFromShareableHandle(descriptor, kind)
        finally:
            os.close(descriptor)  # it would keep the memory allocated
        if int(error) != 0:
            raise SharedBufferError(
                f"The CUDA driver cannot import {size / MIB:.0f} MiB of another process's memory on "
                f"{torch.cuda.get_device_name()} ({error!r}); both processes must see the same GPU."
            )
        return memory


def _single_chunk_bytes(nbytes: int) -> int:
    """Returns the chunk size with which a range is one chunk."""
    return round_up(nbytes, 2 * MIB)


class SharedHostRange:
    """Shares host memory with other processes; the file stays while its pages are freed (see `SharedRange`)."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = SharedHostBuffer(nbytes)
        self._nbytes = nbytes
        self.tensor = self._buffer.tensor

    def map(self) -> RangeHandle:
        """Return the handle of the file; the kernel allocates its pages at the first touch."""
        return HostRangeHandle(self._buffer.handle)

    def unmap(self) -> None:
        """Return the pages to the kernel, also those that other processes map; they read as zeros."""
        _give_pages_back(self.tensor.data_ptr(), round_up(self._nbytes, mmap.PAGESIZE))

    def close(self) -> None:
        """Free the memory, as soon as no view of the tensor is left."""
        del self.tensor
        self._buffer.close()


@dataclass(frozen=True)
class HostRangeHandle:
    """Lets another process map a `SharedHostRange` (see `RangeHandle`).

    Attributes:
        buffer: The handle of the file.
    """

    buffer: HostBufferHandle

    def make_peer(self) -> PeerRange:
        """Map the file; the kernel allocates its pages at the first touch."""
        return PeerHostRange(self.buffer)


class PeerHostRange:
    """Maps a `SharedHostRange` until `close`; only the owner frees its pages (see `PeerRange`)."""

    def __init__(self, buffer: HostBufferHandle) -> None:
        self._open = contextlib.ExitStack()
        self.tensor = self._open.enter_context(buffer.opened())

    def map(self, handle: HostRangeHandle) -> None:
        """Does nothing: the file is mapped already."""

    def unmap(self) -> None:
        """Does nothing: the owner frees the pages."""

    def close(self) -> None:
        """Unmap the file, as soon as no view of the tensor is left."""
        del self.tensor
        self._open.close()


def _give_pages_back(address: int, nbytes: int) -> None:
    """Punches a hole into the file behind a mapping, since MADV_DONTNEED does not free the pages of a file."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.MADV_REMOVE) != 0:
        raise OSError(ctypes.get_errno(), "madvise(MADV_REMOVE) did not free pages of shared memory")
