import pytest
from support.tiny import TINY_QWEN3
from transformers import AutoConfig

from nemo_offload_rl.plan.step_time import read_flop_model
from nemo_offload_rl.run.algorithm import ModelFlops


class Policy:
    """Counts the two calls that are made to a worker group."""

    def __init__(self, precision: str | None, names: list[str]) -> None:
        fields = dict(TINY_QWEN3)
        config = AutoConfig.for_model(fields.pop("model_type"), **fields).to_dict()
        self.model = precision and read_flop_model(config, {"precision": precision, "megatron_cfg": {}})
        self.names = names
        self.num_asked = 0

    def flop_model(self):
        self.num_asked += 1
        return self.model

    def gpu_names(self):
        self.num_asked += 1
        return self.names


def test_training_counts_three_passes_and_each_log_prob_phase_one():
    policy = Policy("bfloat16", ["NVIDIA H200", "NVIDIA H200"])
    flops = ModelFlops(policy)
    seconds = {"generation": 5.0, "training": 3.0, "logprobs": 1.0}
    found = [flops.metrics([3, 5], seconds) for _ in range(2)]
    tflops = policy.model.forward_flops([3, 5]) / 2e12
    expected = {f"tflops_per_gpu/{phase}": tflops for phase in ("training", "logprobs")}
    expected |= {f"model_flop_utilization/{phase}": tflops / 989 for phase in ("training", "logprobs")}
    assert found[1] == found[0] == pytest.approx({f"performance/{name}": value for name, value in expected.items()})
    assert policy.num_asked == 2


def test_float32_has_no_share_of_the_peak_of_bf16_and_a_model_that_is_not_counted_no_metrics():
    found = ModelFlops(Policy("float32", ["NVIDIA H200"])).metrics([3], {"training": 1.0})
    assert list(found) == ["performance/tflops_per_gpu/training"]
    assert ModelFlops(Policy(None, ["cpu"])).metrics([3], {"training": 1.0}) == {}
