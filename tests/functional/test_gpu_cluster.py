"""Tests runs whose vLLM engine has a GPU on each of two Ray nodes; both nodes are on this host."""

import importlib.util
import subprocess
from pathlib import Path

import pytest
import torch
from support.examples import ROOT, Finished, command, environment
from support.ray_nodes import ray_nodes
from support.reliability import TINIEST, rewards_file

from nemo_offload_rl.metrics.logger import METRICS_FILE, read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm"),
    pytest.mark.skipif(torch.cuda.device_count() != 2, reason="needs two GPUs"),
]

VLLM = "policy.generation.vllm_cfg"
ON = ["policy.generation.backend=vllm", f"{VLLM}.gpu_memory_utilization=0.2", f"{VLLM}.enforce_eager=true"]
EXPERTS = [
    "policy.hf_config.model_type=qwen3_moe",
    "++policy.hf_config.num_experts=4",
    "++policy.hf_config.num_experts_per_tok=2",
    "++policy.hf_config.moe_intermediate_size=64",
]


def finished(folder: Path, overrides: list[str], **variables: str) -> Finished:
    noted = {"REWARDS_FILE": str(rewards_file(folder))}
    done = subprocess.run(
        command("run_grpo.py", folder, overrides), cwd=ROOT, env=environment() | variables | noted,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return Finished(folder, done.returncode, done.stdout + done.stderr)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param([f"{VLLM}.tensor_parallel_size=2"], id="tensor parallelism"),
        pytest.param([*EXPERTS, f"{VLLM}.expert_parallel_size=2"], id="experts of two replicas"),
    ],
)
def test_an_engine_over_two_nodes_gives_the_metrics_of_one_node(engine, tmp_path):
    settings = [*TINIEST, *ON, *engine, "checkpointing.enabled=false"]
    metrics = {}
    for name, sizes in {"one": (1, 2), "two": (2, 1)}.items():
        folder = tmp_path / name
        folder.mkdir()
        overrides = [*settings, f"cluster.num_nodes={sizes[0]}", f"cluster.gpus_per_node={sizes[1]}"]
        if name == "one":
            done = finished(folder, overrides)
        else:
            with ray_nodes(gpus={2: 0, 3: 1}) as nodes:
                nodes.start(3)
                done = finished(folder, overrides, **nodes.environment(), RAY_ADDRESS=nodes.address)
        assert done.status == 0, done.output[-3000:]
        metrics[name] = done.metrics()
    assert metrics["two"] == metrics["one"]
    rows = read_metrics(tmp_path / "one" / "logs" / "exp_001" / METRICS_FILE)
    assert rows[-1]["performance/memory/generation/refit_graphs"] > 0  # loads are replayed
    assert all(1 <= row["train/token_mult_prob_error"] < 1.01 for row in metrics["one"].values())


def test_recorded_exchanges_of_weights_bring_the_same_with_growing_segments(tmp_path):
    """Tensor-parallel ranks gather the weights of each refit in recorded collectives; checksums are compared."""
    parallel = ["cluster.gpus_per_node=2", "policy.megatron_cfg.tensor_model_parallel_size=2"]
    many_weights = "policy.hf_config.num_hidden_layers=24"  # replays of few would save too little
    settings = [*TINIEST, *ON, *parallel, many_weights, "policy.verify_refit=true", "grpo.max_num_steps=5"]
    done = finished(
        tmp_path, [*settings, "checkpointing.enabled=false"], PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"
    )
    assert done.status == 0, done.output[-3000:]
    logs = tmp_path / "logs" / "exp_001"
    rows = read_metrics(logs / METRICS_FILE)
    assert len(rows) == 5
    assert rows[-1]["residency/refit/graphs"] == 1, (logs / "run.log").read_text()[-3000:]
