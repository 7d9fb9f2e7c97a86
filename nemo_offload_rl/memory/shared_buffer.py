"""Memory that another process of the same node reads: a GPU's through CUDA IPC, or the host's.

Neither leaves anything behind when a process is killed: the driver and the kernel take both kinds back.
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

from nemo_offload_rl.memory.cuda_driver import checked, device_tensor
from nemo_offload_rl.memory.gpu_range import OutOfGpuMemoryError
from nemo_offload_rl.memory.units import MIB


class SharedBufferError(RuntimeError):
    """Says that this process cannot open memory of another one."""


class BufferHandle(Protocol):
    """Names a `SharedBuffer` to another process; it can be pickled."""

    def opened(self) -> contextlib.AbstractContextManager[torch.Tensor]:
        """Map the buffer into this process, not the one that made it: uint8 [nbytes], until the context ends.

        Raises:
            SharedBufferError: it cannot be opened from here.
        """
        ...


class SharedBuffer(Protocol):
    """Defines memory of this process that others may open, and must have closed before it is closed here."""

    tensor: torch.Tensor
    """uint8 [nbytes]."""

    @property
    def handle(self) -> BufferHandle:
        """Returns what another process opens it by."""
        ...

    def close(self) -> None:
        """Give the memory back; the tensor is of no use afterwards."""
        ...


def make_shared_buffer(nbytes: int, device: torch.device) -> SharedBuffer:
    """Makes a buffer on a device.

    Args:
        nbytes: size, above 0.
        device: the current CUDA device, or the CPU.

    Raises:
        OutOfGpuMemoryError: the GPU has not that much.
        OSError: the host has not.
    """
    assert nbytes > 0
    return SharedGpuBuffer(nbytes) if device.type == "cuda" else SharedHostBuffer(nbytes)


@dataclass(frozen=True)
class GpuBufferHandle:
    """Names a `SharedGpuBuffer` to another process (see `BufferHandle`).

    Attributes:
        nbytes: of the buffer.
        ipc_handle: the driver's CUipcMemHandle.
    """

    nbytes: int
    ipc_handle: bytes

    @contextlib.contextmanager
    def opened(self) -> Iterator[torch.Tensor]:
        """Map the buffer on the current device; what was started on it has ended when the context ends."""
        from cuda.bindings import driver

        torch.cuda.current_stream().synchronize()  # torch has its context by now
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
    """Takes GPU memory from the driver's own allocator, since CUDA IPC exports no part of a virtual range.

    Args:
        nbytes: size, above 0.

    Raises:
        OutOfGpuMemoryError: there is not that much.
    """

    def __init__(self, nbytes: int) -> None:
        from cuda.bindings import driver

        torch.cuda.current_stream().synchronize()  # torch has its context by now
        error, address = driver.cuMemAlloc(nbytes)
        if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            torch.cuda.empty_cache()  # blocks that torch holds and does not use
            error, address = driver.cuMemAlloc(nbytes)
        if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfGpuMemoryError(f"The driver has no {nbytes / MIB:.0f} MiB for a buffer that processes share.")
        checked((error,))
        self._driver = driver
        self._address = address
        self.tensor = device_tensor(int(address), nbytes, torch.cuda.current_device())
        handle = checked(driver.cuIpcGetMemHandle(address))
        self.handle = GpuBufferHandle(nbytes, ctypes.string_at(handle.getPtr(), driver.CU_IPC_HANDLE_SIZE))

    def close(self) -> None:
        """Give the memory back; waits for the device."""
        checked(self._driver.cuMemFree(self._address))


@dataclass(frozen=True)
class HostBufferHandle:
    """Names a `SharedHostBuffer` to another process (see `BufferHandle`).

    Attributes:
        nbytes: of the buffer.
        pid: the process that made it.
        descriptor: the number of its file's descriptor in that process.
        node: identifies the maker's node and container; `pid` means that process only where it is the same.
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
            with contextlib.suppress(BufferError):  # tensors keep it
                memory.close()


class SharedHostBuffer:
    """Takes host memory that is backed by a file without a name (memfd).

    Args:
        nbytes: size, above 0.
    """

    def __init__(self, nbytes: int) -> None:
        self._descriptor = os.memfd_create("nemo_offload_rl", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, nbytes)
        memory = _map(os.dup(self._descriptor), nbytes)
        # frombuffer(memory) would let go of the buffer at once.
        self.tensor = torch.frombuffer(memoryview(memory), dtype=torch.uint8, count=nbytes)
        self.handle = HostBufferHandle(nbytes, os.getpid(), self._descriptor, _node())

    def close(self) -> None:
        """Give the memory back, as soon as no view of the tensor is left."""
        del self.tensor
        os.close(self._descriptor)


def _map(descriptor: int, nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)  # the mapping stays


def _node() -> str:
    """Return what processes share that can name one another by process id."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{os.uname().nodename} (boot {boot_id}, {os.readlink('/proc/self/ns/pid')})"
