"""Tests families and flags that Megatron-Bridge alone computes differently from transformers, or cannot build."""

import copy
from typing import Any

import pytest
import torch
from support.tiny import random_batch, tiny_policy

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.mcore import architectures, distributed
from nemo_offload_rl.mcore.build import load_weights
from nemo_offload_rl.mcore.model.model_config import make_bridge, make_provider
from nemo_offload_rl.mcore.patches import cpu_device, rotary
from nemo_offload_rl.mcore.random_weights import as_in_files
from nemo_offload_rl.model_check.compare import compare, one_rank

LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "original_max_position_embeddings": 8192, "rope_theta": 5e5} | FACTORS
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "rope_theta": 1e6}
YARN_IN_FULL = YARN | {"attention_factor": 1.7, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False}
YARN_WITH_MSCALES = YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}
WINDOW = {"use_sliding_window": True, "sliding_window": 4096}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
BIASED = {"attention_bias": True}

BY_NAME = [*["sliding_attention", "full_attention"] * 2, *["sliding_attention"] * 2]
FORMER = {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1e5}
FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "plain": {},
        "llama3, other factors": {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 6.0}},
        "yarn in full": {"rope_parameters": YARN_IN_FULL}, "yarn with mscales": {"rope_parameters": YARN_WITH_MSCALES},
        "rope by its former name": FORMER, "gelu": {"hidden_act": "gelu"}, "head size": {"head_dim": 32},
        "attention biases": BIASED, "MLP biases": {"mlp_bias": True}, "all biases": BIASED | {"mlp_bias": True},
    },
    "mistral": {
        "plain": {"sliding_window": None}, "window": {"sliding_window": 4096},
        "llama3 and window": {"sliding_window": 4096, "rope_parameters": LLAMA3},
        "gelu": {"sliding_window": None, "hidden_act": "gelu_pytorch_tanh"},
    },
    "qwen2": {
        "plain": {}, "window": WINDOW | {"max_window_layers": 4},
        "window in layers by name": WINDOW | {"layer_types": BY_NAME},
        "linear and window": WINDOW | {"max_window_layers": 0, "rope_parameters": LINEAR},
    },
    "qwen3": {
        "plain": {}, "window": WINDOW | {"max_window_layers": 2}, "biases": BIASED,
        "all at once": BIASED | WINDOW | {"max_window_layers": 2, "rope_parameters": YARN_IN_FULL},
        "a key that is not read": {"partial_rotary_factor": 0.5},
    },
    "qwen3_moe": {
        "plain": EXPERTS, "window": EXPERTS | WINDOW, "biases": EXPERTS | BIASED,
        "first layer dense": EXPERTS | {"mlp_only_layers": [0]},
        "every second layer dense": EXPERTS | {"decoder_sparse_step": 2},
        "every layer dense": EXPERTS | {"mlp_only_layers": [0, 1, 2, 3, 4, 5]},
        "all at once": EXPERTS | WINDOW | BIASED | {"mlp_only_layers": [1], "rope_parameters": YARN},
    },
    "gemma": {"plain": {"head_dim": 32}},
}  # fmt: skip
for flags in FLAGS.values():
    if flags is not FLAGS["gemma"]:
        scalings = {"linear": LINEAR, "llama3": LLAMA3, "yarn": YARN}
        flags |= {name: flags["plain"] | {"rope_parameters": scaling} for name, scaling in scalings.items()}
CASES = [(family, name, False) for family, flags in FLAGS.items() for name in flags]
CASES += [(family, name, True) for family in FLAGS for name in ("plain", "yarn") if family != "gemma"]


def policy_of(family: str, name: str, tied: bool) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6}
    small = {"intermediate_size": 96, "vocab_size": 30, "max_position_embeddings": 16384, "pad_token_id": None}
    ties = {} if family == "gemma" else {"tie_word_embeddings": tied}
    return tiny_policy({"model_type": family} | sizes | small | FLAGS[family][name] | ties)


def provider_of(policy: dict[str, Any]) -> Any:
    return make_provider(policy, make_bridge(policy, hf_config(policy)))


@pytest.fixture(autouse=True)
def one_thread():
    cpu_device.install()
    torch.set_num_threads(1)


@pytest.mark.parametrize(("family", "name", "tied"), CASES)
def test_megatron_computes_what_transformers_does(family, name, tied):
    padded, packed = compare(policy_of(family, name, tied))
    for difference in (padded, packed):
        assert difference.logprob < 2e-5, difference
        assert difference.gradient < 2e-5, difference


