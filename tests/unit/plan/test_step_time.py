"""Tests predicted seconds against steps that were measured, and what each setting adds against hand counts."""

import json
from types import SimpleNamespace

import pytest

from benchmarks.model_shapes import QWEN2_1_5B, QWEN3_8B
from nemo_offload_rl.config import load
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.plan.activation_facts import activation_facts
from nemo_offload_rl.plan.flops import read_flop_model
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.plan.step_time import (
    PEAK_FLOPS,
    RATE,
    ROW_TOKENS,
    logprob_seconds,
    training_seconds,
)
from tests.unit.config.conftest import CONFIGS

ROOT = CONFIGS.parents[1]
RESULTS = ROOT / "docs" / "results"
GRPO = ROOT / "benchmarks" / "recipes" / "grpo_1_5B_random.yaml"
DENSE = ROOT / "benchmarks" / "activation_cases" / "recipes" / "dense.yaml"
MEGATRON = "policy.megatron_cfg"
PADDED = (
    "policy.sequence_packing.enabled=false",
    "policy.train_micro_batch_size=1",
    "policy.train_global_batch_size=1",
)
FULL = (f"{MEGATRON}.activation_checkpointing=true", f"++{MEGATRON}.recompute_granularity=full")
TILES = f"++{MEGATRON}.mlp_tile_tokens=auto"
CHUNKS = f"++{MEGATRON}.use_fused_linear_logprobs=true"


def offloads(*modules):
    return (
        f"++{MEGATRON}.fine_grained_activation_offloading=true",
        f"++{MEGATRON}.offload_modules=[{','.join(modules)}]",
    )


def segments(number):
    return f"++{MEGATRON}.recompute_num_layers={number}"


WAYS = {
    "recompute": FULL,
    "ours": (*FULL, *offloads("layer_input"), TILES),
    "ours_attention_kept": (*FULL, *offloads("layer_input", "core_attn"), TILES),
    "segments2": (*FULL, *offloads("layer_input"), TILES, segments(2)),
    "segments4": (*FULL, *offloads("layer_input"), TILES, segments(4)),
}


def predicted(*overrides, recipe=GRPO, model=QWEN2_1_5B, world_size=1):
    """Returns the seconds of training and of log-prob passes."""
    validated = load(recipe, list(overrides))
    config, spec = validated.config, ALGORITHMS[validated.algorithm]
    policy = config["policy"]
    stages = activation_facts(model, policy, world_size=world_size, group_size=spec.group_size)
    flops = read_flop_model(model, policy)
    training = training_seconds(flops, config, spec, stages, settings(policy).activations)
    return training, logprob_seconds(flops, config, spec)


def test_long_rows_take_as_long_as_measured():
    rows = json.loads((RESULTS / "long_rows.json").read_text())["rows"]
    measured = [row for row in rows if row["fits"]]
    assert len(measured) == 13
    for row in measured:
        model = {"1.5b": QWEN2_1_5B, "8b": QWEN3_8B}[row["model"]]
        of_row = (f"policy.max_total_sequence_length={row['tokens']}", *PADDED, CHUNKS, *WAYS[row["way"]])
        no_reference = "loss_fn.reference_policy_kl_penalty=0"
        training, logprobs = predicted(*of_row, no_reference, "policy.logprob_batch_size=1", model=model)
        assert training + row["optimizer_exposed_s"] == pytest.approx(row["step_s"], rel=0.1), row["way"]
        if row["logprob_s"] is not None:
            assert logprobs == pytest.approx(row["logprob_s"], rel=0.1)


def dense_cost(modules, fraction):
    """Returns by how many percent offloading lengthens a step of two micro-batches of four rows of 4,096 tokens."""
    rows = ("policy.train_micro_batch_size=4", "policy.train_global_batch_size=8")
    off = f"++{MEGATRON}.fine_grained_activation_offloading=false"
    model = load(DENSE).config["policy"]["hf_config"]
    plain, _ = predicted(*rows, off, recipe=DENSE, model=model)
    on = (*offloads(*modules), f"++{MEGATRON}.activation_offload_fraction={fraction}")
    offloaded, _ = predicted(*rows, *on, recipe=DENSE, model=model)
    return 100 * (offloaded / plain - 1)


def test_copies_cost_what_was_measured():
    table = json.loads((RESULTS / "activation_offload.json").read_text())["rows"]
    measured = {
        (row["modules"], row["fraction"]): row["overhead_percent"]
        for row in table
        if row["table"] == "cost" and row["model"] == "dense" and row["micro_batch"] == 4 and row["overhead_percent"]
    }
    assert len(measured) >= 7
    for (modules, fraction), percent in measured.items():
        assert dense_cost(modules.replace(" ", "").split(","), fraction) == pytest.approx(percent, abs=1.6)


