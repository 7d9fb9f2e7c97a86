"""Measures the most GPU memory that each verb of a rank takes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.metrics.memory import gpu_allocated, memory_stats, reset_gpu_peak


class GpuPeaks:
    """Records the peak GPU memory of each verb's last call; records nothing without a GPU.

    Args:
        mapped_bytes: Returns the bytes that are mapped in ranges now, which torch's allocator does not count.
    """

    def __init__(self, mapped_bytes: Callable[[], int]) -> None:
        self._mapped_bytes = mapped_bytes
        self._peaks: dict[str, float] = {}
        self._taken_gib: dict[str, float] = {}
        self._peak_mapped_bytes = 0  # since the last verb began

    @contextmanager
    def of(self, verb: str) -> Iterator[None]:
        """Measures the work inside and records it under a verb's name."""
        reset_gpu_peak()
        before, mapped = gpu_allocated(), self._mapped_bytes()
        yield
        now = gpu_allocated()
        if before is not None and now is not None:
            self._peak_mapped_bytes = max(mapped, self._mapped_bytes())
            self._peaks[f"gpu_peak_{verb}_gib"] = (now.peak_bytes + self._peak_mapped_bytes) / GIB
            self._taken_gib[verb] = (now.peak_bytes - before.nbytes) / GIB

    def taken_gib(self, verb: str) -> float | None:
        """Returns the verb's peak in GiB above what was allocated before its last call; None without a GPU."""
        return self._taken_gib.get(verb)

    def memory_stats(self) -> dict[str, float]:
        """Returns this process's memory in GiB: now, and `gpu_peak_VERB_gib`, the peak of each verb's last call."""
        return memory_stats(self._mapped_bytes(), self._peak_mapped_bytes) | self._peaks
