"""Context parallelism with Transformer Engine's attention, on two ranks over NCCL, against whole rows on one rank.

Each rank has a GPU, or both share the only one (see `support.ranks`).
"""

import os
from functools import partial
from typing import Any

import pytest
import torch
from support.ranks import run_ranks, worker_of_rank
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, batch_of_lengths, packed_rows, tiny_policy

from nemo_offload_rl.mcore.context_parallel import positions_of_ranks
from nemo_offload_rl.mcore.model.bridge_import import have_transformer_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not have_transformer_engine(), reason="needs Transformer Engine (extra te)"),
]

SHAPE = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "intermediate_size": 2048}
LAYER_INPUT = {
    "activation_checkpointing": True,
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "fine_grained_activation_offloading": True,
    "offload_modules": ["layer_input", "core_attn"],
}
CASES: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {},
    "packed, all_gather": {"cp_comm_type": "all_gather"},
    "packed, a2a": {"cp_comm_type": "a2a"},
    "packed, experts": {},
    "packed, recomputed": {"activation_checkpointing": True},
    "packed, layer_input": LAYER_INPUT,
    "padded, offloaded": {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn", "attn_proj"]},
    "padded, graphs": {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]},
}
LENGTHS = ([300, 1, 17, 120], [3, 64, 2, 200], [299, 298, 1, 90])


def test_the_positions_of_ranks_are_transformer_engines():
    import transformer_engine_torch as tex

    cu_seqlens = torch.tensor([0, 16, 24, 24, 88], dtype=torch.int32, device="cuda")
    for size in (2, 4):
        found = positions_of_ranks(cu_seqlens, size)
        for rank in range(size):
            wanted = tex.thd_get_partitioned_indices(cu_seqlens, 88, size, rank)
            assert found[rank].tolist() == wanted.tolist()


def run(case: str, rank: int, world_size: int, ports: list[int]) -> tuple[list[float], list[float], list[Any]]:
    from nemo_offload_rl.algorithms.losses import NLLLoss

    hf_config = (TINY_QWEN3_MOE | {"moe_intermediate_size": 512} if "experts" in case else TINY_QWEN3) | SHAPE
    megatron = CASES[case] if world_size > 1 else {}
    policy = tiny_policy(hf_config, "bfloat16", context_parallel_size=world_size, **megatron)
    policy |= {"max_total_sequence_length": 304, "make_sequence_length_divisible_by": 8}
    if case.startswith("packed"):
        policy["sequence_packing"] = packed_rows(512)
    worker = worker_of_rank(policy, rank, world_size, ports[0])
    reports, logprobs = [], []
    for step in range(10):
        batch = batch_of_lengths(LENGTHS[step % len(LENGTHS)], prompt=1, seed=step)
        if not step:
            logprobs = worker.get_logprobs(batch, mbs=2)["logprobs"].tolist()
        reports.append(worker.train(batch, NLLLoss(), gbs=4, mbs=2))
    worker.shutdown()
    return [report["loss"] for report in reports], [report["grad_norm"] for report in reports], logprobs


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_are_those_of_whole_rows(case, monkeypatch):
    assert os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0", "run with NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    ((losses, norms, logprobs),) = run_ranks(partial(run, case), 1, num_ports=1)
    for found in run_ranks(partial(run, case), 2, num_ports=1):
        assert found[0] == pytest.approx(losses, rel=1e-3)
        assert found[1] == pytest.approx(norms, rel=1e-2)
        torch.testing.assert_close(torch.tensor(found[2]), torch.tensor(logprobs), rtol=0, atol=0.05)
