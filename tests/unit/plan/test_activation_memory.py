"""Tests the search for overrides with which a recipe fits: against brute force, by applying them, and as `auto`."""

import dataclasses
import itertools
import json
import re

import pytest

from benchmarks.model_shapes import LLAMA_1B, QWEN2_1_5B, QWEN3_8B, QWEN3_30B_A3B
from nemo_offload_rl.cli import main
from nemo_offload_rl.config import RecipeError, check_rules, load
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.memory.units import GIB, show_gib
from nemo_offload_rl.placement.rates import H200_RATES
from nemo_offload_rl.plan import fit as fitting
from nemo_offload_rl.plan import planner as planning
from nemo_offload_rl.plan.activations import activation_facts
from nemo_offload_rl.plan.decisions import Machine, check_fits
from nemo_offload_rl.plan.fit import Fit, cheapest_fit, missing_gpu_bytes
from nemo_offload_rl.plan.fit_options import as_overrides, from_overrides
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.plan.planner import Planner
from nemo_offload_rl.plan.resolve import resolve
from nemo_offload_rl.plan.step_time import logprob_seconds, optimizer_seconds, read_flop_model, training_seconds
from nemo_offload_rl.plan.values import value_at
from tests.unit.config.conftest import CONFIGS
from tests.unit.plan.test_optimizer_ways import host

RECIPES = CONFIGS.parents[1] / "benchmarks" / "recipes"
GRPO, GRPO_8B = RECIPES / "grpo_1_5B_random.yaml", RECIPES / "grpo_8B_random.yaml"
SFT, DPO = CONFIGS / "sft.yaml", CONFIGS / "dpo.yaml"
MEGATRON = "policy.megatron_cfg"
PACKING = "policy.sequence_packing"
FULL = (f"++{MEGATRON}.activation_checkpointing=true", f"++{MEGATRON}.recompute_granularity=full")
MOVES = f"++{MEGATRON}.fine_grained_activation_offloading=true"
STREAMED = "++policy.residency.table.train.optimizer_state=streamed"
RESIDENT = "policy.offload_optimizer_for_refit=false"
SIZES = {GRPO: QWEN2_1_5B, GRPO_8B: QWEN3_8B, SFT: QWEN3_8B, DPO: LLAMA_1B}
TOO_LARGE_FOR_ANY_HOST = ("policy.hf_config.num_hidden_layers=20000",)
SHORT = (f"{PACKING}.train_mb_tokens=576", f"{PACKING}.logprob_mb_tokens=512")


def machine(gpu_gib, host_gib=512, **rates):
    rates = dataclasses.replace(H200_RATES, **rates)
    return Machine(has_gpus=True, gpu_bytes=int(gpu_gib * GIB), hosts=(host(host_gib).memory,), rates=rates)


def planner(recipe, on, *overrides, model=None):
    algorithm = load(recipe, list(overrides)).algorithm
    return Planner(model or SIZES[recipe], algorithm, on.gpu_bytes, on.hosts, rates=on.rates)


def searched(recipe, on, *overrides, model=None):
    """Returns what `plan --fit` prints."""
    on_machine = planner(recipe, on, *overrides, model=model)
    return cheapest_fit(lambda more: load(recipe, [*overrides, *more]).config, on_machine)


def resolved(recipe, on, *overrides, model=None):
    validated = load(recipe, list(overrides))
    return resolve(validated.config, on, model or SIZES[recipe], algorithm=validated.algorithm)


def planned(recipe, on, *overrides, model=None):
    """Returns the recipe as a run resolves it, after the run's own checks, and the GPU memory that it lacks."""
    found = resolved(recipe, on, *overrides, model=model)
    check_fits(found, on)
    return found, missing_gpu_bytes(found.config, found.run, planner(recipe, on, *overrides, model=model))


ATTENTION = (MOVES, f"++{MEGATRON}.offload_modules=[qkv_linear,core_attn,attn_proj]")
GRID = {
    "state": [(), (RESIDENT,), (STREAMED,)],
    "activations": [
        (),
        FULL,
        (*FULL, f"++{MEGATRON}.recompute_num_layers=4"),
        (*FULL, MOVES, f"++{MEGATRON}.offload_modules=[layer_input,core_attn]"),
        ATTENTION,
        (*ATTENTION, f"++{MEGATRON}.activation_offload_fraction=0.5"),
    ],
    "logits": [(), (f"++{MEGATRON}.use_fused_linear_logprobs=true",)],
    "rows": [(), (f"++{PACKING}.train_mb_tokens=512",)],
}


