"""Tests model FLOPs against torch's counter on tiny models and by hand, and the metrics of a run that they give."""

from types import SimpleNamespace

import pytest
import torch
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_offload_rl.plan.step_time import TRAINING_PASSES, attention_pairs, flop_model_if_known, read_flop_model
from nemo_offload_rl.run.algorithm import ModelFlops

LENGTH = 24
POLICY = {"precision": "float32", "megatron_cfg": {}}
SIZES = {key: TINY_QWEN3[key] for key in TINY_QWEN3 if key not in ("model_type", "head_dim")}
MODELS = {
    "grouped_queries": TINY_QWEN3,
    "untied_llama": SIZES | {"model_type": "llama", "tie_word_embeddings": False},
    "experts": TINY_QWEN3_MOE,
    "first_layer_dense": TINY_QWEN3_MOE | {"mlp_only_layers": [0]},
}


def config_of(fields):
    fields = dict(fields)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def counted(fields, *, backward: bool) -> int:
    """Counts FLOPs with torch's counter, without the table of rotary embeddings."""
    config = config_of(fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        tokens = torch.randint(0, config.vocab_size, (1, LENGTH))
        loss = model(input_ids=tokens, use_cache=False).logits.sum()
        if backward:
            loss.backward()
    counts = counter.get_flop_counts()
    rotary = [sum(flops.values()) for name, flops in counts.items() if name.endswith("rotary_emb")]
    return counter.get_total_flops() - sum(rotary)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("passes", [1, TRAINING_PASSES])
def test_flops_are_those_that_torch_counts(name, passes):
    """Torch's eager attention computes all pairs, causal or not, so those above the diagonal are added."""
    model = read_flop_model(config_of(MODELS[name]).to_dict(), POLICY)
    sizes = model.architecture
    masked = LENGTH * LENGTH - attention_pairs(LENGTH)
    above_diagonal = sizes.num_layers * 4 * sizes.num_heads * sizes.head_dim * masked
    assert passes * (model.forward_flops([LENGTH]) + above_diagonal) == counted(MODELS[name], backward=passes > 1)


def test_a_model_is_counted_by_hand():
    fields = {
        "model_type": "qwen3", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 10,
        "tie_word_embeddings": True,
    }  # fmt: skip
    model = read_flop_model(config_of(fields).to_dict(), POLICY)
    # Per layer: queries 128, keys and values 64 each, output 128, three products of the MLP 256 each; logits 160.
    assert model.per_token == 2 * (128 + 64 + 64 + 128 + 3 * 256) + 160
    # 3 tokens have 6 pairs, 1 token has 1; each costs 4 x 2 heads x 4 per layer.
    assert model.forward_flops([3, 1]) == 4 * model.per_token + 2 * 32 * (6 + 1)


def test_pairs_of_a_window_are_those_of_its_mask():
    for length, window in ((5, None), (5, 2), (5, 5), (3, 8), (1, 1)):
        reach = length if window is None else window
        pairs = [(query, key) for query in range(length) for key in range(length) if query - reach < key <= query]
        assert attention_pairs(length, window) == len(pairs)


def test_windows_are_those_of_the_layers():
    fields = SIZES | {"num_hidden_layers": 2, "sliding_window": 4}
    mistral = read_flop_model(config_of(fields | {"model_type": "mistral"}).to_dict(), POLICY)
    assert mistral.windows == (4, 4)
    qwen = config_of(fields | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1})
    assert read_flop_model(qwen.to_dict(), POLICY).windows == (None, 4)
    assert read_flop_model(config_of(TINY_QWEN3).to_dict(), POLICY).windows == (None,) * TINY_QWEN3["num_hidden_layers"]


def test_a_family_that_is_not_counted_has_no_flops():
    assert flop_model_if_known({"model_type": "gemma3"}, POLICY) is None


def metrics_of(precision, names, seconds, *, num_steps=1):
    """Returns the metrics of each step of 3 + 5 tokens, and what a worker group was asked for."""
    model = precision and read_flop_model(config_of(TINY_QWEN3).to_dict(), POLICY | {"precision": precision})
    asked = []
    policy = SimpleNamespace(
        flop_model=lambda: asked.append("flop_model") or model, gpu_names=lambda: asked.append("gpu_names") or names
    )
    flops = ModelFlops(policy)
    return [flops.metrics([3, 5], seconds) for _ in range(num_steps)], model, asked


def test_training_counts_three_passes_and_each_log_prob_phase_one():
    seconds = {"generation": 5.0, "training": 3.0, "logprobs": 1.0}
    found, model, asked = metrics_of("bfloat16", ["NVIDIA H200", "NVIDIA H200"], seconds, num_steps=2)
    tflops = model.forward_flops([3, 5]) / 2e12
    expected = {f"tflops_per_gpu/{phase}": tflops for phase in ("training", "logprobs")}
    expected |= {f"model_flop_utilization/{phase}": tflops / 989 for phase in ("training", "logprobs")}
    assert found[1] == found[0] == pytest.approx({f"performance/{name}": value for name, value in expected.items()})
    assert asked == ["flop_model", "gpu_names"]


def test_float32_has_no_share_of_the_peak_of_bf16_and_a_model_that_is_not_counted_no_metrics():
    [found], _, _ = metrics_of("float32", ["NVIDIA H200"], {"training": 1.0})
    assert list(found) == ["performance/tflops_per_gpu/training"]
    assert metrics_of(None, ["cpu"], {"training": 1.0})[0] == [{}]
