"""Tests the host memory of `async_save` against hand counts for a bf16 model of 1,543,714,304 parameters."""

import pytest

from benchmarks.model_shapes import QWEN2_1_5B
from nemo_offload_rl.config import load
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.host_budget import HostBudgetError
from nemo_offload_rl.plan.planner import plan_run
from tests.unit.plan.test_report import BENCHMARK, printed, row

N = 1_543_714_304
OPTIMIZER = "policy.megatron_cfg.optimizer"
ON = ["++policy.megatron_cfg.checkpoint.async_save=true", "checkpointing.enabled=true"]
STAYS = ["policy.offload_optimizer_for_refit=false", "policy.offload_optimizer_for_logprob=false"]
HALF_ON_CPU = [f"{OPTIMIZER}.optimizer_cpu_offload=true", f"{OPTIMIZER}.optimizer_offload_fraction=0.5"]


def planned(*overrides):
    return plan_run(load(BENCHMARK, list(overrides)).config, QWEN2_1_5B, algorithm="grpo")


@pytest.mark.parametrize(
    ("overrides", "nbytes"),
    [
        ([], 2 * N),  # offloaded optimizer state is read in place
        (["++policy.residency.table.train.optimizer_state=streamed"], 2 * N),
        (STAYS, (2 + 10) * N),
        ([*STAYS, "checkpointing.save_optimizer=false"], 2 * N),
        (HALF_ON_CPU, 2 * N + 12 * N // 2),
        ([f"++{OPTIMIZER}.exp_avg_dtype=bfloat16"], (2 + 12) * N),  # converted for the file
    ],
)
def test_what_the_arena_does_not_hold_is_kept(overrides, nbytes):
    with_it, without = planned(*ON, *overrides), planned("checkpointing.enabled=true", *overrides)
    assert with_it.plan.ranks[0].fixed_bytes["checkpoint"] == nbytes
    assert with_it.needs[0].total_bytes - without.needs[0].total_bytes == nbytes
    assert "checkpoint" not in planned(ON[0], "checkpointing.enabled=false", *overrides).plan.ranks[0].fixed_bytes


def test_one_data_parallel_rank_keeps_the_weights():
    sizes = [f"policy.megatron_cfg.{name}_model_parallel_size=2" for name in ("tensor", "pipeline")]
    needs = planned(*ON, *sizes, "cluster.gpus_per_node=8", "policy.megatron_cfg.sequence_parallel=false").needs
    kept = [need.fixed_bytes["checkpoint"] for need in needs]
    assert [nbytes > 0 for nbytes in kept] == 2 * [True, True, False, False]


def test_a_limit_counts_it_and_names_its_remedy(capsys):
    with pytest.raises(HostBudgetError, match=r"Rank 0 needs .* GiB") as caught:
        planned(*ON, *STAYS, "policy.residency.host_memory_limit_gib=20")
    assert "enough: policy.megatron_cfg.checkpoint.async_save=false" in str(caught.value)
    assert row(printed(capsys, BENCHMARK, *ON), "checkpoint")[-1] == f"{2 * N / GIB:.2f}"
