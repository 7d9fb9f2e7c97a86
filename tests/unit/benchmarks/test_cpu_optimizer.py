"""Tests the benchmark of ways to keep optimizer state off the GPU, on a tiny model without one."""

import cpu_optimizer
from cpu_optimizer import CASES, WAYS
from optimizer_steps import measure

FIELDS = {
    "case", "way", "fraction", "overlap", "step_ms", "optimizer_ms", "times_streamed", "exposed_ms", "peak_gpu_mib",
    "window_mib", "host_mib", "peak_host_mib", "share_of_link", "bit_equal", "tokens_per_s", "logprob_ms",
    "logprob_peak_gpu_mib", "largest_mbs",
}  # fmt: skip


def measured(case, way):
    """Returns every row that measuring a way saves, in order."""
    saved = []
    measure(case, WAYS[way], saved.append)
    return saved


def test_streamed_state_is_measured_beside_resident_state_and_equals_it():
    case = cpu_optimizer.scaled(CASES["1.5B, 12 bytes a parameter"], "tiny")
    found = [saved for way in ("resident", "streamed") for saved in measured(case, way)]
    resident, streamed = cpu_optimizer.compared(found)
    assert set(resident) == set(streamed) == FIELDS
    assert (resident["way"], resident["window_mib"], resident["host_mib"]) == ("resident", 0, 0)
    assert (streamed["way"], streamed["window_mib"]) == ("streamed", 512)
    assert streamed["host_mib"] > 0
    assert (resident["bit_equal"], streamed["bit_equal"]) == (None, True)
    assert (streamed["times_streamed"], resident["largest_mbs"]) == (1, None)
    for row in (resident, streamed):
        assert min(row["optimizer_ms"], row["tokens_per_s"], row["logprob_ms"]) > 0
        assert row["peak_host_mib"] > 100  # Python and torch take that much
