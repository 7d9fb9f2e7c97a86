"""Tests recipes as a run resolves them on a machine: peaks, generation beside training, replays, 8 B parameters."""

import pytest
import yaml
from support.machine import planner_of, resolved_for

from nemo_offload_rl.config import load
from nemo_offload_rl.config.schema.policy import sampling_of
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.decisions import Machine
from nemo_offload_rl.plan.generation import check_longest_sequence_fits, check_refit_fits, check_share_beside_policy
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.plan.resolve import resolve
from nemo_offload_rl.plan.row_tokens import MARGIN, logprob_bytes, training_bytes
from nemo_offload_rl.plan.shared_gpu import phase_bytes
from nemo_offload_rl.residency.table import Phase, Placement, Target
from tests.unit.config.conftest import CONFIGS

RECIPE = "benchmarks/recipes/grpo_1_5B_random.yaml"
AHEAD = ["grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true"]
VLLM = [*AHEAD, "policy.generation.backend=vllm"]
ROWS = [f"policy.sequence_packing.{key}=8192" for key in ("train_mb_tokens", "logprob_mb_tokens")]


def resolved(gpu_gib, *overrides):
    return resolved_for(load(RECIPE, [*overrides]).config, gpu_gib)


def cache_of(found):
    return found.config["policy"]["generation"]["vllm_kwargs"]["kv_cache_memory_bytes"]


def most_bytes(found, gpu_gib):
    planner = planner_of(found.config, gpu_gib)
    return max(phase_bytes(found.config, planner, found.run, planner.gpu_bytes).values())


@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_neither_leaves_the_gpu_for_the_other(backend):
    policy = resolved(140, *AHEAD, *ROWS, f"policy.generation.backend={backend}").config["policy"]
    assert policy["residency"]["generation_weights"] == "gpu"
    yaml.safe_dump(policy["residency"])  # as checkpoints and run.json have it
    table = settings(policy).table
    for phase in (Phase.REFIT, Phase.GENERATE):
        assert table[phase][Target.PARAMS] is Placement.GPU
        assert table[phase][Target.GRADS] is table[phase][Target.OPTIMIZER_STATE] is Placement.UNCHANGED


def test_the_kv_cache_gets_what_training_leaves():
    roomy = resolved(140, *VLLM, *ROWS)
    needed = most_bytes(roomy, 140) / GIB
    tight = resolved(needed - 3, *VLLM, *ROWS)
    assert cache_of(roomy) > cache_of(tight) > 0
    assert needed - 3.1 < most_bytes(tight, needed - 3) / GIB <= needed - 3
    assert any("what training leaves of the GPU at the same time" in line for line in tight.lines)
    # One after the other, the engine may have all of it.
    assert cache_of(resolved(needed - 3, *VLLM[1:], *ROWS)) == cache_of(roomy)


def test_rows_that_are_left_open_get_what_the_kv_cache_leaves():
    packing = resolved(80, *VLLM).config["policy"]["sequence_packing"]
    sequential = resolved(80, *VLLM[1:]).config["policy"]["sequence_packing"]
    assert 512 < packing["train_mb_tokens"] < sequential["train_mb_tokens"]


@pytest.mark.parametrize("rows", [[], ROWS])
def test_a_gpu_without_room_for_both_is_refused_with_what_is_missing(rows):
    with pytest.raises(ValueError, match=r"where 30.00 GiB lack [\d.]+ GiB for both"):
        resolved(30, *VLLM, *rows)


def test_a_kv_cache_of_the_recipe_is_refused_with_the_size_that_fits():
    own = "++policy.generation.vllm_kwargs.kv_cache_memory_bytes="
    with pytest.raises(ValueError, match=r"room for \d+; set it to that or less") as caught:
        resolved(80, *VLLM, *ROWS, f"{own}{60 * GIB}")
    fits = int(str(caught.value).split("room for ")[1].split(";")[0])
    assert cache_of(resolved(80, *VLLM, *ROWS, f"{own}{fits}")) == fits


def test_cells_of_the_recipe_stay():
    streamed = ["++policy.residency.table.train.optimizer_state=streamed"]
    moved = ["++policy.residency.table.generate.params=host", "policy.offload_optimizer_for_refit=true"]
    table = settings(resolved(140, *VLLM, *ROWS, *moved).config["policy"]).table
    assert table[Phase.GENERATE][Target.PARAMS] is Placement.HOST
    assert table[Phase.REFIT][Target.OPTIMIZER_STATE] is Placement.HOST
    with_window, whole = resolved(140, *VLLM, *ROWS, *streamed), resolved(140, *VLLM, *ROWS)
    assert most_bytes(with_window, 140) < most_bytes(whole, 140) - 5 * GIB


def test_engines_on_gpus_of_their_own_are_as_ever():
    apart = ["policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=1"]
    found = resolved(80, *VLLM, *ROWS, *apart, "cluster.gpus_per_node=2")
    assert found.config["policy"]["residency"]["generation_weights"] is None
    assert "kv_cache_memory_bytes" not in found.config["policy"]["generation"]["vllm_kwargs"]


