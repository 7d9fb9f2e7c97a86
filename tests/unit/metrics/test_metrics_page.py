import torch
from support.metrics_page import undocumented

from nemo_offload_rl.memory.link import LinkSpeed
from nemo_offload_rl.metrics.names import residency_metrics
from nemo_offload_rl.residency.metrics import MemoryNow, Meter, Started
from nemo_offload_rl.residency.table import Phase, Placement, Target


class Ended:
    nbytes = 2_000_000_000
    is_queued = True
    has_failed = False

    def copy_seconds(self):
        return 0.1

    def exposed_seconds(self):
        return 0.02


class MeterOfAGpu(Meter):
    def memory(self):
        return MemoryNow(1, 1, gpu_allocated=1, gpu_reserved=1, gpu_ranges=1, gpu_free=1, gpu_total=1)


def test_everything_that_the_engine_measures_is_on_the_page():
    meter = MeterOfAGpu(torch.device("cpu"), link=LinkSpeed(d2h_bytes_per_s=25e9, h2d_bytes_per_s=50e9))
    meter.record_start(Started(Phase.TRAIN, Target.OPTIMIZER_STATE, Placement.HOST, Placement.GPU, Ended()))
    meter.record_transition(Phase.TRAIN, 0.03, meter.memory(), dict.fromkeys(Target, 1))
    metrics = residency_metrics(meter.take_metrics())
    assert metrics["residency/train/optimizer_state/share_of_link"] == 0.4
    # Six of the move, nine plus seven (of memory left on the GPU) of the transition, two of the host.
    assert len(metrics) == 24
    assert undocumented(metrics) == []
    wrong = ["train/los", "residency/train/params/speed", "residency/train/gpu_after_gib"]
    assert undocumented(["train/loss", *wrong]) == wrong
