"""Tests that two ranks compute what one does, on gloo: DP, TP, PP, EP, CP, packed rows, biases, windows, experts."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.ranks import rows_of, run_ranks, worker_of_rank
from support.tiny import TINY_QWEN3, layout_of, logprobs_in_transformers, packed_rows, random_batch, tiny_policy
from support.toy_policy import LocalTransport

from tests.unit.mcore.test_architectures import BIASED, FACTORS
from tests.unit.mcore.test_hf_weights import Loaded

# Of the logits and of MLPs, which the backward pass computes again; one rank computes them whole.
CHUNKS = {"use_fused_linear_logprobs": True, "fused_linear_logprobs_chunk_size": 5, "mlp_tile_tokens": 5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4, "rope_theta": 100.0}
LLAMA3 = {"rope_type": "llama3", "original_max_position_embeddings": 8, "rope_theta": 100.0} | FACTORS
LLAMA = {"model_type": "llama", "num_key_value_heads": 1, "mlp_bias": True, "rope_parameters": LLAMA3} | BIASED
WINDOW = {"use_sliding_window": True, "sliding_window": 3, "rope_parameters": YARN} | BIASED
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}
# Each rank has another share of the rows' padding. test_architectures checks that one rank computes what transformers
# does, and a vocabulary of 15 is padded for two.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (TINY_QWEN3, {}),
    "moe": (tiny.TINY_QWEN3_MOE, {}),
    "odd": (TINY_QWEN3 | {"vocab_size": 15}, {}),
    "llama": (TINY_QWEN3 | LLAMA, {}),
    "windows": (TINY_QWEN3 | WINDOW | {"max_window_layers": 1}, {}),
    "dense layers": (tiny.TINY_QWEN3_MOE | WINDOW | {"mlp_only_layers": [0, 2]}, AUX),
}
WORDS: dict[str, dict[str, Any]] = {
    "chunks": CHUNKS,
    "etp2": {"expert_tensor_parallel_size": 2},
    "overlapped": {"distributed_data_parallel_config": {"overlap_grad_reduce": True}},
    "gathered": {"cp_comm_type": "all_gather"},  # attention of Transformer Engine does not compute windows with p2p
}
# Packed rows are compared with padded rows on one rank; tensor parallelism by itself is that of the odd vocabulary, and
# a pipeline by itself has virtual stages.
LAYOUTS: dict[str, list[str]] = {
    "dense": ["dp2", "tp2 sp", "pp2 vpp2", "chunks tp2", "chunks pp2", "packed chunks tp2 sp"],
    "moe": ["dp2", "ep2", "packed dp2 ep2", "packed pp2 vpp2 recomputed", "packed etp2"],
    "odd": ["tp2"],
    "llama": ["cp2", "tp2 sp"],
    "windows": ["cp2 gathered", "pp2 vpp2"],
    "dense layers": ["cp2 gathered", "tp2 sp", "pp2 vpp2 recomputed", "ep2"],
}
CASES = [(model, layout) for model, layouts in LAYOUTS.items() for layout in layouts]
CASES += [("dense", "chunks dp2 overlapped recomputed")]


def run(model: str, layout: str, rank: int, world_size: int, port: int) -> dict[str, Any]:
    """Runs three steps, the last on pairs, then log-probs; each rank has all rows except those of another DP rank."""
    from nemo_offload_rl.algorithms.losses import DPOLoss, NLLLoss
    from nemo_offload_rl.mcore.logprob import linear_logprob

    hf_config, megatron = MODELS[model]
    policy = tiny_policy(hf_config, **megatron, **layout_of(layout, **WORDS))
    if "packed" in layout:
        policy["sequence_packing"] = packed_rows(20)  # some pairs are longer
    worker = worker_of_rank(policy, rank, world_size, port, init_reference_model=True)
    torch.set_num_threads(1)
    linear_logprob._COLUMNS = 1  # so that a vocabulary of 14 has several parts, too
    rows = rows_of(worker, 8)
    steps = [worker.train(random_batch(8, seed=step).slice(*rows), NLLLoss(), gbs=8, mbs=2) for step in range(2)]
    pairs = random_batch(8, seed=8).in_groups(2).slice(*rows)
    reference = worker.get_reference_policy_logprobs(pairs, mbs=1)
    pairs["reference_policy_logprobs"] = reference["reference_logprobs"]
    steps.append(worker.train(pairs, DPOLoss(0.5, 1.0, 0.1, False, False), gbs=4, mbs=1))
    probe, few = random_batch(8, seed=9).slice(*rows), random_batch(6, seed=10).slice(*rows_of(worker, 6))
    out = {
        "losses": [s["loss"] for s in steps],
        "grad_norms": [s["grad_norm"] for s in steps],
        "rows": rows,
        "logprobs": worker.get_logprobs(probe, mbs=2)["logprobs"].tolist(),
        "reference": worker.get_reference_policy_logprobs(probe, mbs=2)["reference_logprobs"].tolist(),
        "evaluated": worker.evaluate(probe, NLLLoss(), mbs=2)["loss"],
        "of_one_micro_batch": worker.get_logprobs(probe, mbs=8)["logprobs"].tolist(),
        "of_three_micro_batches": worker.evaluate(few, NLLLoss(), mbs=few.size // 3)["loss"],
        "exported": {name: (weight.shape, float(weight.double().sum())) for name, weight in worker.hf_weights()},
    }
    worker.shutdown()
    return out


def all_layouts(rank: int, world_size: int, ports: list[int]) -> dict[tuple[str, str], dict[str, Any]]:
    return {case: run(*case, rank, world_size, port) for case, port in zip(CASES, ports, strict=True)}


def one_rank(rank: int, world_size: int, ports: list[int]) -> dict[str, dict[str, Any]]:
    return {name: run(name, "", rank, world_size, port) for name, port in zip(MODELS, ports, strict=True)}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return run_ranks(one_rank, 1, num_ports=len(MODELS))[0]


@pytest.fixture(scope="module")
def together() -> list[dict[tuple[str, str], dict[str, Any]]]:
    return run_ranks(all_layouts, 2, num_ports=len(CASES), timeout_s=300)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_two_ranks_compute_what_one_does(alone, together, model, layout):
    want = alone[model]
    for rank in range(2):
        got = together[rank][model, layout]
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)
        assert got["grad_norms"] == pytest.approx(want["grad_norms"], rel=1e-4)
        for name in ("evaluated", "of_three_micro_batches"):
            assert got[name] == pytest.approx(want[name], rel=1e-4)
        start, stop = got["rows"]
        for field in ("logprobs", "reference", "of_one_micro_batch"):
            found, wanted = torch.tensor(got[field]), torch.tensor(want[field])[start:stop]
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-4)
        assert set(got["exported"]) == set(want["exported"])
        for name, (shape, total) in want["exported"].items():
            assert got["exported"][name] == (shape, pytest.approx(total, rel=1e-3, abs=2e-3)), name


@pytest.mark.slow
def test_flags_count_in_the_rows_that_are_compared(alone):
    assert len([name for name in alone["llama"]["exported"] if name.endswith(".bias")]) == 4 * 7
    dense = [name for name in alone["dense layers"]["exported"] if ".mlp.gate_proj." in name]
    assert [name.split(".")[2] for name in dense] == ["0", "2"]


def round_trip(rank: int, world_size: int, ports: list[int], folder: Path) -> dict[str, Any]:
    """Refits and exports a model of 15 tokens on ranks that hold 8 each, and reads the export again."""
    torch.set_num_threads(1)
    untied = TINY_QWEN3 | {"vocab_size": 15, "tie_word_embeddings": False}
    policy, data, out = tiny_policy(untied, tensor_model_parallel_size=world_size), random_batch(4), {}
    models = {"first": {}, "again": {"hf_config": None, "model_name": str(folder)}}
    for (name, model), port in zip(models.items(), ports, strict=True):
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