@pytest.fixture(scope="module")
def brute_force():
    """Returns for every combination of the grid: seconds, GPU bytes that it needs, host bytes that it needs."""
    plenty, rows = 1 << 40, []
    for parts in itertools.product(*GRID.values()):
        found, missing = planned(GRPO, machine(plenty / GIB), *SHORT, *itertools.chain(*parts))
        config, spec, run = found.config, ALGORITHMS["grpo"], found.run
        stages = activation_facts(QWEN2_1_5B, config["policy"], world_size=1)
        flops = read_flop_model(QWEN2_1_5B, config["policy"])
        [rank] = run.plan.ranks
        seconds = training_seconds(flops, config, spec, stages, settings(config["policy"]).activations, H200_RATES)
        seconds += logprob_seconds(flops, config, spec, H200_RATES)
        seconds += optimizer_seconds(rank, sum(move.seconds for move in rank.step_traffic), H200_RATES)
        rows.append((seconds, plenty + missing, run.most_host_bytes))
    return rows


@pytest.fixture
def small_grid(monkeypatch):
    options = [from_overrides(overrides) for overrides in GRID["activations"]]
    off = {fitting.OFFLOADING: False}
    options = [one if fitting.OFFLOADING in one or not one else one | off for one in options]
    options[4] |= {f"{MEGATRON}.activation_offload_fraction": 1.0}
    monkeypatch.setattr(fitting, "activation_options", lambda *_, **__: options)
    monkeypatch.setattr(fitting, "tile_options", lambda **_: [{}])