def with_other_norms_and_biases(config: Any) -> dict[str, torch.Tensor]:
    """Returns weights by their names in files, with random norms and biases, which are otherwise all 1 or 0."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_()
    return as_in_files(model, model.state_dict())


NAMES = [
    ("llama", "all biases", False), ("llama", "attention biases", True), ("llama", "MLP biases", False),
    ("mistral", "window", False), ("qwen2", "yarn", True), ("qwen3", "biases", False),
    ("qwen3_moe", "all at once", False), ("qwen3_moe", "every second layer dense", True),
]  # fmt: skip


@pytest.mark.parametrize(("family", "name", "tied"), NAMES)
def test_weights_come_back_bit_for_bit_under_their_names(family, name, tied):
    policy = policy_of(family, name, tied)
    config = hf_config(policy)
    want = with_other_norms_and_biases(config)
    with one_rank():
        bridge = make_bridge(policy, config)
        provider = make_provider(policy, bridge)
        chunks = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
        load_weights(bridge, chunks, want)
        got = dict(bridge.export_hf_weights(chunks, show_progress=False))
    if tied:  # an export without a checkpoint writes them twice
        want["lm_head.weight"] = want["model.embed_tokens.weight"]
    assert set(got) == set(want)
    assert [key for key in want if not torch.equal(got[key], want[key])] == []


@pytest.mark.parametrize(("family", "name"), [("llama", "all biases"), ("qwen3_moe", "all at once")])
def test_a_resumed_run_continues_bit_for_bit(make_worker, tmp_path, family, name):
    policy = policy_of(family, name, False)
    worker = make_worker(policy)
    worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=2)
    worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    want = worker.train(random_batch(4, seed=1), NLLLoss(), gbs=4, mbs=2)
    worker = make_worker(policy, seed=99)
    worker.load_checkpoint(str(tmp_path / "policy"))
    assert worker.train(random_batch(4, seed=1), NLLLoss(), gbs=4, mbs=2) == want


CUSTOM = r"has custom layers .*, which need Transformer Engine"
REFUSED = [
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, r"rope_type 'dynamic', which Megatron can"),
    ("qwen3", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, "rope_type yarn and partial_rotary_factor 0"),
    ("gemma2", {}, "is of the family gemma2, whose capped scores"),
    ("qwen3_moe", EXPERTS | {"num_experts_per_tok": 1}, "num_experts_per_tok 1 with norm_topk_prob true"),
    ("nemotron_h", {"num_hidden_layers": 52}, CUSTOM),
    *((family, {}, CUSTOM) for family in ("gpt_oss", "gemma3_text", "falcon_h1")),
]


@pytest.mark.parametrize(("family", "fields", "message"), REFUSED, ids=[case[0] for case in REFUSED])
def test_what_cannot_be_computed_right_is_refused(family, fields, message):
    with one_rank(), pytest.raises(ValueError, match=rf"^The model .*{message}"):
        provider_of(tiny_policy({"model_type": family} | fields))


def test_a_config_that_megatron_bridge_cannot_translate_is_one_sentence():
    policy = tiny_policy({"model_type": "glm_moe_dsa"})  # without a field that Megatron-Bridge reads
    with pytest.raises(ValueError, match=r"^Megatron-Bridge cannot translate .*glm_moe_dsa\): Attribute[^\n]*$"):
        provider_of(policy)


def test_layers_of_experts_that_are_not_the_models_own_are_refused():
    policy = policy_of("qwen3_moe", "first layer dense", False)
    policy["megatron_cfg"]["moe_layer_freq"] = [0, 1, 1, 1, 1, 1]
    assert provider_of(policy).moe_layer_freq == [0, 1, 1, 1, 1, 1]
    policy["megatron_cfg"]["moe_layer_freq"] = [1, 0, 1, 1, 1, 1]
    with pytest.raises(ValueError, match=r"moe_layer_freq is \[1, 0, 1, 1, 1, 1\], but mlp_only_layers and"):
        provider_of(policy)


def test_a_fused_kernel_of_another_activation_is_refused():
    policy = policy_of("llama", "gelu", False)
    policy["megatron_cfg"]["bias_activation_fusion"] = True
    with pytest.raises(ValueError, match=r"bias_activation_fusion is true, but the model's hidden_act is 'gelu'"):
        provider_of(policy)


def test_corrections_are_for_the_versions_that_they_were_written_for(monkeypatch):
    monkeypatch.setitem(architectures.WRITTEN_FOR, "megatron-core", "0.18.0")
    with pytest.raises(AssertionError, match=r"was written for megatron-core 0\.18\.0, but 0\.19\.2 is installed"):
        architectures.register.__wrapped__()


def test_frequencies_are_not_put_where_others_belong():
    with pytest.raises(AssertionError, match="is not the class that this patch was written for"):
        rotary.replace_frequencies(torch.nn.ModuleDict({"rotary_pos_emb": torch.nn.Identity()}), torch.ones(4))
    assert not distributed.mpu.is_initialized()
