"""Tests the plan of the CPU optimizer against hand counts for a bf16 model of 1,543,714,304 parameters."""

import pytest

from benchmarks.model_shapes import QWEN2_1_5B
from nemo_offload_rl.config import load
from nemo_offload_rl.plan.host_budget import HostBudgetError
from nemo_offload_rl.plan.planner import plan_run
from nemo_offload_rl.residency.table import Target
from tests.unit.config.conftest import CONFIGS
from tests.unit.plan.test_report import BENCHMARK, printed, row

OPTIMIZER = "policy.megatron_cfg.optimizer"
ON = [f"{OPTIMIZER}.optimizer_cpu_offload=true", f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=true"]
HALF = 1_543_714_304 // 2


def planned(*overrides):
    config = load(CONFIGS / "grpo_math_1B_megatron.yaml", [*ON, *overrides]).config
    return plan_run(config, QWEN2_1_5B, algorithm="grpo")


@pytest.mark.parametrize(
    ("overrides", "on_gpu", "on_host"),
    [
        (["optimizer_offload_fraction=0.5"], 12 * HALF, 16 * HALF),
        (["optimizer_offload_fraction=0.5", "use_precision_aware_optimizer=false"], 16 * HALF, 16 * HALF),
        (["optimizer_offload_fraction=1.0"], 0, 32 * HALF),
        (
            ["optimizer_offload_fraction=1.0", "optimizer=sgd", "use_precision_aware_optimizer=false"],
            8 * HALF,
            24 * HALF,
        ),
    ],
)
def test_bytes_of_both_places(overrides, on_gpu, on_host):
    run = planned(*(f"{OPTIMIZER}.{override}" for override in overrides))
    (rank,) = run.plan.ranks
    assert rank.target_bytes[Target.OPTIMIZER_STATE] == on_gpu
    assert rank.fixed_bytes == {"cpu_optimizer": on_host}
    assert rank.total_host_bytes == sum(rank.host_bytes.values()) + on_host == run.needs[0].total_bytes


def test_it_is_off_where_the_switch_is():
    config = load(CONFIGS / "grpo_math_1B_megatron.yaml", [f"{OPTIMIZER}.optimizer_offload_fraction=0.5"]).config
    (rank,) = plan_run(config, QWEN2_1_5B, algorithm="grpo").plan.ranks
    assert rank.fixed_bytes == {}
    assert rank.target_bytes[Target.OPTIMIZER_STATE] == 20 * HALF


def test_a_limit_of_host_memory_counts_it():
    with pytest.raises(HostBudgetError, match=r"Rank 0 needs .* GiB") as caught:
        planned(f"{OPTIMIZER}.optimizer_offload_fraction=1.0", "policy.residency.host_memory_limit_gib=20")
    assert "cpu_optimizer" in str(caught.value)
    assert "frees 23.00 GiB, enough: a lower policy.megatron_cfg.optimizer.optimizer_off" in str(caught.value)


def test_the_report_says_what_each_step_copies(capsys):
    text = printed(capsys, BENCHMARK, *ON, f"{OPTIMIZER}.optimizer_offload_fraction=1.0")
    assert "the CPU optimizer steps 1,543,714,304 parameters of the rank; each of its steps copies 5.75 GiB out" in text
    assert row(text, "cpu_optimizer")[-1] == "23.00"
