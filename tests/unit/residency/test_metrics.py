import pytest
import torch

from nemo_offload_rl.residency.metrics import MemoryNow, Meter, Started
from nemo_offload_rl.residency.table import Phase, Placement, Target


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


class EndsMeanwhile:
    """Represents a move that the helper thread ends right after it was first asked for."""

    nbytes = 10
    has_failed = False
    num_asked = 0

    @property
    def is_queued(self):
        self.num_asked += 1
        return self.num_asked > 1

    def copy_seconds(self):
        return 1.0

    def exposed_seconds(self):
        return 0.0


def test_a_move_that_ends_while_records_are_taken_is_in_the_next_ones():
    meter = Meter(torch.device("cpu"))
    started = Started(Phase.REFIT, Target.OPTIMIZER_STATE, Placement.GPU, Placement.HOST, EndsMeanwhile())
    meter.record_start(started)
    assert meter.take_records() == []
    assert [record.nbytes for record in meter.take_records()] == [10]
    assert meter.take_records() == []


def test_what_is_left_on_the_gpu_is_itemised_and_adds_up_to_what_the_driver_counts():
    memory = MemoryNow(1, 1, gpu_allocated=2, gpu_reserved=7, gpu_ranges=30, gpu_free=50, gpu_total=100)
    left = {name: gib * 2**30 for name, gib in memory.left({Target.PARAMS: 20, Target.GRADS: 10}).items()}
    assert left == {
        "left_params_gib": 20, "left_grads_gib": 10, "left_tensors_gib": 2, "left_cache_gib": 5, "left_others_gib": 13,
    }  # fmt: skip
    assert sum(left.values()) == memory.gpu_total - memory.gpu_free
    assert MemoryNow(1, 1).left({Target.PARAMS: 20}) == {}
