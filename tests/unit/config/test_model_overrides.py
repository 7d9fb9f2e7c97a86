"""Tests that fields in `model_overrides` mean what they mean in `megatron_cfg`, and that refusals name their place."""

import pytest

from nemo_offload_rl.config import RecipeError, load
from nemo_offload_rl.mcore.model import model_config
from tests.unit.config.conftest import CONFIGS

MEGATRON = "policy.megatron_cfg"
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


@pytest.mark.parametrize(
    ("field", "also", "message"),
    [
        ("maskd_softmax_fusion: false", "", f"unknown key; nearest valid key: {MEGATRON}.masked_softmax_fusion"),
        ("moe_z_loss_coeff: 'x'", "", "must be Optional[float]"),
        ("hidden_size: 64", "", "comes from the model's Hugging Face config"),
        ("fp8: 'e4m3'", "", "fp8 and fp4 are not supported here yet"),
        ("sequence_parallel: true", "", f"has a key of its own, {MEGATRON}.sequence_parallel"),
        ("defer_fp32_logits: true", "", f"has a key of its own, {MEGATRON}.defer_fp32_logits"),
        ("layernorm_epsilon: 0.1", "layernorm_epsilon: 0.2", f"has a key of its own, {MEGATRON}.layernorm_epsilon"),
        ("window_size: null", "", "must have a value"),
        ("moe_pad_expert_input_to_capacity: true", "", "is true, which needs"),  # by a rule between two keys
    ],
)
def test_a_field_is_refused_where_it_is_written(tmp_path, field, also, message):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"defaults: {TINY}\npolicy:\n  megatron_cfg:\n    {also}\n    model_overrides:\n      {field}\n")
    with pytest.raises(RecipeError) as refusal:
        load(recipe)
    (problem,) = refusal.value.problems
    assert problem.path == f"{MEGATRON}.model_overrides.{field.partition(':')[0]}"
    assert str(problem.origin) == f"{recipe}:6"
    assert problem.message.startswith(message)
