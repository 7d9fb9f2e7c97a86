"""Measures how much GPU memory all processes of a machine take together, by the driver's own count."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch

from nemo_offload_rl.metrics.timer import Timer

GIB = 2**30
SAMPLE_PERIOD_S = 0.01


class GpuWatch:
    """Samples the fullest GPU in its own thread; a context manager. Without a GPU it measures nothing.

    Memory in use when the watch is created, its own CUDA context included, does not count.
    """

    def __init__(self) -> None:
        self._devices = range(torch.cuda.device_count())
        self._at_first = [self._used(device) for device in self._devices]
        self._scopes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpu-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    @contextmanager
    def peak(self, name: str, peaks_gib: dict[str, float]) -> Iterator[None]:
        """Records the largest reading inside the `with` block under a name, unless a larger one is already there.

        Args:
            name: Of the block; blocks of different names may nest.
            peaks_gib: Gets it, in GiB.
        """
        with self._lock:
            self._scopes[name] = 0
        try:
            yield
        finally:
            self._sample()
            with self._lock:
                peak = self._scopes.pop(name)
            if self._devices:
                peaks_gib[name] = max(peaks_gib.get(name, 0.0), peak / GIB)

    def _watch(self) -> None:
        while self._devices and not self._end.wait(SAMPLE_PERIOD_S):
            self._sample()

    def _sample(self) -> None:
        taken = [self._used(device) - first for device, first in zip(self._devices, self._at_first, strict=True)]
        if taken:
            with self._lock:
                self._scopes = {name: max(peak, *taken) for name, peak in self._scopes.items()}

    @staticmethod
    def _used(device: int) -> int:
        free, total = torch.cuda.mem_get_info(device)
        return total - free


class WatchedTimer(Timer):
    """Times phases and also records the peak of GPU memory in each.

    Args:
        watch: running.
        peaks_gib: gets phase -> peak.
    """

    def __init__(self, watch: GpuWatch, peaks_gib: dict[str, float]) -> None:
        super().__init__()
        self._watch = watch
        self._peaks_gib = peaks_gib

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time inside the `with` block to the phase `name`, and records its memory peak."""
        with super().phase(name), self._watch.peak(name, self._peaks_gib):
            yield
