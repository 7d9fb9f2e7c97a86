"""Tests asynchronous GRPO with vLLM: on a GPU of its own, and beside training on the same one."""

import importlib.util
import subprocess

import pytest
import torch
from support.examples import ROOT, command, environment
from support.reliability import TINIEST, rewards_file

from nemo_offload_rl.metrics.logger import METRICS_FILE, read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm"),
]

VLLM = "policy.generation.vllm_cfg"
AHEAD = [
    "policy.generation.backend=vllm", f"{VLLM}.gpu_memory_utilization=0.2", f"{VLLM}.enforce_eager=true",
    "policy.verify_refit=true", "grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true",
    "grpo.max_num_steps=4", "checkpointing.enabled=false",
]  # fmt: skip
IN_FLIGHT = ["grpo.async_grpo.in_flight_weight_updates=true"]
APART = [
    "cluster.gpus_per_node=2",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize(
    "placed",
    [
        pytest.param([], id="same GPU"),
        pytest.param(IN_FLIGHT, id="same GPU, in flight"),
        pytest.param([*APART, *IN_FLIGHT], id="apart, in flight", marks=needs_two),
    ],
)
def test_engines_get_the_weights_that_are_sent_while_they_generate(placed, tmp_path):
    done = subprocess.run(
        command("run_grpo.py", tmp_path, [*TINIEST, *AHEAD, *placed]), cwd=ROOT,
        env=environment() | {"REWARDS_FILE": str(rewards_file(tmp_path))},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    rows = [row for row in read_metrics(tmp_path / "logs" / "exp_001" / METRICS_FILE) if row["step"]]
    ages = [row["train/avg_trajectory_age"] for row in rows]
    if IN_FLIGHT[0] not in placed:
        assert ages == [0, 1, 1, 1]
        return
    assert all(0 <= age <= 1 for age in ages) and any(0 < age < 1 for age in ages), ages
    assert any((row.get("timing/rollouts/held_for_weights") or 0) > 0 for row in rows)
