"""Tests the peaks of verbs, from readings that the test supplies."""

from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.metrics.memory import GpuAllocated
from nemo_offload_rl.worker import offloader
from nemo_offload_rl.worker.offloader import GpuPeaks


def test_a_verbs_peak_counts_the_most_that_was_mapped_and_what_it_took_does_not(monkeypatch):
    peak, given = 2.0, []

    def memory_stats(*beside_torch):
        given.append(beside_torch)
        return {"host_rss_gib": 1.0}

    monkeypatch.setattr(offloader, "memory_stats", memory_stats)
    monkeypatch.setattr(offloader, "gpu_allocated", lambda: GpuAllocated(2 * GIB, int(peak * GIB)))
    mapped = 3 * GIB
    peaks = GpuPeaks(lambda: mapped)
    assert peaks.taken_gib("train") is None
    with peaks.of("train"):
        peak = 7.0
        mapped = 4 * GIB
    mapped = 1 * GIB
    assert peaks.taken_gib("train") == 5.0
    assert peaks.memory_stats() == {"host_rss_gib": 1.0, "gpu_peak_train_gib": 11.0}
    assert given == [(1 * GIB, 4 * GIB)]
    with peaks.of("logprobs"):
        peak = 2.5
    assert peaks.taken_gib("logprobs") == 0.5
    assert {"gpu_peak_train_gib": 11.0, "gpu_peak_logprobs_gib": 3.5}.items() <= peaks.memory_stats().items()


def test_without_a_gpu_there_are_no_peaks(monkeypatch):
    monkeypatch.setattr(offloader, "memory_stats", lambda *_: {"host_rss_gib": 1.0})
    monkeypatch.setattr(offloader, "gpu_allocated", lambda: None)
    peaks = GpuPeaks(lambda: 0)
    with peaks.of("train"):
        pass
    assert peaks.taken_gib("train") is None
    assert peaks.memory_stats() == {"host_rss_gib": 1.0}