SHORT = [f"policy.sequence_packing.{key}=2048" for key in ("train_mb_tokens", "logprob_mb_tokens")]
DISCARD = ["policy.generation.backend=vllm", "++policy.residency.generation_weights=discard"]


def test_a_peak_is_the_state_of_its_phase_and_the_largest_pass():
    config = load(RECIPE, [*SHORT, *DISCARD]).config
    resolved, planner = resolved_for(config, 139), planner_of(config, 139)
    [rank], engine = resolved.run.plan.ranks, resolved.run.engine
    of_phases = {phase: sum(targets.values()) + engine.refit_graph_bytes for phase, targets in rank.gpu_bytes.items()}
    [training], [forward] = training_bytes(resolved.config, planner), logprob_bytes(resolved.config, planner)
    before_grads = of_phases[Phase.TRAIN] - rank.gpu_bytes[Phase.TRAIN][Target.GRADS]  # they come after log-prob passes
    leaving = rank.gpu_bytes[Phase.TRAIN][Target.OPTIMIZER_STATE] - rank.gpu_bytes[Phase.REFIT][Target.OPTIMIZER_STATE]
    assert resolved.peaks_gib == pytest.approx(
        {
            "train": (of_phases[Phase.TRAIN] + MARGIN * training) / GIB,
            "logprobs": (before_grads + MARGIN * forward) / GIB,
            "refit": (of_phases[Phase.REFIT] + leaving + engine.refit_bytes) / GIB,
        }
    )


def test_the_plan_does_not_know_the_buckets_of_the_engine_of_transformers():
    assert resolved_for(load(RECIPE, SHORT).config, 139).peaks_gib.keys() == {"train", "logprobs"}


def test_packed_pairs_have_the_rows_of_training_in_log_prob_passes():
    packed = ["++policy.sequence_packing.enabled=true", "++policy.sequence_packing.train_mb_tokens=256"]
    config = load(CONFIGS / "dpo_tiny_cpu.yaml", packed).config
    assert resolved_for(config, 80, algorithm="dpo").peaks_gib.keys() == {"train", "logprobs"}


def test_without_gpus_no_peak_is_planned():
    config = load(CONFIGS / "grpo_tiny_cpu.yaml", []).config
    fields = planner_of(config, None).hf_config
    assert resolve(config, Machine(has_gpus=False), fields, algorithm="grpo").peaks_gib == {}


GRPO_8B = "benchmarks/recipes/grpo_8B_random.yaml"
GPU = 78 * GIB
N = 8_190_735_360


def planned_8b(*overrides):
    resolved = resolved_for(load(GRPO_8B, overrides).config, 78)
    config, run = resolved.config, resolved.run
    return config, run, phase_bytes(config, planner_of(config, 78), run, GPU)


def test_every_phase_fits_with_streamed_state():
    config, run, of_phases = planned_8b()
    [rank] = run.plan.ranks
    assert rank.gpu_bytes[Phase.TRAIN] == {
        Target.PARAMS: 2 * N,
        Target.GRADS: 2 * N,  # in bf16
        Target.OPTIMIZER_STATE: 512 * 2**20,
        Target.REFERENCE_WEIGHTS: 0,
    }
    assert rank.total_host_bytes == 10 * N
    assert rank.step_grad_bytes == 0
    assert max(of_phases.values()) <= GPU
    assert config["policy"]["sequence_packing"]["train_mb_tokens"] >= 16384
    check_share_beside_policy(run.plan, run.engine, GPU)
    check_refit_fits(run.plan, run.engine, GPU)
    check_longest_sequence_fits(run.engine, GPU)


def test_resident_state_does_not():
    # Numbers of tokens, since `auto` finds none where even the state does not fit.
    rows = [f"policy.sequence_packing.{key}=2048" for key in ("train_mb_tokens", "logprob_mb_tokens")]
    _, _, of_phases = planned_8b("policy.residency.table.train.optimizer_state=gpu", *rows)
    assert of_phases[Phase.TRAIN] > 14 * N > GPU


SAMPLING = ["policy.generation.backend=vllm", "policy.generation.temperature=0.7", "policy.generation.top_k=5"]
REPLAY = "++grpo.debug.replay_rollouts=rollouts"


def test_nothing_is_planned_for_generation_and_log_probs_stay_those_of_the_sampler():
    generating = load(RECIPE, SAMPLING).config
    resolved, other = resolved_for(load(RECIPE, [*SAMPLING, REPLAY]).config, 80), resolved_for(generating, 80)
    assert resolved.lines[0].startswith("grpo.debug.replay_rollouts is rollouts: the run starts no engine")
    assert resolved.run.engine is None
    assert other.run.engine is not None
    assert not resolved.run.plan.engine_table
    assert not any("KV cache" in line for line in resolved.lines)
    (rank,) = resolved.run.plan.ranks
    assert set(rank.gpu_bytes) == {Phase.LOGPROB, Phase.TRAIN}
    policy = resolved.config["policy"]
    assert sampling_of(policy) == sampling_of(generating["policy"])
    assert (sampling_of(policy)["temperature"], sampling_of(policy)["top_k"]) == (0.7, 5)
