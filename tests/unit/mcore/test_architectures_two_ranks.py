"""Tests that two ranks compute what one does, for biases, windows, scaled rotary embeddings and dense layers.

test_architectures checks that one rank computes what transformers does.
"""

from typing import Any

import pytest
import torch
from support.ranks import run_ranks, worker_of_rank
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, random_batch, tiny_policy

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4, "rope_theta": 100.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
    "rope_theta": 100.0,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 3}
MODELS: dict[str, dict[str, Any]] = {
    "llama": TINY_QWEN3
    | {
        "model_type": "llama",
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": LLAMA3,
    },
    "qwen3": TINY_QWEN3 | WINDOW | {"max_window_layers": 1, "rope_parameters": YARN, "attention_bias": True},
    "moe": TINY_QWEN3_MOE | WINDOW | {"mlp_only_layers": [0, 2], "attention_bias": True, "rope_parameters": YARN},
}
# Each rank has another share of the rows' padding.
MEGATRON: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "moe": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1},
}
SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
STAGES = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[tuple[str, str], dict[str, Any]] = {
    ("llama", "cp2"): {"context_parallel_size": 2},
    # Attention of Transformer Engine does not compute windows with p2p.
    ("qwen3", "cp2"): {"context_parallel_size": 2, "cp_comm_type": "all_gather"},
    ("moe", "cp2"): {"context_parallel_size": 2, "cp_comm_type": "all_gather"},
    ("llama", "tp2_sequence_parallel"): SPLIT,
    ("qwen3", "pp2_vpp2"): STAGES | {"virtual_pipeline_model_parallel_size": 2},
    ("moe", "tp2_sequence_parallel"): SPLIT,
    ("moe", "pp2_vpp2_recomputed"): STAGES
    | {"virtual_pipeline_model_parallel_size": 2, "activation_checkpointing": True},
    ("moe", "ep2"): {"expert_model_parallel_size": 2},
}


def run(model: str, megatron: dict[str, Any], rank: int, world_size: int, port: int) -> dict[str, Any]:
    """Runs two steps, log-probs and the export; data-parallel ranks share the rows."""
    from nemo_offload_rl.algorithms.losses import NLLLoss

    torch.set_num_threads(1)
    worker = worker_of_rank(tiny_policy(MODELS[model], **MEGATRON[model], **megatron), rank, world_size, port)
    ranks = worker.parallel_ranks()
    share = 8 // ranks["dp_size"]
    start, stop = ranks["dp_rank"] * share, (ranks["dp_rank"] + 1) * share
    steps = [worker.train(random_batch(8, seed=n).slice(start, stop), NLLLoss(), gbs=8, mbs=2) for n in range(2)]
    out = {
        "losses": [step["loss"] for step in steps],
        "grad_norms": [step["grad_norm"] for step in steps],
        "rows": (start, stop),
        "logprobs": worker.get_logprobs(random_batch(8, seed=9).slice(start, stop), mbs=2)["logprobs"].tolist(),
        "exported": {name: float(weight.double().sum()) for name, weight in worker.hf_weights()},
    }
    worker.shutdown()
    return out


def all_layouts(rank: int, world_size: int, ports: list[int]) -> dict[tuple[str, str], dict[str, Any]]:
    named = zip(LAYOUTS.items(), ports, strict=True)
    return {name: run(name[0], megatron, rank, world_size, port) for (name, megatron), port in named}


def all_alone(rank: int, world_size: int, ports: list[int]) -> dict[str, dict[str, Any]]:
    return {name: run(name, {}, rank, world_size, port) for name, port in zip(MODELS, ports, strict=True)}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return run_ranks(all_alone, 1, num_ports=len(MODELS))[0]


@pytest.fixture(scope="module")
def together() -> list[dict[tuple[str, str], dict[str, Any]]]:
    return run_ranks(all_layouts, 2, num_ports=len(LAYOUTS))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_two_ranks_compute_what_one_does(alone, together, model, layout):
    want = alone[model]
    for rank in range(2):
        got = together[rank][model, layout]
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)
        assert got["grad_norms"] == pytest.approx(want["grad_norms"], rel=1e-4)
        start, stop = got["rows"]
        torch.testing.assert_close(
            torch.tensor(got["logprobs"]), torch.tensor(want["logprobs"])[start:stop], rtol=1e-4, atol=2e-4
        )
        assert set(got["exported"]) == set(want["exported"])
        for name, total in want["exported"].items():
            assert got["exported"][name] == pytest.approx(total, rel=1e-3, abs=2e-3), name


def test_flags_count_in_the_rows_that_are_compared(alone):
    biased = [name for name in alone["llama"]["exported"] if name.endswith(".bias")]
    assert len(biased) == 4 * 7
    dense = [name for name in alone["moe"]["exported"] if ".mlp.gate_proj." in name]
    assert [name.split(".")[2] for name in dense] == ["0", "2"]
