"""Times every way by the same round trips, with memory really given back and taken again."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Way(Protocol):
    """Moves tensors off a device and back."""

    name: str
    nbytes: int
    """Of the tensors, without padding."""

    def leave(self) -> None:
        """Moves tensors to the host; returns when the device's memory has been given back."""
        ...

    def come_back(self) -> None:
        """Moves tensors to the device; work queued on the current stream afterwards finds everything in place."""
        ...

    def close(self) -> None:
        """Frees everything."""
        ...


@dataclass(frozen=True)
class Trip:
    """Holds the figures of a round trip."""

    out_s: float
    back_s: float
    released_bytes: int
    """By which the driver's free memory rose; 0 without a GPU."""


def settle(device: torch.device) -> None:
    """Waits until nothing runs."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def driver_free(device: torch.device) -> int:
    """Returns the free memory by cudaMemGetInfo; 0 without a GPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def release_unused(device: torch.device) -> None:
    """Empties the caches of torch's allocators, on the device and on the host."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()


def seconds(action: Callable[[], None], wait: Callable[[], None]) -> float:
    """Returns the wall time from an idle device until an action's work is done."""
    wait()
    start = time.perf_counter()
    action()
    wait()
    return time.perf_counter() - start


def round_trip(way: Way, device: torch.device) -> Trip:
    """Moves out and back, each timed by itself."""

    def wait() -> None:
        settle(device)

    before = driver_free(device)
    out_s = seconds(way.leave, wait)
    released = driver_free(device) - before
    return Trip(out_s, seconds(way.come_back, wait), released)


def round_trips(
    way: Way, tensors: Sequence[torch.Tensor], device: torch.device, *, rounds: int, warmups: int
) -> list[Trip]:
    """Makes several round trips, and compares the contents at the end.

    Raises:
        RuntimeError: something came back changed.
    """
    before = checksum(tensors)
    release_unused(device)  # so that nothing but the tensors is given back
    trips = [round_trip(way, device) for _ in range(warmups + rounds)][warmups:]
    if not torch.equal(before, checksum(tensors)):
        raise RuntimeError(f"{way.name}: tensors came back changed")
    return trips


@torch.no_grad()
def checksum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns int64 [number of tensors]: sums, modulo 2**64, of the 8-byte words and of the remaining bytes."""
    return torch.stack([_checksum(tensor.detach().reshape(-1).view(torch.uint8)) for tensor in tensors])


def _checksum(flat: torch.Tensor) -> torch.Tensor:
    whole = flat.numel() // 8 * 8  # int64 is summed without a copy to another type
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum()
