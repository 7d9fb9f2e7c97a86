"""What must hold between keys: the tables of rules, sizes of models wherever they are, and what is adapted."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nemo_offload_rl
from nemo_offload_rl.config import load
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.installed.declared_fields import SECTIONS, megatron_fields
from nemo_offload_rl.config.keys.schema_problems import value_at
from nemo_offload_rl.config.keys.tree import find_key
from nemo_offload_rl.config.rules import NOTES, RULES, pairs
from nemo_offload_rl.config.rules import parallel as batches
from nemo_offload_rl.config.rules.base import SECTION, SPEC
from nemo_offload_rl.config.upstream import duration_s
from tests.unit.config.conftest import CONFIGS, MEGATRON

TINY = CONFIGS / "grpo_tiny_cpu.yaml"
OPTIMIZER, DDP = f"{MEGATRON}.optimizer", f"{MEGATRON}.distributed_data_parallel_config"
TP = f"{MEGATRON}.tensor_model_parallel_size"
PP = f"{MEGATRON}.pipeline_model_parallel_size"
EP = f"{MEGATRON}.expert_model_parallel_size"
TWO = "cluster.gpus_per_node=2"
DIVISOR, ASYNC = "policy.make_sequence_length_divisible_by", "policy.generation.vllm_cfg.async_engine"
ALGORITHM, TARGET = "policy.sequence_packing.algorithm", "grpo.stop_at_validation_"
SPLIT = f"{TP}=2 {TWO} {MEGATRON}.sequence_parallel=true"


def test_what_torch_refuses_is_refused(error_of):
    """Transformer Engine's optimizers compute NaN, or train on silently."""
    for key, argument, value in (
        ("lr", "lr", -1e-3),
        ("lr", "lr", math.nan),
        ("adam_eps", "eps", -1e-8),
        ("weight_decay", "weight_decay", -0.1),
        ("adam_beta1", "betas", (1.0, 0.9)),
        ("adam_beta2", "betas", (0.9, 1.0)),
        ("adam_beta2", "betas", (0.9, -0.1)),
        ("sgd_momentum", "momentum", -0.1),
    ):
        kind = torch.optim.SGD if key == "sgd_momentum" else torch.optim.AdamW
        with pytest.raises(ValueError, match="Invalid"):
            kind([torch.zeros(1)], **{argument: value})
        error_of(f"{OPTIMIZER}.{key}={value[key.endswith('2')] if isinstance(value, tuple) else value}")


def test_recipes_keep_groups_whole():
    pairs = replace(ALGORITHMS["sft"], name="pairs", group_size=2)
    packing = (True, 96, None, 64, "modified_first_fit_decreasing", 64)
    assert batches.packing_sizes(*packing, ALGORITHMS["sft"]) is None
    assert "train_mb_tokens (96) to be at least 2 x policy.max_total_seq" in batches.packing_sizes(*packing, pairs)


def test_rules_read_keys_that_exist():
    for rule in [*RULES, *NOTES]:
        for read in rule.reads:
            path = read.removesuffix("?")
            section, _, name = path.rpartition(".")
            is_megatron = section in SECTIONS and name in megatron_fields(section)
            found = [find_key(spec.schema, path.replace(SECTION, spec.name)) for spec in ALGORITHMS.values()]
            assert is_megatron or read == SPEC or any(found), path


