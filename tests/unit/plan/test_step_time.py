"""Tests predicted seconds against steps that were measured, and what each setting adds against hand counts."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from benchmarks.model_shapes import QWEN2_1_5B, QWEN3_8B, QWEN3_EXPERTS
from nemo_offload_rl.config import load
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.placement.rates import H200_RATES, AttentionRates, Curve
from nemo_offload_rl.plan import step_time
from nemo_offload_rl.plan.activations import activation_facts
from nemo_offload_rl.plan.optimizer_ways import optimizer_wait_s
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.plan.planner import plan_run
from tests.unit.config.conftest import CONFIGS

ROOT = CONFIGS.parents[1]
RESULTS = ROOT / "docs" / "results"
GRPO = ROOT / "benchmarks" / "recipes" / "grpo_1_5B_random.yaml"
DPO = CONFIGS / "dpo.yaml"
DENSE = ROOT / "benchmarks" / "activation_cases" / "dense.yaml"
MEGATRON = "policy.megatron_cfg"
PADDED = ["policy.sequence_packing.enabled=false"]
PADDED += ["policy.train_micro_batch_size=1", "policy.train_global_batch_size=1"]
FULL = (f"{MEGATRON}.activation_checkpointing=true", f"++{MEGATRON}.recompute_granularity=full")
TILES = f"++{MEGATRON}.mlp_tile_tokens=auto"
CHUNKS, UNFUSED = (f"++{MEGATRON}.use_fused_linear_logprobs={value}" for value in ("true", "false"))


def offloads(*modules):
    on = f"++{MEGATRON}.fine_grained_activation_offloading=true"
    return on, f"++{MEGATRON}.offload_modules=[{','.join(modules)}]"


def segments(number):
    return f"++{MEGATRON}.recompute_num_layers={number}"


OURS = (*FULL, *offloads("layer_input"), TILES)
WAYS = {
    "recompute": FULL,
    "ours": OURS,
    "ours_attention_kept": (*FULL, *offloads("layer_input", "core_attn"), TILES),
    "segments2": (*OURS, segments(2)),
    "segments4": (*OURS, segments(4)),
}


RATE = 5e14
FLAT = dataclasses.replace(
    H200_RATES,
    matmul=Curve(((1, RATE),)),
    # The backward pass has 2.5 times the FLOPs of the forward pass; here it takes twice as long.
    attention=(AttentionRates(128, Curve(((1, RATE),)), Curve(((1, 1.25 * RATE),))),),
    memory_bytes_per_s=1e30,
    launch_s=1e-30,
)
"""A machine that takes time for FLOPs and copies alone."""


def predicted(*overrides, recipe=GRPO, model=QWEN2_1_5B, world_size=1, rates=H200_RATES):
    """Returns the seconds of training and of log-prob passes."""
    validated = load(recipe, list(overrides))
    config, spec = validated.config, ALGORITHMS[validated.algorithm]
    policy = config["policy"]
    stages = activation_facts(model, policy, world_size=world_size, group_size=spec.group_size)
    flops = step_time.read_flop_model(model, policy)
    training = step_time.training_seconds(flops, config, spec, stages, settings(policy).activations, rates)
    return training, step_time.logprob_seconds(flops, config, spec, rates)


def test_long_rows_take_as_long_as_measured():
    rows = json.loads((RESULTS / "long_rows.json").read_text())["rows"]
    measured = [row for row in rows if row["fits"]]
    assert len(measured) == 13
    for row in measured:
        model = {"1.5b": QWEN2_1_5B, "8b": QWEN3_8B}[row["model"]]
        of_row = (f"policy.max_total_sequence_length={row['tokens']}", *PADDED, CHUNKS, *WAYS[row["way"]])
        no_reference = "loss_fn.reference_policy_kl_penalty=0"
        training, logprobs = predicted(*of_row, no_reference, "policy.logprob_batch_size=1", model=model)
        assert training + row["optimizer_exposed_s"] == pytest.approx(row["step_s"], rel=0.15), row["way"]
        if row["logprob_s"] is not None:
            assert logprobs == pytest.approx(row["logprob_s"], rel=0.15)


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


COMPUTED_AGAIN = [
    ((), 0),
    ((CHUNKS,), OUTPUT),
    ((TILES,), MLPS),
    ((f"++{MEGATRON}.mlp_tile_tokens=8192",), MLPS),
    ((f"++{MEGATRON}.mlp_tile_tokens={ROW}",), MLPS),
    (FULL, LAYERS + SCORES),
    ((*FULL, segments(4)), LAYERS + SCORES),
    ((*FULL, TILES), LAYERS + SCORES + MLPS),
    ((*FULL, segments(7), f"++{MEGATRON}.recompute_method=block"), (LAYERS + SCORES) / 4),
    ((*FULL, *offloads("layer_input")), LAYERS + SCORES),
    ((*FULL, *offloads("layer_input"), segments(4)), 1.75 * (LAYERS + SCORES)),
    ((*FULL, *offloads("layer_input"), TILES), LAYERS + SCORES),
    ((*FULL, *offloads("layer_input", "core_attn")), LAYERS),
    ((FULL[0], f"++{MEGATRON}.recompute_granularity=selective"), SCORES),
    ((FULL[0], f"++{MEGATRON}.recompute_granularity=selective", f"++{MEGATRON}.recompute_modules=[mlp]"), MLPS),
]


@pytest.mark.parametrize(("overrides", "extra"), COMPUTED_AGAIN)
def test_what_is_computed_again(overrides, extra):
    # Without chunks unless they are the case, on one GPU, in one micro-batch; copies hide.
    seconds, _ = predicted(f"policy.max_total_sequence_length={ROW}", *PADDED, UNFUSED, *overrides, rates=FLAT)
    assert seconds == pytest.approx((3 * (LAYERS + SCORES + OUTPUT) + extra) / RATE)


def test_gradients_are_added_up_for_every_tile():
    slow = dataclasses.replace(FLAT, memory_bytes_per_s=1e12)
    row = (f"policy.max_total_sequence_length={ROW}", *PADDED)
    small, large = (predicted(*row, f"++{MEGATRON}.mlp_tile_tokens={n}", rates=slow)[0] for n in (8192, 16384))
    weights = MLPS / ROW / 2
    assert small - large == pytest.approx(8 * weights * 12 / 1e12)


@pytest.mark.parametrize(("model", "experts"), [(QWEN2_1_5B, 0), (QWEN3_EXPERTS, 128)])
def test_a_host_that_is_slower_than_the_gpu_counts(model, experts):
    """It starts the operations of every layer and expert in every micro-batch, and others once a pass."""
    rows = [f"policy.sequence_packing.{key}_mb_tokens=8192" for key in ("train", "logprob")]
    rows += ["policy.train_global_batch_size=64", "loss_fn.reference_policy_kl_penalty=0"]  # 4 micro-batches
    slow = dataclasses.replace(FLAT, launch_s=1.0)
    layers = model["num_hidden_layers"]
    norms = step_time.QK_NORM_LAUNCHES * (model["model_type"] == "qwen3_moe")
    forward = layers * (step_time.FORWARD_LAUNCHES + norms + experts * step_time.EXPERT_FORWARD_LAUNCHES)
    backward = layers * (step_time.BACKWARD_LAUNCHES + norms + experts * step_time.EXPERT_BACKWARD_LAUNCHES)
    training, logprobs = predicted(*rows, model=model, rates=slow)
    on_gpu = predicted(*rows, model=model, rates=FLAT)[1] if experts else 0.0  # experts wait for counts of tokens
    assert training == pytest.approx(4 * (forward + backward) + step_time.STEP_LAUNCHES + on_gpu)
    assert logprobs == pytest.approx(4 * forward + step_time.LOGPROB_LAUNCHES + on_gpu)
    recomputed, _ = predicted(*rows, *FULL, model=model, rates=slow)
    assert recomputed == pytest.approx(4 * (2 * forward + backward) + step_time.STEP_LAUNCHES + 2 * on_gpu, rel=1e-4)


STREAMED = "++policy.residency.table.train.optimizer_state=streamed"
ON_CPU = [f"{MEGATRON}.optimizer.{key}=true" for key in ("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d")]
ON_CPU += [f"{MEGATRON}.optimizer.optimizer_offload_fraction=1"]


@pytest.mark.parametrize(("overrides", "measured_s"), [((), 0.019), ((STREAMED,), 0.315), (ON_CPU, 0.477)])
def test_the_optimizer_takes_as_long_as_measured(overrides, measured_s):
    """Those of docs/results/cpu_optimizer.md."""
    run = plan_run(load(GRPO, list(overrides)).config, QWEN2_1_5B, algorithm="grpo")
    [rank] = run.plan.ranks
    wait_s = optimizer_wait_s(rank, H200_RATES.link_bytes_per_s, H200_RATES.cpu_params_per_s)
    assert step_time.optimizer_seconds(rank, wait_s, H200_RATES) == pytest.approx(measured_s, rel=0.15)


def test_short_rows_cost_more_and_a_pipeline_has_a_bubble():
    def seconds(tokens, *more, **of_machine):
        rows = [f"policy.sequence_packing.{key}_mb_tokens={tokens}" for key in ("train", "logprob")]
        return predicted("policy.train_global_batch_size=64", *rows, *more, **of_machine)

    assert 0.92 < seconds(16384)[0] / seconds(8192)[0] < 0.98  # measured: 0.94
    two = {"world_size": 2, "rates": FLAT}  # 64 x 512 tokens in rows of 8,192 are 4 micro-batches
    data = seconds(8192, "cluster.gpus_per_node=2", **two)
    pipeline = seconds(8192, "cluster.gpus_per_node=2", f"{MEGATRON}.pipeline_model_parallel_size=2", **two)
    assert [long / short for long, short in zip(pipeline, data, strict=True)] == pytest.approx([5 / 4] * 2, rel=0.01)


def test_log_prob_passes_are_those_of_policy_and_reference():
    rows = ("policy.sequence_packing.logprob_mb_tokens=8192", "policy.sequence_packing.train_mb_tokens=8192")
    _, both = predicted(*rows, rates=FLAT)
    _, one = predicted(*rows, "loss_fn.reference_policy_kl_penalty=0", rates=FLAT)
    assert both == 2 * one
    forced = (*rows, "++loss_fn.force_on_policy_ratio=true")
    assert predicted(*forced, rates=FLAT)[1] == one
    assert predicted(*forced, "loss_fn.reference_policy_kl_penalty=0", rates=FLAT)[1] == 0
    flops = step_time.read_flop_model(QWEN2_1_5B, load(GRPO).config["policy"])
    policy = load(GRPO).config["policy"]
    lengths = [policy["max_total_sequence_length"]] * policy["train_global_batch_size"]
    assert one == pytest.approx(flops.forward_flops(lengths) / RATE)


@pytest.mark.parametrize("packs", ["true", "false"])
def test_dpo_has_one_log_prob_pass_of_pairs(packs):
    """That of the reference; the policy's log-probs are those of training."""
    whole = (f"policy.sequence_packing.enabled={packs}", f"{MEGATRON}.activation_checkpointing=false")
    training, logprobs = predicted(*whole, UNFUSED, recipe=DPO, rates=FLAT)
    assert logprobs == pytest.approx(training / 3)


def test_padding_adds_no_micro_batches_to_log_prob_passes():
    """With tensor and context parallelism of 2, rows of 97 tokens have more: 8 of them are 4 micro-batches, not 5."""
    slow = dataclasses.replace(FLAT, launch_s=1.0)
    layout = [f"{MEGATRON}.{kind}_parallel_size=2" for kind in ("tensor_model", "context")]
    layout += ["cluster.gpus_per_node=4", "policy.sequence_packing.enabled=false", "policy.logprob_batch_size=2"]
    layout += ["policy.train_micro_batch_size=2", "policy.train_global_batch_size=8"]
    layout += ["policy.generation.max_new_tokens=16"]
    lengths = [f"policy.max_total_sequence_length={length}" for length in (97, 104)]
    shorter, longer = (predicted(*layout, length, world_size=4, rates=slow) for length in lengths)
    assert shorter == pytest.approx(longer)
