"""Gives a mapping of host memory its pages, in parallel, and page-locks them, so that the GPU copies at full speed."""

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
# A thread takes one slice after the other. Halves, one a thread, gained nothing from the second thread (2.5 to 2.6 GB/s
# with 4 KiB pages; slices: 2.6 to 5.4). A multiple of 2 MiB, so that no huge page is two threads' business.
SLICE_BYTES = 64 * MIB
_MADV_POPULATE_WRITE = 23  # include/uapi/asm-generic/mman-common.h, since Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

Touch = Callable[[int, int], None]
"""Takes an address and a number of bytes; releases the GIL."""


def populate(address: int, nbytes: int) -> None:
    """Give a range its pages by one call to the kernel.

    Raises:
        OSError: if the kernel has none left (ENOMEM), instead of the signal that a write would end in.
    """
    if _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def write_each_page(address: int, nbytes: int) -> None:
    """Give a range its pages by writing a zero byte into each, for kernels that cannot populate."""
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    torch.frombuffer(memory, dtype=torch.uint8)[:: mmap.PAGESIZE].zero_()


@functools.cache
def best_touch() -> Touch:
    """Returns the faster function that this kernel has for touching pages.

    Two threads, GB/s on a virtual machine with Linux 6.18: populating 5.4 with 4 KiB pages and 19.3 with huge pages,
    writing 2.1 and 19.5.
    """
    knows_populate = _libc.madvise(None, 0, _MADV_POPULATE_WRITE) == 0  # an empty range: 0 where the advice is known
    return populate if knows_populate else write_each_page


def default_num_threads() -> int:
    """Returns the CPUs that this process may use, up to 16: beyond, memory is the limit."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


def slices(start: int, nbytes: int, slice_bytes: int) -> Iterator[tuple[int, int]]:
    """Cuts a range into (start, number of bytes); the last may be shorter."""
    for offset in range(0, nbytes, slice_bytes):
        yield start + offset, min(slice_bytes, nbytes - offset)


@contextmanager
def touching(
    address: int, nbytes: int, chunk_bytes: int, *, num_threads: int, touch: Touch
) -> Iterator[Iterator[tuple[int, int]]]:
    """Touch a mapping in threads; the body iterates over chunks, each as soon as all of its pages are there.

    So what the body does with a chunk overlaps with the touching of the next ones. Leaving the body early leaves the
    rest untouched. What `touch` raises comes out of the iteration.

    Args:
        address: the mapping's start.
        nbytes: its size.
        chunk_bytes: how much the iteration yields at a time, as (address, number of bytes).
        num_threads: how many threads touch.
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
    """Says that memory could not be page-locked; no part of the refused range is."""


class PageLocker(Protocol):
    """Page-locks ranges of touched host memory; the caller unlocks a range before it is unmapped."""

    def lock(self, address: int, nbytes: int) -> None:
        """Lock a page-aligned range; raises PageLockError, and leaves nothing behind, where that is refused."""
        ...

    def unlock(self, address: int) -> None:
        """Unlock the range that was locked at `address`."""
        ...


class CudaPageLocker:
    """Page-locks memory for all GPUs of this process, by the context of the GPU that is current when it is made.

    The driver's own call, not the runtime's cudaHostRegister: a refusal by the runtime stays in a thread-local error
    that the next kernel launch would raise as its own; the driver keeps none, so that there is nothing to clear.
    """

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        torch.cuda.init()
        error, device = driver.cuDeviceGet(torch.cuda.current_device())
        if error:
            raise PageLockError(f"cuDeviceGet: {error.name}")
        # The context that torch uses; retained as long as the process lives, as torch itself does.
        error, self._context = driver.cuDevicePrimaryCtxRetain(device)
        if error:
            raise PageLockError(f"cuDevicePrimaryCtxRetain: {error.name}")

    def lock(self, address: int, nbytes: int) -> None:
        """Lock a range; the GIL is free meanwhile.

        Raises:
            PageLockError: with the driver's name of the error.
        """
        error = self._call(self._driver.cuMemHostRegister, address, nbytes, self._driver.CU_MEMHOSTREGISTER_PORTABLE)
        if error:
            raise PageLockError(f"cuMemHostRegister: {error.name}")

    def unlock(self, address: int) -> None:
        """Unlock a range; a context that a failed kernel broke cannot, and then it is left to the process's end."""
        error = self._call(self._driver.cuMemHostUnregister, address)
        if error:
            logger.warning("cuMemHostUnregister: %s; the memory stays locked until this process ends", error.name)

    def _call(self, function: Callable[..., tuple[Any]], *arguments: int) -> Any:
        """Call in torch's context, whichever thread this is and whatever context it has; returns the error."""
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
        error: the first refusal, after which everything was unlocked and nothing more is tried.
        locked_bytes: how much was locked in all; unlocking does not lower it.
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
            self.error = error.with_traceback(None)  # which would keep all callers' locals, tensors too
            self.unlock()
            return
        self._addresses.append(address)
        self.locked_bytes += nbytes

    def unlock(self) -> None:
        """Unlock everything; a second time does nothing."""
        while self._addresses:
            self._locker.unlock(self._addresses.pop())
