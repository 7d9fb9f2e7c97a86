"""Shares memory with other processes of the same node: GPU memory through CUDA IPC, or host memory.

When a process is killed, the driver and the kernel free both kinds, so that nothing is left behind.
"""

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from nemo_offload_rl.memory.gpu_range import OutOfGpuMemoryError, checked, device_tensor
from nemo_offload_rl.memory.units import MIB


class SharedBufferError(RuntimeError):
    """Raised when this process cannot open another process's memory."""


class BufferHandle(Protocol):
    """Lets another process open a `SharedBuffer`; it can be pickled."""

    def opened(self) -> contextlib.AbstractContextManager[torch.Tensor]:
        """Map the buffer, in a process that did not make it, as uint8 [nbytes] until the context ends.

        Raises:
            SharedBufferError: this process cannot open it.
        """
        ...


class SharedBuffer(Protocol):
    """Defines memory of this process that others may open; they must close it before this process does."""

    tensor: torch.Tensor
    """uint8 [nbytes]."""

    @property
    def handle(self) -> BufferHandle:
        """Returns the handle with which another process opens it."""
        ...

    def close(self) -> None:
        """Free the memory; the tensor must not be used afterwards."""
        ...


def make_shared_buffer(nbytes: int, device: torch.device) -> SharedBuffer:
    """Makes a buffer on a device.

    Args:
        nbytes: size, above 0.
        device: the current CUDA device, or the CPU.

    Raises:
        OutOfGpuMemoryError: the GPU does not have that much memory.
        OSError: the host does not.
    """
    assert nbytes > 0
    return SharedGpuBuffer(nbytes) if device.type == "cuda" else SharedHostBuffer(nbytes)


@dataclass(frozen=True)
class GpuBufferHandle:
    """Lets another process open a `SharedGpuBuffer` (see `BufferHandle`).

    Attributes:
        nbytes: size of the buffer.
        ipc_handle: the driver's CUipcMemHandle.
    """

    nbytes: int
    ipc_handle: bytes

    @contextlib.contextmanager
    def opened(self) -> Iterator[torch.Tensor]:
        """Map the buffer on the current device; waits for the device before it unmaps the buffer."""
        from cuda.bindings import driver

        torch.cuda.current_stream().synchronize()  # creates torch's CUDA context if there is none
        handle = driver.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), self.ipc_handle, driver.CU_IPC_HANDLE_SIZE)
        peer = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        error, address = driver.cuIpcOpenMemHandle(handle, peer)
        if int(error) != 0:
            raise SharedBufferError(
                f"CUDA IPC cannot open {self.nbytes / MIB:.0f} MiB of another process on "
                f"{torch.cuda.get_device_name()} ({error!r}); both must be on one node and see the same GPU."
            )
        try:
            yield device_tensor(int(address), self.nbytes, torch.cuda.current_device())
        finally:
            torch.cuda.synchronize()
            checked(driver.cuIpcCloseMemHandle(address))


class SharedGpuBuffer:
    """Allocates GPU memory with the driver's cuMemAlloc, since CUDA IPC exports no part of a virtual range.

    Args:
        nbytes: size, above 0.

    Raises:
        OutOfGpuMemoryError: the GPU does not have that much memory.
    """

    def __init__(self, nbytes: int) -> None:
        from cuda.bindings import driver

        torch.cuda.current_stream().synchronize()  # creates torch's CUDA context if there is none
        error, address = driver.cuMemAlloc(nbytes)
        if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            torch.cuda.empty_cache()  # frees blocks that torch caches and does not use
            error, address = driver.cuMemAlloc(nbytes)
        if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfGpuMemoryError(
                f"cuMemAlloc could not allocate {nbytes / MIB:.0f} MiB of GPU memory for a buffer that processes share."
            )
        checked((error,))
        self._driver = driver
        self._address = address
        try:
            self.tensor = device_tensor(int(address), nbytes, torch.cuda.current_device())
            handle = checked(driver.cuIpcGetMemHandle(address))
        except BaseException:
            self.close()
            raise
        self.handle = GpuBufferHandle(nbytes, ctypes.string_at(handle.getPtr(), driver.CU_IPC_HANDLE_SIZE))

    def close(self) -> None:
        """Free the memory; waits for the device."""
        checked(self._driver.cuMemFree(self._address))


@dataclass(frozen=True)
class HostBufferHandle:
    """Lets another process open a `SharedHostBuffer` (see `BufferHandle`).

    Attributes:
        nbytes: size of the buffer.
        pid: the process that made the buffer.
        descriptor: the number of its file's descriptor in that process.
        node: identifies that process's node and container, in which alone `pid` is valid.
    """

    nbytes: int
    pid: int
    descriptor: int
    node: str

    @contextlib.contextmanager
    def opened(self) -> Iterator[torch.Tensor]:
        """Map the buffer; tensors that outlive the context keep it mapped."""
        here = _node()
        if here != self.node:
            raise SharedBufferError(
                f"Host memory of process {self.pid} on {self.node} cannot be opened on {here}: both processes must be "
                "on one node, and in one container."
            )
        try:
            descriptor = os.open(f"/proc/{self.pid}/fd/{self.descriptor}", os.O_RDWR)
        except OSError as error:
            raise SharedBufferError(
                f"Host memory of process {self.pid} cannot be opened ({error}); that process must be alive and of the "
                "same user."
            ) from error
        memory = _map(descriptor, self.nbytes)
        try:
            yield torch.frombuffer(memoryview(memory), dtype=torch.uint8, count=self.nbytes)
        finally:
            with contextlib.suppress(BufferError):  # tensors still view it
                memory.close()


class SharedHostBuffer:
    """Allocates host memory that is backed by an anonymous file (memfd).

    Args:
        nbytes: size, above 0.
    """

    def __init__(self, nbytes: int) -> None:
        self._descriptor = os.memfd_create("nemo_offload_rl", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, nbytes)
        memory = _map(os.dup(self._descriptor), nbytes)
        # torch.frombuffer(memory) would release the buffer at once.
        self.tensor = torch.frombuffer(memoryview(memory), dtype=torch.uint8, count=nbytes)
        self.handle = HostBufferHandle(nbytes, os.getpid(), self._descriptor, _node())

    def close(self) -> None:
        """Free the memory, as soon as no view of the tensor is left."""
        del self.tensor
        os.close(self._descriptor)


def _map(descriptor: int, nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)  # the mapping stays


def _node() -> str:
    """Returns a name that is the same for all processes that can address each other by process id."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{os.uname().nodename} (boot {boot_id}, {os.readlink('/proc/self/ns/pid')})"
