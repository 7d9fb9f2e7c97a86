import pytest
import torch

from nemo_offload_rl.residency.metrics import MemoryNow, Meter
from nemo_offload_rl.residency.table import Phase, Target


class MeterOfAGpu(Meter):
    free = 1

    def memory(self):
        return MemoryNow(1, 1, gpu_free=self.free * 2**30)


def test_the_seconds_of_all_entries_of_a_phase_are_added_up():
    """So are the seconds of its moves: a validation enters the phase once more before the metrics are taken."""
    meter = MeterOfAGpu(torch.device("cpu"))
    meter.record_transition(Phase.LOGPROB, 0.5, meter.memory(), {})
    meter.record_transition(Phase.TRAIN, 0.0625, meter.memory(), {})
    meter.free = 3
    meter.record_transition(Phase.LOGPROB, 0.25, meter.memory(), {})
    metrics = meter.take_metrics()
    assert metrics["logprob/enter_s"] == pytest.approx(0.75)
    assert metrics["train/enter_s"] == pytest.approx(0.0625)
    assert metrics["logprob/gpu_free_before_gib"] == 3  # memory is the last entry's
    assert "logprob/enter_s" not in meter.take_metrics()


def test_what_is_left_on_the_gpu_is_itemised_and_adds_up_to_what_the_driver_counts():
    memory = MemoryNow(1, 1, gpu_allocated=2, gpu_reserved=7, gpu_ranges=30, gpu_free=50, gpu_total=100)
    left = {name: gib * 2**30 for name, gib in memory.left({Target.PARAMS: 20, Target.GRADS: 10}).items()}
    assert left == {
        "left_params_gib": 20, "left_grads_gib": 10, "left_tensors_gib": 2, "left_cache_gib": 5, "left_others_gib": 13,
    }  # fmt: skip
    assert sum(left.values()) == memory.gpu_total - memory.gpu_free
    assert MemoryNow(1, 1).left({Target.PARAMS: 20}) == {}
