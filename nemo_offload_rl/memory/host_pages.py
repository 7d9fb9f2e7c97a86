"""Touches the pages of a host mapping in parallel and page-locks them, so that GPU copies run at full speed."""

import ctypes
import functools
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from nemo_offload_rl.memory.units import MIB

logger = logging.getLogger(__name__)

MAX_THREADS = 16
# Each thread touches one slice after another. With one half of the memory for each of two threads, the second thread
# gained nothing (2.5 to 2.6 GB/s with 4 KiB pages; slices: 2.6 to 5.4). A multiple of 2 MiB, so that no two threads
# touch the same huge page.
SLICE_BYTES = 64 * MIB
_MADV_POPULATE_WRITE = 23  # include/uapi/asm-generic/mman-common.h, since Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

Touch = Callable[[int, int], None]
"""Takes an address and a number of bytes; releases the GIL."""


def populate(address: int, nbytes: int) -> None:
    """Allocate the pages of a range with one call of the kernel.

    Raises:
        OSError: if the kernel has no pages left (ENOMEM), where a write would end in a signal.
    """
    if _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def write_each_page(address: int, nbytes: int) -> None:
    """Allocate the pages of a range by writing a zero byte into each, for kernels without MADV_POPULATE_WRITE."""
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    torch.frombuffer(memory, dtype=torch.uint8)[:: mmap.PAGESIZE].zero_()


@functools.cache
def best_touch() -> Touch:
    """Returns the fastest function for touching pages that this kernel supports.

    GB/s with two threads on a virtual machine with Linux 6.18: `populate` 5.4 with 4 KiB pages and 19.3 with huge
    pages, `write_each_page` 2.1 and 19.5.
    """
    knows_populate = _libc.madvise(None, 0, _MADV_POPULATE_WRITE) == 0  # an empty range: 0 if the advice is known
    return populate if knows_populate else write_each_page


def default_num_threads() -> int:
    """Returns the number of CPUs that this process may use, up to 16: beyond that, memory is the limit."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


def slices(start: int, nbytes: int, slice_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields the (start, number of bytes) of each slice of a range; the last may be shorter."""
    for offset in range(0, nbytes, slice_bytes):
        yield start + offset, min(slice_bytes, nbytes - offset)


@contextmanager
def touching(
    address: int, nbytes: int, chunk_bytes: int, *, num_threads: int, touch: Touch
) -> Iterator[Iterator[tuple[int, int]]]:
    """Touch a mapping in threads; the body iterates over its chunks, and gets each once all of its pages are touched.

    So the body's work on a chunk overlaps with the touching of the next ones. If the body ends early, the rest is not
    touched. The iteration raises the errors of `touch`.

    Args:
        address: the mapping's start.
        nbytes: its size.
        chunk_bytes: size of the chunks that the iteration yields, as (address, number of bytes).
        num_threads: number of touching threads.
        touch: touches one slice.
    """
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="first-touch")
    chunks = [
        (chunk, [pool.submit(touch, *piece) for piece in slices(*chunk, SLICE_BYTES)])
        for chunk in slices(address, nbytes, chunk_bytes)
    ]

    def touched() -> Iterator[tuple[int, int]]:
        for chunk, pieces in chunks:
            for piece in pieces:
                piece.result()
            yield chunk

    try:
        yield touched()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class PageLockError(RuntimeError):
    """Raised when a range cannot be page-locked; no part of that range is locked."""


class PageLocker(Protocol):
    """Page-locks ranges of touched host memory; the caller unlocks a range before it is unmapped."""

    def lock(self, address: int, nbytes: int) -> None:
        """Lock a page-aligned range; if that is refused, raises PageLockError and leaves nothing locked."""
        ...

    def unlock(self, address: int) -> None:
        """Unlock the range that was locked at `address`."""
        ...


class CudaPageLocker:
    """Page-locks memory for all GPUs of this process, in the context of the GPU that is current at construction.

    It calls the driver, and not the runtime's cudaHostRegister: a refusal by the runtime stays in a thread-local error
    that the next kernel launch would raise as its own; the driver keeps no such error to clear.
    """

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        torch.cuda.init()
        error, device = driver.cuDeviceGet(torch.cuda.current_device())
        if error:
            raise PageLockError(f"cuDeviceGet: {error.name}")
        # The context that torch uses; retained until the process ends, as torch does.
        error, self._context = driver.cuDevicePrimaryCtxRetain(device)
        if error:
            raise PageLockError(f"cuDevicePrimaryCtxRetain: {error.name}")

    def lock(self, address: int, nbytes: int) -> None:
        """Lock a range; releases the GIL meanwhile.

        Raises:
            PageLockError: the driver refused; the message has its name of the error.
        """
        error = self._call(self._driver.cuMemHostRegister, address, nbytes, self._driver.CU_MEMHOSTREGISTER_PORTABLE)
        if error:
            raise PageLockError(f"cuMemHostRegister: {error.name}")

    def unlock(self, address: int) -> None:
        """Unlock a range; if a failed kernel broke the context, it stays locked until the process ends."""
        error = self._call(self._driver.cuMemHostUnregister, address)
        if error:
            logger.warning("cuMemHostUnregister: %s; the memory stays locked until this process ends", error.name)

    def _call(self, function: Callable[..., tuple[Any]], *arguments: int) -> Any:
        """Calls a driver function in torch's context, from any thread and whatever its context; returns the error."""
        (error,) = self._driver.cuCtxPushCurrent(self._context)
        if error:
            return error
        try:
            (error,) = function(*arguments)
        finally:
            self._driver.cuCtxPopCurrent()
        return error


class LockedRanges:
    """Locks ranges of one mapping, and unlocks all of them when one is refused.

    Attributes:
        error: the first refusal, after which all ranges are unlocked and no further one is locked.
        locked_bytes: total bytes that were locked; unlocking does not reduce it.
    """

    def __init__(self, locker: PageLocker) -> None:
        self._locker = locker
        self._addresses: list[int] = []
        self.error: PageLockError | None = None
        self.locked_bytes = 0

    def add(self, address: int, nbytes: int) -> None:
        """Lock one more range, unless one was refused before."""
        if self.error is not None:
            return
        try:
            self._locker.lock(address, nbytes)
        except PageLockError as error:
            self.error = error.with_traceback(None)  # a traceback keeps all callers' locals, including tensors
            self.unlock()
            return
        self._addresses.append(address)
        self.locked_bytes += nbytes

    def unlock(self) -> None:
        """Unlock everything; a second time does nothing."""
        while self._addresses:
            self._locker.unlock(self._addresses.pop())
