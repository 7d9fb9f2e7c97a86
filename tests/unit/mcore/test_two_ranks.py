"""Tests that two ranks compute what one does: DP, TP, sequence parallel, PP, virtual PP, EP, packed rows, on gloo."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks, worker_of_rank
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, logprobs_in_transformers, packed_rows, random_batch, tiny_policy
from support.toy_policy import LocalTransport

# Of the logits and of MLPs, which the backward pass computes again; one rank computes them whole.
CHUNKS = {"use_fused_linear_logprobs": True, "fused_linear_logprobs_chunk_size": 5, "mlp_tile_tokens": 5}
OVERLAP = {"grad_reduce_in_fp32": False, "overlap_grad_reduce": True, "overlap_param_gather": False}
# Tensor parallelism by itself is that of `ODD_VOCABULARY`, and a pipeline by itself has virtual stages.
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2_sequence_parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2_vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "chunks_dp2_overlapped_recomputed": CHUNKS
    | {"distributed_data_parallel_config": OVERLAP, "activation_checkpointing": True},
    "chunks_tp2": CHUNKS | {"tensor_model_parallel_size": 2},
    "chunks_pp2": CHUNKS | {"pipeline_model_parallel_size": 2},
    "moe_dp2": {},
    "moe_ep2": {"expert_model_parallel_size": 2},
    # Packed rows on two ranks are compared with padded rows on one.
    "packed_chunks_tp2_sequence_parallel": CHUNKS | {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "packed_moe_dp2_ep2": {"expert_model_parallel_size": 2},
    "packed_moe_pp2_vpp2_recomputed": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "activation_checkpointing": True,
    },
}
ODD_VOCABULARY = "tp2_padded_vocabulary"


def hf_config_of(layout: str) -> dict[str, Any] | None:
    if layout == ODD_VOCABULARY:
        return TINY_QWEN3 | {"vocab_size": 15}
    return TINY_QWEN3_MOE if "moe" in layout else None


def run(layout: str, overrides: dict[str, Any], rank: int, world_size: int, port: int) -> dict[str, Any]:
    """Runs three steps, the last on pairs, then log-probs; each rank has all rows except those of another DP rank."""
    from nemo_offload_rl.algorithms.losses import DPOLoss, NLLLoss
    from nemo_offload_rl.mcore.logprob import linear_logprob

    policy = tiny_policy(hf_config_of(layout), **overrides)
    if layout.startswith("packed"):
        policy["sequence_packing"] = packed_rows(20)  # some pairs are longer
    worker = worker_of_rank(policy, rank, world_size, port, init_reference_model=True)
    torch.set_num_threads(1)
    linear_logprob._COLUMNS = 1  # so that a vocabulary of 14 has several parts, too
    ranks = worker.parallel_ranks()
    share = 8 // ranks["dp_size"]
    mine = slice(ranks["dp_rank"] * share, (ranks["dp_rank"] + 1) * share)
    steps = []
    for step in range(2):
        data = random_batch(8, seed=step)
        steps.append(worker.train(data.slice(mine.start, mine.stop), NLLLoss(), gbs=8, mbs=2))
    pairs = random_batch(8, seed=8).in_groups(2).slice(mine.start, mine.stop)
    reference = worker.get_reference_policy_logprobs(pairs, mbs=1)
    pairs["reference_policy_logprobs"] = reference["reference_logprobs"]
    steps.append(worker.train(pairs, DPOLoss(0.5, 1.0, 0.1, False, False), gbs=4, mbs=1))
    probe = random_batch(8, seed=9).slice(mine.start, mine.stop)
    few = random_batch(6, seed=10).slice(mine.start * 6 // 8, mine.stop * 6 // 8)
    out = {
        "losses": [s["loss"] for s in steps],
        "grad_norms": [s["grad_norm"] for s in steps],
        "rows": (mine.start, mine.stop),
        "logprobs": worker.get_logprobs(probe, mbs=2)["logprobs"].tolist(),
        "reference": worker.get_reference_policy_logprobs(probe, mbs=2)["reference_logprobs"].tolist(),
        "evaluated": worker.evaluate(probe, NLLLoss(), mbs=2)["loss"],
        "of_one_micro_batch": worker.get_logprobs(probe, mbs=8)["logprobs"].tolist(),
        "of_three_micro_batches": worker.evaluate(few, NLLLoss(), mbs=few.size // 3)["loss"],
        "exported": {name: (weight.shape, float(weight.double().sum())) for name, weight in worker.hf_weights()},
    }
    worker.shutdown()
    return out


def all_layouts(rank: int, world_size: int, ports: list[int]) -> dict[str, dict[str, Any]]:
    layouts = LAYOUTS | {ODD_VOCABULARY: {"tensor_model_parallel_size": 2}}
    return {name: run(name, layouts[name], rank, world_size, port) for name, port in zip(layouts, ports, strict=True)}


def one_rank(rank: int, world_size: int, ports: list[int]) -> dict[str, dict[str, Any]]:
    names = ["dp2", "moe_dp2", ODD_VOCABULARY]
    return {name: run(name, {}, rank, world_size, port) for name, port in zip(names, ports, strict=True)}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return run_ranks(one_rank, 1, num_ports=3)[0]


@pytest.fixture(scope="module")
def together() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(all_layouts, 2, num_ports=len(LAYOUTS) + 1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, ODD_VOCABULARY])
def test_two_ranks_compute_what_one_does(alone, together, layout):
    want = alone[layout if layout in alone else "moe_dp2" if "moe" in layout else "dp2"]
    for rank in range(2):
        got = together[rank][layout]
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)
        assert got["grad_norms"] == pytest.approx(want["grad_norms"], rel=1e-4)
        for name in ("evaluated", "of_three_micro_batches"):
            assert got[name] == pytest.approx(want[name], rel=1e-4)
        start, stop = got["rows"]
        for field in ("logprobs", "reference", "of_one_micro_batch"):
            torch.testing.assert_close(
                torch.tensor(got[field]), torch.tensor(want[field])[start:stop], rtol=1e-4, atol=2e-4
            )
        assert set(got["exported"]) == set(want["exported"])
        for name, (shape, total) in want["exported"].items():
            assert got["exported"][name] == (shape, pytest.approx(total, rel=1e-3, abs=2e-3)), name


class Loaded:
    """Receives weights and keeps them."""

    def load_weights(self, named_tensors) -> None:
        self.weights = {name: tensor.clone() for name, tensor in named_tensors}


def round_trip(rank: int, world_size: int, ports: list[int], folder: Path) -> dict[str, Any]:
    """Refits and exports a model of 15 tokens on ranks that hold 8 each, and reads the export again."""
    torch.set_num_threads(1)
    policy = tiny_policy(
        TINY_QWEN3 | {"vocab_size": 15, "tie_word_embeddings": False}, tensor_model_parallel_size=world_size
    )
    data, out = random_batch(4), {}
    for name, model, port in zip(
        ("first", "again"), ({}, {"hf_config": None, "model_name": str(folder)}), ports, strict=True
    ):
        worker, engine = worker_of_rank(policy | model, rank, world_size, port), Loaded()
        out[f"{name} planned"] = worker.prepare_refit_info(LocalTransport([engine])).tensors
        worker.send_weights()
        out[f"{name} sent"] = {key: list(tensor.shape) for key, tensor in engine.weights.items()}
        out[f"{name} logprobs"] = worker.get_logprobs(data, mbs=4)["logprobs"].tolist()
        worker.export_hf(str(folder))
        worker.shutdown()
    return out


def test_exports_and_refits_have_the_rows_of_the_vocabulary(tmp_path):
    from transformers import AutoModelForCausalLM

    out, _ = run_ranks(functools.partial(round_trip, folder=tmp_path / "hf"), 2, num_ports=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    shapes = {name: list(weight.shape) for name, weight in model.state_dict().items()}
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == [15, 64]
    assert out["first sent"] == out["again sent"] == shapes
    assert {spec.name: list(spec.shape) for spec in out["first planned"]} == shapes
    assert out["first logprobs"] == out["again logprobs"]
    found = torch.tensor(out["first logprobs"])[0, 1:]  # the longest row
    wanted = logprobs_in_transformers(tmp_path / "hf", random_batch(4))[0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