@pytest.mark.parametrize("host_gib", [512, 18])
def test_the_search_finds_what_brute_force_finds(brute_force, small_grid, host_gib):
    usable = host(host_gib).usable_bytes
    needed = sorted(gpu for _, gpu, _ in brute_force)
    for gpu in (needed[0] - 1, *needed[:: len(needed) // 3]):
        fitting_ones = [seconds for seconds, on_gpu, on_host in brute_force if on_gpu <= gpu and on_host <= usable]
        on = machine(gpu / GIB, host_gib)
        found = searched(GRPO, on, *SHORT)
        assert found.fits == bool(fitting_ones), gpu
        if fitting_ones:
            assert found.seconds == pytest.approx(min(fitting_ones))
            run_of, missing = planned(GRPO, on, *SHORT, *found.overrides)
            assert missing <= 0
            assert run_of.run.most_host_bytes <= usable
        elif gpu < needed[0]:
            assert found.missing_gpu_bytes == 1
            assert found.missing_host_bytes == 0
        else:
            nearest = min(on_host for _, on_gpu, on_host in brute_force if on_gpu <= gpu)
            assert (found.missing_gpu_bytes, found.missing_host_bytes) == (0, nearest - usable)


SAMPLES = ("policy.train_global_batch_size=64", "policy.train_micro_batch_size=8")
LENGTH = "policy.max_total_sequence_length=4096"
EXPERTS = (*SAMPLES, LENGTH, "cluster.gpus_per_node=8", f"{MEGATRON}.expert_model_parallel_size=8")


FITTING = [
    (GRPO, QWEN2_1_5B, 40, ("policy.generation.backend=vllm",)),
    (GRPO, QWEN2_1_5B, 24, (*SHORT, "++grpo.debug.replay_rollouts=rollouts")),
    (GRPO, QWEN2_1_5B, 16, (*SHORT, "cluster.gpus_per_node=2", f"{MEGATRON}.pipeline_model_parallel_size=2")),
    (CONFIGS / "sft_long_rows.yaml", QWEN3_8B, 79.6, ()),
    (DPO, LLAMA_1B, 20, (LENGTH,)),
    (SFT, QWEN3_30B_A3B, 79.6, EXPERTS),
]


@pytest.mark.parametrize(("recipe", "model", "gib", "overrides"), FITTING)
def test_a_recipe_with_the_overrides_fits(recipe, model, gib, overrides):
    found = searched(recipe, machine(gib), *overrides, model=model)
    assert found.fits
    assert planned(recipe, machine(gib), *overrides, *found.overrides, model=model)[1] <= 0


def test_the_search_makes_few_plans(monkeypatch):
    """Each takes some milliseconds, of which two seconds are made."""
    plans, plan_run = [], planning.plan_run
    monkeypatch.setattr(planning, "plan_run", lambda *given, **named: plans.append(0) or plan_run(*given, **named))
    assert searched(GRPO, machine(20)).fits
    assert len(plans) < 100


def test_a_setting_that_the_recipe_does_not_allow_is_not_chosen():
    """Captured parts of a layer cannot run twice."""
    graphs = (
        f"++{MEGATRON}.cuda_graph_impl=transformer_engine",
        f"++{MEGATRON}.cuda_graph_modules=[attn]",
        f"{PACKING}.enabled=false",
        "policy.train_micro_batch_size=1",
        "policy.logprob_batch_size=1",
        "policy.max_total_sequence_length=32768",
    )
    free, bound = (searched(GRPO, machine(14), *chosen) for chosen in (graphs[2:], graphs))
    assert f"++{MEGATRON}.activation_checkpointing=true" in free.overrides
    assert f"++{MEGATRON}.activation_checkpointing=true" not in bound.overrides
    assert (free.fits, bound.fits) == (True, False)


def test_the_cpu_optimizer_stays_on_since_it_rounds_differently():
    on_cpu = (
        f"{MEGATRON}.optimizer.optimizer_cpu_offload=true",
        f"{MEGATRON}.optimizer.optimizer_offload_fraction=0.25",
    )
    for gib in (28, 80):  # where it fits only with other settings, and where all state has room on the GPU
        found = searched(GRPO, machine(gib), *on_cpu)
        assert found.fits
        changed = {key for key in from_overrides(found.overrides) if ".optimizer." in key}
        assert changed <= {f"{MEGATRON}.optimizer.overlap_cpu_optimizer_d2h_h2d"}
        assert settings(load(GRPO, [*on_cpu, *found.overrides]).config["policy"]).streams_optimizer_state is False


def test_padded_validation_counts_and_gets_smaller_micro_batches():
    def fit(recipe, gib, *overrides):
        return searched(recipe, machine(gib), LENGTH, *overrides, model=LLAMA_1B)

    # 32 samples of 4,096 tokens: 31.3 GiB of logits, beside 16 GiB of state.
    many = ("sft.val_global_batch_size=64", "sft.val_micro_batch_size=32")
    found = fit(SFT, 40, *many)
    assert found.fits
    assert found.overrides == ("++sft.val_micro_batch_size=16",)
    assert fit(SFT, 60, *many).overrides == ()
    never = ("sft.val_period=0", "sft.val_at_start=false", "sft.val_at_end=false")
    assert fit(SFT, 40, *many, *never).overrides == ()
    assert fit(SFT, 40, *many, f"{PACKING}.enabled=true").overrides == ()  # then rows of training's length
    pairs = fit(DPO, 48, "dpo.val_global_batch_size=16", "dpo.val_micro_batch_size=16")
    assert pairs.fits
    assert "++dpo.val_micro_batch_size=8" in pairs.overrides


def printed(capsys, *arguments, status=0):
    assert main(["plan", str(GRPO), "--fit", "--host-memory", "512", *SHORT, *arguments]) == status
    return capsys.readouterr().out


def test_the_command_prints_the_overrides_or_the_memory_that_is_missing(capsys):
    sentence, *overrides = printed(capsys, "--gpu-memory", "20").splitlines()
    assert sentence.startswith("The recipe fits a GPU of 20.00 GiB with these overrides")
    assert f"    {STREAMED}" in overrides
    found = Fit(**json.loads(printed(capsys, "--gpu-memory", "4", "--json", status=1)))
    assert not found.fits
    sentence, *overrides = found.lines(4 * GIB, host(512))
    assert f"lacks {found.missing_gpu_bytes / GIB:.2f} GiB" in sentence
    assert [line.strip() for line in overrides] == found.overrides
    assert "this machine, which lacks 3.00 GiB of host memory" in Fit((), 1.0, 0, 3 * GIB).lines(GIB, host(1))[0]
    assert "as it is" in Fit((), 1.0).lines(GIB, host(1))[0]
    here = dataclasses.replace(host(1), otherwise="Or so.")
    assert [len(Fit((), 1.0, *missing).lines(GIB, here)) for missing in ((GIB, 0), (0, GIB))] == [1, 2]
    assert main(["plan", str(GRPO), *SHORT, "--gpu-memory", "100000", *TOO_LARGE_FOR_ANY_HOST]) == 0
    assert "would make room. --host-memory GIB plans" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", str(GRPO), "--fit"]) == 2  # it needs a GPU to fit
    assert "--gpu-memory" in capsys.readouterr().err


AUTO = "++policy.activation_memory=auto"
STATE = "policy.residency.table.train.optimizer_state"
MOVED = f"{MEGATRON}.fine_grained_activation_offloading"
LONG = "policy.max_total_sequence_length=65536"
ROWS = ("policy.sequence_packing.train_mb_tokens=2048", "policy.sequence_packing.logprob_mb_tokens=2048")
AHEAD = ("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")
AHEAD += ("policy.generation.backend=vllm",)


ADDED = [
    (SFT, 79.6, (LONG,), {STATE: "streamed", MOVED: True, f"{MEGATRON}.use_fused_linear_logprobs": True}),
    (DPO, 13, (), {STATE: "streamed", MOVED: True}),
    (GRPO_8B, 38, (), {MOVED: True, f"{MEGATRON}.offload_modules": ["layer_input", "core_attn"]}),
    (GRPO, 44, (*ROWS, *AHEAD), {STATE: "streamed"}),
    (GRPO, 24, (*ROWS, "++grpo.debug.replay_rollouts=rollouts"), {STATE: "streamed"}),
]


@pytest.mark.parametrize(("recipe", "gpu_gib", "overrides", "added"), ADDED)
def test_a_recipe_that_does_not_fit_runs_as_with_the_overrides_of_fit(recipe, gpu_gib, overrides, added):
    on = machine(gpu_gib)
    found, fit = resolved(recipe, on, *overrides, AUTO), searched(recipe, on, *overrides, AUTO)
    assert found.chosen == fit.overrides
    assert {key: value_at(found.config, key) for key in added} == added
    pinned = resolved(recipe, on, *overrides, *fit.overrides)
    assert found.config == pinned.config
    assert found.run == pinned.run
    line, *lines = found.lines
    assert all(override in line for override in fit.overrides)
    assert f"{fit.seconds:.3g} s a step" in line
    assert tuple(lines) == pinned.lines
    check_fits(found, on)


@pytest.mark.parametrize(("recipe", "gpu_gib"), [(SFT, 140), (DPO, 40), (GRPO, 79.6)])
def test_a_recipe_that_fits_stays_as_it_is(recipe, gpu_gib):
    found, plain = resolved(recipe, machine(gpu_gib), AUTO), resolved(recipe, machine(gpu_gib))
    assert found == dataclasses.replace(plain, lines=(found.lines[0], *plain.lines))
    assert "fits as it is" in found.lines[0]


def test_a_recipe_that_fits_stays_as_it_is_unless_more_saves_a_few_percent():
    """Streamed state leaves room for longer rows, which save more where the GPU's memory is slow."""
    little, much = machine(40, memory_bytes_per_s=1e12), machine(40, memory_bytes_per_s=2e11)
    best, found = searched(GRPO, little), searched(GRPO, little, AUTO)
    assert best.overrides
    assert found.overrides == ()
    assert best.seconds < found.seconds < best.seconds / 0.97
    check_fits(resolved(GRPO, much), much)
    assert f"++{STATE}=streamed" in searched(GRPO, much, AUTO).overrides


KEPT = [
    # Each would be changed without auto.
    (DPO, 24, {f"{MEGATRON}.activation_checkpointing": "true"}),
    (DPO, 16, {MOVED: "true", f"{MEGATRON}.offload_modules": "[qkv_linear]"}),
    (DPO, 16, {f"{MEGATRON}.mlp_tile_tokens": "4096", f"{MEGATRON}.use_fused_linear_logprobs": "true"}),
    (SFT, 140, {STATE: "streamed"}),
    (DPO, 16, {f"{MEGATRON}.activation_checkpointing": "true", f"{MEGATRON}.recompute_granularity": "selective"}),
    (GRPO, 18, {"policy.sequence_packing.train_mb_tokens": "16384", ROWS[1].partition("=")[0]: "2048"}),
    (DPO, 20, {"policy.train_micro_batch_size": "8"}),
]


@pytest.mark.parametrize(("recipe", "gpu_gib", "kept"), KEPT)
def test_what_a_recipe_sets_stays(recipe, gpu_gib, kept):
    overrides = [f"++{key}={value}" for key, value in kept.items()]
    changed = from_overrides(searched(recipe, machine(gpu_gib), *overrides).overrides)
    assert kept.keys() & changed.keys()
    found = resolved(recipe, machine(gpu_gib), *overrides, AUTO)
    written = load(recipe, overrides).config
    assert {key: value_at(found.config, key) for key in kept} == {key: value_at(written, key) for key in kept}


def test_state_that_is_to_stay_on_the_gpu_is_not_streamed():
    stays = "policy.offload_optimizer_for_refit=false"
    assert f"++{STATE}=streamed" in searched(GRPO, machine(24), *ROWS, AUTO).overrides
    assert f"++{STATE}=streamed" not in searched(GRPO, machine(24), *ROWS, AUTO, stays).overrides


@pytest.mark.parametrize(("gpu_gib", "host_gib"), [(10, 512), (16, 5)])
def test_the_memory_that_is_missing_is_said_before_anything_starts(gpu_gib, host_gib):
    on = machine(gpu_gib, host_gib)
    found, fit = resolved(DPO, on, LONG, AUTO), searched(DPO, on, LONG, AUTO)
    assert (found.chosen, found.peaks_gib) == ((), {})
    missing = fit.missing_gpu_bytes or fit.missing_host_bytes
    with pytest.raises(ValueError, match=re.escape(f"lacks {show_gib(missing)} GiB")):
        check_fits(found, on)


def test_a_problem_is_said_once():
    """The engine's share has no room for a sequence, whatever the policy does."""
    found = resolved(GRPO_8B, machine(24), AUTO)
    assert [str(problem) for problem in found.problems] == list(dict.fromkeys(map(str, found.problems)))


def test_nothing_is_added_where_no_memory_or_no_size_is_known():
    for on in (Machine(has_gpus=False), Machine(has_gpus=True)):
        found, plain = resolved(SFT, on, AUTO), resolved(SFT, on)
        assert found == dataclasses.replace(plain, lines=(found.lines[0], *plain.lines))
        assert "adds nothing" in found.lines[0]
    found = resolved(SFT, machine(16), f"+{MEGATRON}.softmax_type=learnable", AUTO)
    assert (found.chosen, found.problems) == ((), ())
    assert "adds nothing" in found.lines[0]


def test_the_plan_shows_the_recipe_as_it_runs(capsys):
    arguments = ["plan", str(GRPO), *ROWS, "--gpu-memory", "24", "--host-memory", "512"]

    def printed(*more):
        assert main([*arguments, *more]) == 0
        return capsys.readouterr().out

    words = printed(AUTO).split()
    pinned = words[words.index("policy.activation_memory=null") + 1]
    assert pinned == f"++{STATE}=streamed"
    assert json.loads(printed("--json", AUTO)) == json.loads(printed("--json", pinned))


def test_ways_to_keep_optimizer_state_are_planned_beside_the_kv_cache_that_was_chosen(capsys):
    assert main(["plan", str(GRPO), AUTO, *AHEAD, "--gpu-memory", "20", "--host-memory", "512", "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["optimizer_state_ways"]["chosen"]
    assert chosen == "streamed"


def test_overrides_give_back_their_values():
    values = {"a.b": True, "a.c": None, "a.d": ["x", "y"], "e": 0.75, "f": 512, "g": "full"}
    assert from_overrides(as_overrides(values)) == values


def test_rules_are_checked_again_after_values_were_replaced():
    config = load(SFT).config
    check_rules("sft", config)
    moved = {"fine_grained_activation_offloading": True, "offload_modules": ["attn_proj"]}
    config["policy"]["megatron_cfg"] |= moved
    with pytest.raises(RecipeError, match="add core_attn"):
        check_rules("sft", config)