ROW = 131_072
SIZES = SimpleNamespace(hidden=1536, ffn=8960, heads=12, groups=2, head=128, layers=28, vocabulary=151_936)


def flops_of_a_row():
    """Returns the FLOPs of a forward pass over a row: layers, MLPs alone, attention's scores, the output layer."""
    s = SIZES
    projections = 2 * s.hidden * (s.heads + 2 * s.groups) * s.head + 2 * s.heads * s.head * s.hidden
    mlps = ROW * s.layers * 6 * s.hidden * s.ffn
    scores = s.layers * 4 * s.heads * s.head * ROW * (ROW + 1) // 2
    return ROW * s.layers * projections + mlps, mlps, scores, ROW * 2 * s.hidden * s.vocabulary


LAYERS, MLPS, SCORES, OUTPUT = flops_of_a_row()


@pytest.mark.parametrize(
    ("overrides", "extra"),
    [
        ((), 0),
        ((CHUNKS,), OUTPUT),
        ((TILES,), MLPS + 0.02 * 3 * MLPS),
        ((f"++{MEGATRON}.mlp_tile_tokens=8192",), MLPS + 0.04 * 3 * MLPS),
        ((f"++{MEGATRON}.mlp_tile_tokens={ROW}",), MLPS),
        (FULL, LAYERS + SCORES),
        ((*FULL, segments(4)), LAYERS + SCORES),
        ((*FULL, TILES), LAYERS + SCORES + MLPS + 0.02 * 3 * MLPS),
        ((*FULL, segments(7), f"++{MEGATRON}.recompute_method=block"), (LAYERS + SCORES) / 4),
        ((*FULL, *offloads("layer_input")), LAYERS + SCORES),
        ((*FULL, *offloads("layer_input"), segments(4)), 1.75 * (LAYERS + SCORES)),
        ((*FULL, *offloads("layer_input"), TILES), LAYERS + SCORES + 0.02 * 3 * MLPS),
        ((*FULL, *offloads("layer_input", "core_attn")), LAYERS),
        ((FULL[0], f"++{MEGATRON}.recompute_granularity=selective"), SCORES),
        ((FULL[0], f"++{MEGATRON}.recompute_granularity=selective", f"++{MEGATRON}.recompute_modules=[mlp]"), MLPS),
    ],
)
def test_what_is_computed_again(overrides, extra):
    # Without chunks unless they are the case, on one GPU, in one micro-batch.
    whole = f"++{MEGATRON}.use_fused_linear_logprobs=false"
    seconds, _ = predicted(f"policy.max_total_sequence_length={ROW}", *PADDED, whole, *overrides)
    flops = 3 * (LAYERS + SCORES + OUTPUT) + extra
    hidden_copies = 0.05 if any("offload_modules" in one for one in overrides) else 0.0
    expected = flops / RATE / PEAK_FLOPS * (1 + ROW_TOKENS / ROW)
    assert seconds == pytest.approx(expected, abs=hidden_copies + 1e-9)


def test_short_rows_cost_more_and_a_pipeline_has_a_bubble():
    rows = ("policy.train_global_batch_size=64",)
    short, long = (predicted(*rows, f"policy.sequence_packing.train_mb_tokens={n}")[0] for n in (8192, 16384))
    assert long / short == pytest.approx(0.94, abs=0.005)
    base = (*rows, "policy.sequence_packing.train_mb_tokens=8192", "cluster.gpus_per_node=2")
    data, _ = predicted(*base, world_size=2)
    pipeline, _ = predicted(*base, f"{MEGATRON}.pipeline_model_parallel_size=2", world_size=2)
    assert pipeline / data == pytest.approx(1 + 1 / 4, rel=0.01)  # 64 x 512 tokens in rows of 8,192 are 4 micro-batches


def test_log_prob_passes_are_those_of_policy_and_reference():
    rows = ("policy.sequence_packing.logprob_mb_tokens=8192", "policy.sequence_packing.train_mb_tokens=8192")
    _, both = predicted(*rows)
    _, one = predicted(*rows, "loss_fn.reference_policy_kl_penalty=0")
    assert both == 2 * one
    flops = read_flop_model(QWEN2_1_5B, load(GRPO).config["policy"])
    policy = load(GRPO).config["policy"]
    lengths = [policy["max_total_sequence_length"]] * policy["train_global_batch_size"]
    assert one == pytest.approx(flops.forward_flops(lengths) / RATE / PEAK_FLOPS * (1 + ROW_TOKENS / 8192))
