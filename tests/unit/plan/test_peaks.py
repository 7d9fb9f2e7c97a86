"""Tests the peak memory that the plan gives each verb of the policy, against its parts."""

import pytest
from support.machine import planner_of, resolved_for

from nemo_offload_rl.config import load
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.decisions import Machine
from nemo_offload_rl.plan.resolve import resolve
from nemo_offload_rl.plan.row_tokens import MARGIN, logprob_bytes, training_bytes
from nemo_offload_rl.residency.table import Phase, Target
from tests.unit.config.conftest import CONFIGS

ROOT = CONFIGS.parents[1]
RECIPE = str(ROOT / "benchmarks" / "recipes" / "grpo_1_5B_random.yaml")
ROWS = [f"policy.sequence_packing.{key}=2048" for key in ("train_mb_tokens", "logprob_mb_tokens")]
VLLM = ["policy.generation.backend=vllm", "++policy.residency.generation_weights=discard"]


def test_a_peak_is_the_state_of_its_phase_and_the_largest_pass():
    config = load(RECIPE, [*ROWS, *VLLM]).config
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
    assert resolved_for(load(RECIPE, ROWS).config, 139).peaks_gib.keys() == {"train", "logprobs"}


def test_packed_pairs_have_the_rows_of_training_in_log_prob_passes():
    packed = ["++policy.sequence_packing.enabled=true", "++policy.sequence_packing.train_mb_tokens=256"]
    config = load(CONFIGS / "dpo_tiny_cpu.yaml", packed).config
    assert resolved_for(config, 80, algorithm="dpo").peaks_gib.keys() == {"train", "logprobs"}


def test_without_gpus_no_peak_is_planned():
    config = load(CONFIGS / "grpo_tiny_cpu.yaml", []).config
    fields = planner_of(config, None).hf_config
    assert resolve(config, Machine(has_gpus=False), fields, algorithm="grpo").peaks_gib == {}
