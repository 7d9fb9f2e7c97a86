"""Tests that, by the plan, GRPO of 8 B parameters (benchmarks/recipes/grpo_8B_random.yaml) fits a GPU of 78 GiB."""

from support.machine import planner_of, resolved_for

from nemo_offload_rl.config import load
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.generation import check_longest_sequence_fits, check_refit_fits, check_share_beside_policy
from nemo_offload_rl.plan.shared_gpu import phase_bytes
from nemo_offload_rl.residency.table import Phase, Target

RECIPE = "benchmarks/recipes/grpo_8B_random.yaml"
GPU = 78 * GIB
N = 8_190_735_360


def planned(*overrides):
    resolved = resolved_for(load(RECIPE, overrides).config, 78)
    config, run = resolved.config, resolved.run
    return config, run, phase_bytes(config, planner_of(config, 78), run, GPU)


def test_every_phase_fits_with_streamed_state():
    config, run, of_phases = planned()
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
    _, _, of_phases = planned("policy.residency.table.train.optimizer_state=gpu", *rows)
    assert of_phases[Phase.TRAIN] > 14 * N > GPU
