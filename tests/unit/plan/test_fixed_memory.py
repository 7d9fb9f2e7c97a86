"""Tests host memory that never moves against hand counts for a bf16 model of 1,543,714,304 parameters."""

import pytest

from benchmarks.model_shapes import QWEN2_1_5B
from nemo_offload_rl.config import load
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.host_budget import HostBudgetError
from nemo_offload_rl.plan.planner import plan_run
from nemo_offload_rl.residency.table import Target
from tests.unit.plan.test_report import BENCHMARK, printed, row

N = 1_543_714_304
HALF = N // 2
OPTIMIZER = "policy.megatron_cfg.optimizer"
ON_CPU = [f"{OPTIMIZER}.optimizer_cpu_offload=true", f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=true"]
SAVES = ["++policy.megatron_cfg.checkpoint.async_save=true", "checkpointing.enabled=true"]
STAYS = ["policy.offload_optimizer_for_refit=false", "policy.offload_optimizer_for_logprob=false"]
LIMIT = "policy.residency.host_memory_limit_gib=20"


def planned(*overrides):
    return plan_run(load(BENCHMARK, list(overrides)).config, QWEN2_1_5B, algorithm="grpo")


@pytest.mark.parametrize(
    ("overrides", "on_gpu", "on_host"),
    [
        ("optimizer_offload_fraction=0.5", 12 * HALF, 16 * HALF),
        ("optimizer_offload_fraction=0.5 use_precision_aware_optimizer=false", 16 * HALF, 16 * HALF),
        ("optimizer_offload_fraction=1.0", 0, 32 * HALF),
        ("optimizer_offload_fraction=1.0 optimizer=sgd use_precision_aware_optimizer=false", 8 * HALF, 24 * HALF),
        ("optimizer_cpu_offload=false overlap_cpu_optimizer_d2h_h2d=false", 20 * HALF, None),
    ],
)
def test_optimizer_state_of_both_places(overrides, on_gpu, on_host):
    run = planned(*ON_CPU, *(f"{OPTIMIZER}.{override}" for override in overrides.split()))
    (rank,) = run.plan.ranks
    assert rank.target_bytes[Target.OPTIMIZER_STATE] == on_gpu
    assert rank.fixed_bytes == ({} if on_host is None else {"cpu_optimizer": on_host})
    assert rank.total_host_bytes == sum(rank.host_bytes.values()) + (on_host or 0) == run.needs[0].total_bytes


@pytest.mark.parametrize(
    ("overrides", "nbytes"),
    [
        ([], 2 * N),  # offloaded optimizer state is read in place
        (["++policy.residency.table.train.optimizer_state=streamed"], 2 * N),
        (STAYS, (2 + 10) * N),
        ([*STAYS, "checkpointing.save_optimizer=false"], 2 * N),
        ([ON_CPU[0], f"{OPTIMIZER}.optimizer_offload_fraction=0.5"], 2 * N + 12 * N // 2),
        ([f"++{OPTIMIZER}.exp_avg_dtype=bfloat16"], (2 + 12) * N),  # converted for the file
    ],
)
def test_a_checkpoint_beside_the_run_keeps_what_the_arena_does_not_hold(overrides, nbytes):
    with_it, without = planned(*SAVES, *overrides), planned("checkpointing.enabled=true", *overrides)
    assert with_it.plan.ranks[0].fixed_bytes["checkpoint"] == nbytes
    assert with_it.needs[0].total_bytes - without.needs[0].total_bytes == nbytes
    assert "checkpoint" not in planned(SAVES[0], "checkpointing.enabled=false", *overrides).plan.ranks[0].fixed_bytes


def test_one_data_parallel_rank_keeps_the_weights():
    sizes = [f"policy.megatron_cfg.{name}_model_parallel_size=2" for name in ("tensor", "pipeline")]
    needs = planned(*SAVES, *sizes, "cluster.gpus_per_node=8", "policy.megatron_cfg.sequence_parallel=false").needs
    kept = [need.fixed_bytes["checkpoint"] for need in needs]
    assert [nbytes > 0 for nbytes in kept] == 2 * [True, True, False, False]


@pytest.mark.parametrize(
    ("overrides", "name", "remedy"),
    [
        ([*ON_CPU, f"{OPTIMIZER}.optimizer_offload_fraction=1.0"], "cpu_optimizer", "a lower policy.megatron_cfg.opti"),
        ([*SAVES, *STAYS], "checkpoint", "policy.megatron_cfg.checkpoint.async_save=false"),
    ],
)
def test_a_limit_of_host_memory_counts_it_and_the_report_shows_it(overrides, name, remedy, capsys):
    with pytest.raises(HostBudgetError, match=r"Rank 0 needs .* GiB") as caught:
        planned(*overrides, LIMIT)
    assert name in str(caught.value)
    assert f"enough: {remedy}" in str(caught.value)
    text = printed(capsys, BENCHMARK, *overrides)
    nbytes = planned(*overrides).plan.ranks[0].fixed_bytes[name]
    assert row(text, name)[-1] == f"{nbytes / GIB:.2f}"
    copies = "the CPU optimizer steps 1,543,714,304 parameters of the rank; each of its steps copies 5.75 GiB out"
    assert (copies in text) is (name == "cpu_optimizer")