SIZES = [
    (f"{PP}=3", {"num_hidden_layers": 6}, False), (f"{PP}=2", {"num_hidden_layers": 3}, True),
    (f"{TP}=3", {"num_attention_heads": 6}, False), (f"{TP}=2", {"num_attention_heads": 3}, True),
    (f"{EP}=3", {"num_experts": 6, "num_experts_per_tok": 2}, False),
    (f"{EP}=2", {"num_experts": 3, "num_experts_per_tok": 2}, True),
    (f"{EP}=2", {}, False),  # its default is known to transformers
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "fields", "is_refused"), SIZES)
@pytest.mark.parametrize("where", ["hf_config_overrides", "a folder"])
def test_a_models_sizes_are_read_wherever_they_are(ranks, fields, is_refused, where, tmp_path, error_of):
    key, number = ranks.split("=")
    overrides = [ranks, f"cluster.gpus_per_node={number}", "policy.train_global_batch_size=6", "~warm_start"]
    overrides += ["policy.train_micro_batch_size=1", "grpo.num_prompts_per_step=3", "grpo.num_generations_per_prompt=2"]
    model_type = "qwen3_moe" if key == EP else "qwen3"
    if where == "a folder":
        sizes = {"num_key_value_heads": 1} if "num_attention_heads" in fields else {}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} | sizes | fields))
        overrides += [f"policy.model_name={tmp_path}", "policy.hf_config=null", "policy.tokenizer.name=x"]
    else:
        overrides += [f"policy.hf_config.model_type={model_type}", "policy.hf_config.num_key_value_heads=1"]
        overrides += ["+policy.hf_config_overrides={" + ", ".join(f"{name}: {fields[name]}" for name in fields) + "}"]
    if is_refused:
        error_of(*overrides)
    else:
        load(TINY, overrides)


def test_metrics_are_those_that_the_algorithms_measure():
    algorithms = Path(nemo_offload_rl.__file__).parent / "algorithms"
    for name, spec in ALGORITHMS.items():
        logged = re.findall(r'"validation/(\w+)":', (algorithms / f"{name}.py").read_text())
        assert sorted(logged) == sorted(spec.validation_metrics)


def test_a_warm_start_has_no_time_limit(error_of, tmp_path):
    limited = "sft: {export_hf: true}\ncheckpointing: {checkpoint_must_save_by: 0:0:30:0}\n"
    (tmp_path / "sft.yaml").write_text(f"defaults: {CONFIGS / 'sft_tiny_cpu.yaml'}\n{limited}")
    error_of(f"warm_start.recipe={tmp_path / 'sft.yaml'}")


def test_durations():
    durations = {"00:03:45:00": 13_500, "1:0:0:1": 86_401, "0:0:0:0": None, "3:45:00": None, "1:00:-1:0": None}
    assert {text: duration_s(text) for text in durations} == durations


ADAPTED = [
    (f"{DDP}.overlap_param_gather=true {DDP}.overlap_grad_reduce=false", f"{DDP}.overlap_param_gather", False),
    (f"~warm_start {SPLIT} {DIVISOR}=1", DIVISOR, 2),
    (f"{MEGATRON}.sequence_parallel=true", f"{MEGATRON}.sequence_parallel", False),
    (f"grpo.val_period=-1 {TARGET}metric=null {TARGET}threshold=null", "grpo.val_period", 0),
    (f"policy.generation.backend=vllm +{ASYNC}=true", ASYNC, False),
    (f"{ALGORITHM}=modified_ffd", ALGORITHM, "modified_ffd"),
    ("data.train.split_validation_size=null", "data.train.split_validation_size", None),
]


@pytest.mark.parametrize(("overrides", "path", "value"), ADAPTED)
def test_what_nemo_rl_runs_is_adapted_where_numbers_stay(overrides, path, value, golden):
    validated = load(TINY, overrides.split())
    assert value_at(validated.config, path) == value
    golden("test_what_nemo_rl_runs_is_adapted_where_numbers_stay", overrides, "\n".join(validated.notes))


def test_what_a_row_needs_is_accepted():
    """The values of each row that pass: for all rows of NEEDS at once, those that the exemplar's do not have."""
    for _, wanted, value, found in [("k", True, None, False), ("k", True, True, True), ("k", pairs.SET, 2, 3)]:
        assert pairs.needs("other", wanted, value, found) is None
    for how, value, bound in [("at most", 1, 1), ("below", 0, 1), ("at least", 1, 1), ("below", None, 1)]:
        assert pairs.bounds(how, "other", value, bound) is None
