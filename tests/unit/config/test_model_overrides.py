"""Tests that fields in `model_overrides` mean what they mean in `megatron_cfg`, and that refusals name their place."""

from nemo_offload_rl.config import load
from nemo_offload_rl.mcore.model import model_config
from tests.unit.config.conftest import CONFIGS, MEGATRON

TINY = CONFIGS / "grpo_tiny_cpu.yaml"


def test_a_field_means_the_same_as_in_the_section_and_reaches_the_model():
    fields = "{rotary_interleaved: true, layernorm_epsilon: 0.001}"
    written = [f"++{MEGATRON}.rotary_interleaved=true", f"++{MEGATRON}.layernorm_epsilon=0.001"]
    overridden = load(TINY, [f"++{MEGATRON}.model_overrides={fields}"])
    assert overridden.config == load(TINY, [f"++{MEGATRON}.model_overrides={{}}", *written]).config
    assert overridden.recipe.config["policy"]["megatron_cfg"]["model_overrides"]["rotary_interleaved"] is True

    policy = overridden.config["policy"]
    provider = model_config.make_provider(policy, model_config.make_bridge(policy, model_config.hf_config(policy)))
    assert (provider.rotary_interleaved, provider.layernorm_epsilon) == (True, 0.001)


def test_a_field_is_refused_where_it_is_written(tmp_path, error_of):
    for field, also in (
        ("maskd_softmax_fusion: false", ""),
        ("moe_z_loss_coeff: 'x'", ""),
        ("hidden_size: 64", ""),
        ("fp8: 'e4m3'", ""),
        ("sequence_parallel: true", ""),
        ("defer_fp32_logits: true", ""),
        ("layernorm_epsilon: 0.1", "layernorm_epsilon: 0.2"),
        ("window_size: null", ""),
        ("moe_pad_expert_input_to_capacity: true", ""),  # by a rule between two keys
    ):
        text = f"defaults: {TINY}\npolicy:\n  megatron_cfg:\n    {also}\n    model_overrides:\n      {field}\n"
        (tmp_path / "recipe.yaml").write_text(text)
        error_of(recipe=tmp_path / "recipe.yaml")
