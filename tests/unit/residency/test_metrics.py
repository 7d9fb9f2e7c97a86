import pytest
import torch

from nemo_offload_rl.residency.metrics import MemoryNow, Meter
from nemo_offload_rl.residency.table import Phase


class MeterOfAGpu(Meter):
    free = 1

    def memory(self):
        return MemoryNow(1, 1, gpu_free=self.free * 2**30)


def test_the_seconds_of_all_entries_of_a_phase_are_added_up():
    """As those of its moves are: a validation enters it once more before anybody takes the metrics."""
    meter = MeterOfAGpu(torch.device("cpu"))
    meter.record_transition(Phase.LOGPROB, 0.5, meter.memory())
    meter.record_transition(Phase.TRAIN, 0.0625, meter.memory())
    meter.free = 3
    meter.record_transition(Phase.LOGPROB, 0.25, meter.memory())
    metrics = meter.take_metrics()
    assert metrics["logprob/enter_s"] == pytest.approx(0.75)
    assert metrics["train/enter_s"] == pytest.approx(0.0625)
    assert metrics["logprob/gpu_free_before_gib"] == 3  # memory is that of the last entry
    assert "logprob/enter_s" not in meter.take_metrics()
