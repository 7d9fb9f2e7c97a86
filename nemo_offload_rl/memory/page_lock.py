"""Page-locking of host memory, so that the GPU's copy engines reach it directly."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)


class PageLockError(RuntimeError):
    """Memory could not be page-locked; nothing of the refused range is."""


class PageLocker(Protocol):
    """Locks ranges of touched host memory; the caller unlocks a range before it is unmapped."""

    def lock(self, address: int, nbytes: int) -> None:
        """Lock a page-aligned range; raises PageLockError, and leaves nothing behind, where that is refused."""
        ...

    def unlock(self, address: int) -> None:
        """Unlock the range that was locked at `address`."""
        ...


class CudaPageLocker:
    """Locks for all GPUs of this process, on behalf of the GPU that is current when it is made.

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
    """The locked ranges of one mapping: all that were asked for, or none.

    Attributes:
        error: the first refusal, after which everything was unlocked and nothing more is tried.
        locked_bytes: how much was locked when it came, or is now.
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
