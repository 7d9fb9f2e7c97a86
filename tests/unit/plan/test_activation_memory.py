"""Tests what `policy.activation_memory: auto` adds to a recipe on a machine: the overrides of `plan --fit`."""

import dataclasses
import json
import re

import pytest

from benchmarks.model_shapes import LLAMA_1B, QWEN2_1_5B, QWEN3_8B
from nemo_offload_rl.cli import main
from nemo_offload_rl.config import RecipeError, check_rules, load
from nemo_offload_rl.memory.units import GIB, show_gib
from nemo_offload_rl.placement.machine import HostFacts
from nemo_offload_rl.placement.rates import H200_RATES
from nemo_offload_rl.plan.decisions import Machine, check_fits
from nemo_offload_rl.plan.fit import cheapest_fit
from nemo_offload_rl.plan.fit_options import as_overrides, from_overrides, value_at
from nemo_offload_rl.plan.planner import Planner
from nemo_offload_rl.plan.resolve import resolve
from tests.unit.config.conftest import CONFIGS

RECIPES = CONFIGS.parents[1] / "benchmarks" / "recipes"
GRPO, GRPO_8B = RECIPES / "grpo_1_5B_random.yaml", RECIPES / "grpo_8B_random.yaml"
SFT, DPO = CONFIGS / "sft.yaml", CONFIGS / "dpo.yaml"
AUTO = "++policy.activation_memory=auto"
MEGATRON, STATE = "policy.megatron_cfg", "policy.residency.table.train.optimizer_state"
MOVED = f"{MEGATRON}.fine_grained_activation_offloading"
LONG = "policy.max_total_sequence_length=65536"
ROWS = ("policy.sequence_packing.train_mb_tokens=2048", "policy.sequence_packing.logprob_mb_tokens=2048")
AHEAD = ("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")
AHEAD += ("policy.generation.backend=vllm",)
SIZES = {GRPO: QWEN2_1_5B, GRPO_8B: QWEN3_8B, SFT: QWEN3_8B, DPO: LLAMA_1B}


def machine(gpu_gib, host_gib=512, **rates):
    nbytes = int(host_gib * GIB)
    host = HostFacts("a", "", nbytes, nbytes, None, None)
    rates = dataclasses.replace(H200_RATES, **rates)
    return Machine(has_gpus=True, gpu_bytes=int(gpu_gib * GIB), hosts=(host,), rates=rates)


def resolved(recipe, on, *overrides):
    validated = load(recipe, list(overrides))
    return resolve(validated.config, on, SIZES[recipe], algorithm=validated.algorithm)


def searched(recipe, on, *overrides):
    """Returns what `plan --fit` prints."""
    algorithm = load(recipe, list(overrides)).algorithm
    planner = Planner(SIZES[recipe], algorithm, on.gpu_bytes, on.hosts, rates=on.rates)
    return cheapest_fit(lambda more: load(recipe, [*overrides, *more]).config, planner)


@pytest.mark.parametrize(
    ("recipe", "gpu_gib", "overrides", "added"),
    [
        (SFT, 79.6, (LONG,), {STATE: "streamed", MOVED: True, f"{MEGATRON}.use_fused_linear_logprobs": True}),
        (DPO, 13, (), {STATE: "streamed", MOVED: True}),
        (GRPO_8B, 38, (), {MOVED: True, f"{MEGATRON}.offload_modules": ["layer_input", "core_attn"]}),
        (GRPO, 44, (*ROWS, *AHEAD), {STATE: "streamed"}),
        (GRPO, 24, (*ROWS, "++grpo.debug.replay_rollouts=rollouts"), {STATE: "streamed"}),
    ],
)
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


@pytest.mark.parametrize(
    ("recipe", "gpu_gib", "kept"),
    [
        # Each would be changed without auto.
        (DPO, 24, {f"{MEGATRON}.activation_checkpointing": "true"}),
        (DPO, 16, {MOVED: "true", f"{MEGATRON}.offload_modules": "[qkv_linear]"}),
        (DPO, 16, {f"{MEGATRON}.mlp_tile_tokens": "4096", f"{MEGATRON}.use_fused_linear_logprobs": "true"}),
        (SFT, 140, {STATE: "streamed"}),
        (DPO, 16, {f"{MEGATRON}.activation_checkpointing": "true", f"{MEGATRON}.recompute_granularity": "selective"}),
        (GRPO, 18, {"policy.sequence_packing.train_mb_tokens": "16384", ROWS[1].partition("=")[0]: "2048"}),
        (DPO, 20, {"policy.train_micro_batch_size": "8"}),
    ],
)
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
