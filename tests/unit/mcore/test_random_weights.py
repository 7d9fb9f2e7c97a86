"""Tests weights that are made block by block beside those that transformers makes of a whole model."""

import pytest
import torch
from support.tiny import TINY_DEEPSEEK_V3, TINY_QWEN3, TINY_QWEN3_MOE, tiny_policy
from torch import nn

from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.mcore.random_weights import RandomWeights, as_in_files

WIDE = {"hidden_size": 256, "intermediate_size": 128, "vocab_size": 500}  # enough values for a mean
FAMILIES = {
    "qwen3": TINY_QWEN3 | {"tie_word_embeddings": False}, "tied": TINY_QWEN3, "experts": TINY_QWEN3_MOE,
    "deepseek": TINY_DEEPSEEK_V3, "qwen2": TINY_QWEN3 | {"model_type": "qwen2"},
    "llama": TINY_QWEN3 | {"model_type": "llama", "dtype": "bfloat16"},
    "mistral": TINY_QWEN3 | {"model_type": "mistral", "sliding_window": None},
    "gemma2": TINY_QWEN3 | {"model_type": "gemma2"},
}  # fmt: skip


def weights(config, seed=3):
    return RandomWeights(config, seed, torch.device("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
def test_names_shapes_and_distributions_are_those_of_transformers(family):
    from transformers import AutoModelForCausalLM

    config = hf_config(tiny_policy(FAMILIES[family] | WIDE))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    whole, made = as_in_files(model, model.state_dict()), weights(config)
    assert set(made) == set(whole)
    for name, tensor in whole.items():
        assert (made[name].shape, made[name].dtype) == (tensor.shape, tensor.dtype), name
        std, own = tensor.float().std(correction=0), made[name].float().std(correction=0)
        torch.testing.assert_close(own, std, rtol=0.1, atol=1e-6, msg=name)
        torch.testing.assert_close(made[name].float().mean(), tensor.float().mean(), rtol=1e-3, atol=float(std) / 4)


def test_values_depend_on_the_seed_and_not_on_the_order_of_reading():
    config = hf_config(tiny_policy(TINY_QWEN3_MOE))
    torch.manual_seed(7)
    state = torch.get_rng_state()
    one, again, other = weights(config), weights(config), weights(config, seed=4)
    values = {name: one[name].clone() for name in one}
    assert all(torch.equal(again[name], values[name]) for name in reversed(list(again)))
    embedding = "model.embed_tokens.weight"
    assert not torch.equal(other[embedding], values[embedding])
    first, second = (values[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_tied_embedding_is_one_weight():
    made = weights(hf_config(tiny_policy(TINY_QWEN3)))
    names = [name for name in made if name in {"model.embed_tokens.weight", "lm_head.weight"}]
    assert len({made[name].data_ptr() for name in names}) == 1


def test_only_two_blocks_are_in_memory():
    made = weights(hf_config(tiny_policy(TINY_QWEN3)))
    assert {made[name].device.type for name in made} == {"cpu"}
    assert made._made.cache_info().currsize == 2
    assert all(parameter.is_meta for parameter in made._model.parameters())


def test_a_weight_that_nothing_initialises_is_an_error(monkeypatch):
    from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel

    init = Qwen3PreTrainedModel._init_weights

    def not_linear(model, module):
        return None if isinstance(module, nn.Linear) else init(model, module)

    monkeypatch.setattr(Qwen3PreTrainedModel, "_init_weights", not_linear)
    with pytest.raises(ValueError, match=r"does not initialise 'model\.layers\.0\.\S+' of a model of the family qwen3"):
        weights(hf_config(tiny_policy(TINY_QWEN3)))["model.layers.0.mlp.up_proj.weight"]
