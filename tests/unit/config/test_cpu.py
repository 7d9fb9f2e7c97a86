"""Recipes without a GPU, what is switched off and said; and keys of the CPU optimizer."""

import copy

import torch

from nemo_offload_rl.config import for_machine, load
from nemo_offload_rl.mcore.model.model_config import make_optimizer_config
from tests.unit.config.conftest import CONFIGS


def test_each_setting_that_needs_a_gpu_is_off_and_said_in_one_line():
    config = load(CONFIGS / "grpo_math_1B_megatron.yaml").config
    before = copy.deepcopy(config)
    adapted, lines = for_machine(config, has_gpus=False)
    assert config == before
    megatron = adapted["policy"]["megatron_cfg"]
    assert megatron["apply_rope_fusion"] is False
    assert megatron["moe_permute_fusion"] is False
    assert megatron["optimizer"]["use_precision_aware_optimizer"] is False
    assert adapted["policy"]["precision"] == "bfloat16"
    # Packing runs everywhere, and so does residency: its GPU side is then host memory, too.
    for key in ("use_pinned_optimizer_offload", "residency", "numa", "sequence_packing"):
        assert adapted["policy"][key] == config["policy"][key]
    assert len(lines) == len(set(lines)) == 6
    assert "policy.megatron_cfg.apply_rope_fusion is off on this machine: it needs Transformer Engine on a GPU" in lines


def test_an_adapted_config_needs_no_more_and_the_tiny_recipes_nothing():
    config, _ = for_machine(load(CONFIGS / "grpo_math_1B_megatron.yaml").config, has_gpus=False)
    assert for_machine(config, has_gpus=False) == (config, [])
    for name in ("grpo_tiny_cpu.yaml", "sft_tiny_cpu.yaml"):
        assert for_machine(load(CONFIGS / name).config, has_gpus=False)[1] == []


def test_the_tiny_recipe_of_long_rows_leaves_activations_where_they_are():
    adapted, lines = for_machine(load(CONFIGS / "sft_long_rows_tiny_cpu.yaml").config, has_gpus=False)
    key = "policy.megatron_cfg.fine_grained_activation_offloading"
    assert lines == [f"{key} is off on this machine: it needs Transformer Engine on a GPU"]
    megatron = adapted["policy"]["megatron_cfg"]
    assert (megatron["activation_checkpointing"], megatron["recompute_num_layers"]) == (True, 2)
    assert (megatron["mlp_tile_tokens"], megatron["fused_linear_logprobs_chunk_size"]) == (128, 128)


def test_what_a_recipe_switches_on_without_a_gpu_is_off():
    overrides = ["+policy.megatron_cfg.masked_softmax_fusion=true", "+policy.megatron_cfg.moe_router_fusion=false"]
    config = load(CONFIGS / "sft_tiny_cpu.yaml", [*overrides, "logger.monitor_gpus=true"]).config
    adapted, lines = for_machine(config, has_gpus=False)
    assert adapted["policy"]["megatron_cfg"]["masked_softmax_fusion"] is False
    assert adapted["logger"]["monitor_gpus"] is False
    keys = ("logger.monitor_gpus", "policy.megatron_cfg.masked_softmax_fusion")
    assert sorted(lines) == [f"{key} is off on this machine: it needs a GPU" for key in keys]


def test_activation_offloading_and_graphs_are_switched_off():
    overrides = [
        "policy.sequence_packing.enabled=false",
        "policy.megatron_cfg.fine_grained_activation_offloading=true",
        "policy.megatron_cfg.offload_modules=[qkv_linear]",
        "policy.megatron_cfg.delay_offload_until_cuda_graph=true",
        "policy.megatron_cfg.cuda_graph_impl=transformer_engine",
        "policy.megatron_cfg.cuda_graph_modules=[moe_router]",
        "policy.precision=bfloat16",
        "policy.megatron_cfg.optimizer.bf16=true",
        *("~warm_start", "policy.hf_config.model_type=qwen3_moe", "+policy.hf_config.num_experts=8"),
    ]
    adapted, lines = for_machine(load(CONFIGS / "grpo_tiny_cpu.yaml", overrides).config, has_gpus=False)
    megatron = adapted["policy"]["megatron_cfg"]
    off = {"fine_grained_activation_offloading": False, "delay_offload_until_cuda_graph": False}
    assert megatron.items() >= (off | {"cuda_graph_impl": "none"}).items()
    said = [line.partition(" on this machine")[0] for line in lines]
    assert said == [f"policy.megatron_cfg.{name} is off" for name in (*off, "cuda_graph_impl")]


def test_types_of_optimizer_state_follow_the_precision_aware_optimizer():
    optimizer = "policy.megatron_cfg.optimizer"
    overrides = [f"+{optimizer}.exp_avg_dtype=bfloat16", f"+{optimizer}.main_params_dtype=float32"]
    config = load(CONFIGS / "grpo_math_1B_megatron.yaml", overrides).config
    adapted, lines = for_machine(config, has_gpus=False)
    section = adapted["policy"]["megatron_cfg"]["optimizer"]
    changed = {"use_precision_aware_optimizer": False, "exp_avg_dtype": "float32"}
    assert section == config["policy"]["megatron_cfg"]["optimizer"] | changed
    assert [line for line in lines if line.startswith(optimizer)] == [
        f"{optimizer}.use_precision_aware_optimizer is off on this machine: it needs Transformer Engine on a GPU",
        f"{optimizer}.exp_avg_dtype is float32 on this machine: it follows optimizer.use_precision_aware_optimizer, "
        "which needs Transformer Engine on a GPU",
    ]
    # megatron-core asserts that the two agree.
    assert make_optimizer_config(adapted["policy"]).exp_avg_dtype == torch.float32


OPTIMIZER = "policy.megatron_cfg.optimizer"
ON = f"{OPTIMIZER}.optimizer_cpu_offload=true"
HALF = f"{ON} {OPTIMIZER}.optimizer_offload_fraction=0.5 {OPTIMIZER}.use_precision_aware_optimizer=true"
SGD = f"{OPTIMIZER}.optimizer=sgd {OPTIMIZER}.use_precision_aware_optimizer=false"
TINY = CONFIGS / "grpo_tiny_cpu.yaml"


def test_without_a_gpu_it_is_off_and_said_in_one_line():
    adapted, lines = for_machine(load(TINY, HALF.split()).config, has_gpus=False)
    optimizer = adapted["policy"]["megatron_cfg"]["optimizer"]
    assert (optimizer["optimizer"], optimizer["optimizer_cpu_offload"]) == ("adam", False)
    (line,) = (line for line in lines if "cpu_offload" in line)
    assert line.endswith("is off on this machine: it needs a GPU; here the whole optimizer runs on the CPU")
    adapted, lines = for_machine(load(TINY, f"{HALF} {SGD}".split()).config, has_gpus=False)
    assert adapted["policy"]["megatron_cfg"]["optimizer"]["use_distributed_optimizer"] is False
    assert any("use_distributed_optimizer is off on this machine" in line for line in lines)
