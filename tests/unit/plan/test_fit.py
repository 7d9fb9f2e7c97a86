"""Tests the search for overrides with which a recipe fits, against brute force and by applying what it prints."""

import itertools
import json

import pytest

from benchmarks.model_shapes import LLAMA_1B, QWEN2_1_5B, QWEN3_8B, QWEN3_30B_A3B
from nemo_offload_rl.cli import main
from nemo_offload_rl.config import load
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.placement.machine import HostFacts
from nemo_offload_rl.placement.rates import H200_RATES
from nemo_offload_rl.plan import fit as fitting
from nemo_offload_rl.plan.activations import activation_facts
from nemo_offload_rl.plan.decisions import Machine, check_fits
from nemo_offload_rl.plan.fit import Fit, cheapest_fit, missing_gpu_bytes
from nemo_offload_rl.plan.fit_options import from_overrides
from nemo_offload_rl.plan.optimizer_ways import Host
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.plan.planner import Planner
from nemo_offload_rl.plan.resolve import resolve
from nemo_offload_rl.plan.step_time import logprob_seconds, optimizer_seconds, read_flop_model, training_seconds
from tests.unit.config.conftest import CONFIGS

ROOT = CONFIGS.parents[1]
GRPO = ROOT / "benchmarks" / "recipes" / "grpo_1_5B_random.yaml"
MEGATRON = "policy.megatron_cfg"
PACKING = "policy.sequence_packing"
FULL = (f"++{MEGATRON}.activation_checkpointing=true", f"++{MEGATRON}.recompute_granularity=full")
MOVES = f"++{MEGATRON}.fine_grained_activation_offloading=true"
STREAMED = "++policy.residency.table.train.optimizer_state=streamed"
RESIDENT = "policy.offload_optimizer_for_refit=false"
SHORT = (f"{PACKING}.train_mb_tokens=576", f"{PACKING}.logprob_mb_tokens=512")


def host(gib):
    """Returns a machine with so much free memory, 5% of which is a margin."""
    nbytes = int(gib * GIB)
    return Host("this machine", HostFacts("a", "", nbytes, nbytes, None, None), "measured")


def search(gpu_bytes, *overrides, recipe=GRPO, model=QWEN2_1_5B, host_gib=512):
    algorithm = load(recipe, list(overrides)).algorithm
    planner = Planner(model, algorithm, int(gpu_bytes), (host(host_gib).memory,))
    return cheapest_fit(lambda more: load(recipe, [*overrides, *more]).config, planner)


def planned(gpu_bytes, *overrides, recipe=GRPO, model=QWEN2_1_5B, host_gib=512):
    """Returns the recipe as a run resolves it, after the run's own checks, and the GPU memory that it lacks."""
    validated = load(recipe, list(overrides))
    machine = Machine(has_gpus=True, gpu_bytes=int(gpu_bytes), hosts=(host(host_gib).memory,))
    resolved = resolve(validated.config, machine, model, algorithm=validated.algorithm)
    check_fits(resolved, machine)
    planner = Planner(model, validated.algorithm, int(gpu_bytes), machine.hosts)
    return resolved, missing_gpu_bytes(resolved.config, resolved.run, planner)


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
        resolved, missing = planned(plenty, *SHORT, *itertools.chain(*parts))
        config, spec, run = resolved.config, ALGORITHMS["grpo"], resolved.run
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
        found = search(gpu, *SHORT, host_gib=host_gib)
        assert found.fits == bool(fitting_ones), gpu
        if fitting_ones:
            assert found.seconds == pytest.approx(min(fitting_ones))
            resolved, missing = planned(gpu, *SHORT, *found.overrides, host_gib=host_gib)
            assert missing <= 0
            assert resolved.run.most_host_bytes <= usable
        elif gpu < needed[0]:
            assert found.missing_gpu_bytes == 1
            assert found.missing_host_bytes == 0
        else:
            nearest = min(on_host for _, on_gpu, on_host in brute_force if on_gpu <= gpu)
            assert (found.missing_gpu_bytes, found.missing_host_bytes) == (0, nearest - usable)


SFT, LONG, DPO = (CONFIGS / f"{name}.yaml" for name in ("sft", "sft_long_rows", "dpo"))
SAMPLES = ("policy.train_global_batch_size=64", "policy.train_micro_batch_size=8")
LENGTH = "policy.max_total_sequence_length=4096"
EXPERTS = (*SAMPLES, LENGTH, "cluster.gpus_per_node=8", f"{MEGATRON}.expert_model_parallel_size=8")


@pytest.mark.parametrize(
    ("recipe", "model", "gib", "overrides"),
    [
        (GRPO, QWEN2_1_5B, 40, ("policy.generation.backend=vllm",)),
        (GRPO, QWEN2_1_5B, 24, (*SHORT, "++grpo.debug.replay_rollouts=rollouts")),
        (GRPO, QWEN2_1_5B, 16, (*SHORT, "cluster.gpus_per_node=2", f"{MEGATRON}.pipeline_model_parallel_size=2")),
        (LONG, QWEN3_8B, 79.6, ()),
        (DPO, LLAMA_1B, 20, (LENGTH,)),
        (SFT, QWEN3_30B_A3B, 79.6, EXPERTS),
    ],
)
def test_a_recipe_with_the_overrides_fits(recipe, model, gib, overrides):
    found = search(gib * GIB, *overrides, recipe=recipe, model=model)
    assert found.fits
    _, missing = planned(gib * GIB, *overrides, *found.overrides, recipe=recipe, model=model)
    assert missing <= 0


def test_the_search_makes_few_plans(monkeypatch):
    """Each takes some milliseconds, of which two seconds are made."""
    plans, plan_run = [], fitting.plan_run
    monkeypatch.setattr(fitting, "plan_run", lambda *given, **named: plans.append(0) or plan_run(*given, **named))
    found = search(20 * GIB)
    assert len(plans) < 100
    assert found.fits
    assert planned(20 * GIB, *found.overrides)[1] <= 0


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
    free, bound = search(14 * GIB, *graphs[2:]), search(14 * GIB, *graphs)
    assert f"++{MEGATRON}.activation_checkpointing=true" in free.overrides
    assert f"++{MEGATRON}.activation_checkpointing=true" not in bound.overrides
    assert (free.fits, bound.fits) == (True, False)


def printed(capsys, *arguments):
    assert main(["plan", str(GRPO), "--fit", "--host-memory", "512", *SHORT, *arguments]) == 0
    return capsys.readouterr().out


def test_the_command_prints_the_overrides_or_the_memory_that_is_missing(capsys):
    sentence, *overrides = printed(capsys, "--gpu-memory", "20").splitlines()
    assert sentence.startswith("The recipe fits a GPU of 20.00 GiB with these overrides")
    assert f"    {STREAMED}" in overrides
    found = Fit(**json.loads(printed(capsys, "--gpu-memory", "4", "--json")))
    assert not found.fits
    sentence, *overrides = found.lines(4 * GIB, host(512))
    assert f"lacks {found.missing_gpu_bytes / GIB:.2f} GiB" in sentence
    assert [line.strip() for line in overrides] == found.overrides
    assert "this machine, which lacks 3.00 GiB of host memory" in Fit((), 1.0, 0, 3 * GIB).lines(GIB, host(1))[0]
    assert "as it is" in Fit((), 1.0).lines(GIB, host(1))[0]
    assert main(["plan", str(GRPO), "--fit"]) == 2  # it needs a GPU to fit
    assert "--gpu-memory" in capsys.readouterr().err
