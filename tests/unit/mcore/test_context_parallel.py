"""Tests that rows split over context-parallel ranks have the numbers of whole rows, on gloo, in every layout."""

import itertools
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support import tiny
from support.ranks import rows_of, run_ranks, worker_of_rank

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.mcore.context_parallel import positions_of_ranks

CHUNKS = {"use_fused_linear_logprobs": True, "fused_linear_logprobs_chunk_size": 5}
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
LAYOUTS = ["cp4", "cp2 dp2 chunks", "cp2 tp2 sp", "cp2 pp2 vpp2 recomputed", "moe cp2 dp2 ep2"]
LENGTHS = ([300, 1, 17, 120], [3, 64, 2, 200], [5, 4, 3, 2], [33, 1, 1, 7], [16, 16, 16, 16], [299, 298, 1, 90])
"""Of the rows of each of six steps; they are uneven over data-parallel ranks, too."""


def policy_of(layout: str, *, packed: bool, context: int) -> dict[str, Any]:
    """Returns a policy whose update is its gradient, or that of one rank if `context` is 1."""
    moe = layout.startswith("moe")
    overrides = dict(AUX) if moe and not packed else {}  # these losses are of a micro-batch; packed, others share it
    if context > 1:
        overrides |= tiny.layout_of(layout, chunks=CHUNKS)
    policy = tiny.tiny_policy(
        tiny.TINY_QWEN3_MOE if moe else tiny.TINY_QWEN3, **overrides | {"context_parallel_size": context}
    )
    if packed:
        policy["sequence_packing"] = tiny.packed_rows(300)
    lengths = {"max_total_sequence_length": 300, "make_sequence_length_divisible_by": 8}
    return tiny.with_plain_sgd(policy, rate=0.01) | lengths


def batch_of_step(step: int) -> Any:
    """Returns the rows of a step: with one trained token of all in the third, and one sample left out in the fourth."""
    batch = tiny.batch_of_lengths(LENGTHS[step], prompt=1, seed=step)
    if step == 2:
        batch["token_mask"].zero_()
        batch["token_mask"][0, 4] = 1
    if step == 3:
        batch["sample_mask"][0] = 0
    return batch


def run(layout: str, packed: bool, rank: int, world_size: int, port: int, *, context: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    policy = policy_of(layout, packed=packed, context=context)
    worker = worker_of_rank(policy, rank, world_size, port)
    rows, steps, logprobs = rows_of(worker, 4), [], []
    for step in range(len(LENGTHS)):
        batch = batch_of_step(step).slice(*rows)
        logprobs.append(worker.get_logprobs(batch, mbs=1)["logprobs"].tolist())
        steps.append(worker.train(batch, NLLLoss(), gbs=4, mbs=1))
    out = {
        "rows": rows,
        "logprobs": logprobs,
        "losses": [step["loss"] for step in steps],
        "grad_norms": [step["grad_norm"] for step in steps],
        "aux_losses": [value for step in steps for name, value in step["metrics"].items() if "balancing" in name],
        "weights": {name: weight.numpy().copy() for name, weight in worker.hf_weights()},
    }
    worker.shutdown()
    return out


CASES = [(layout, "pp2" not in layout) for layout in LAYOUTS] + [("moe cp2 dp2 ep2", False)]
"""A layout, and whether its rows are packed."""


def all_layouts(rank: int, world_size: int, ports: list[int]) -> dict[Any, Any]:
    cases = zip(CASES, ports, strict=True)
    sizes = {"cp4": 4}
    return {case: run(*case, rank, world_size, port, context=sizes.get(case[0], 2)) for case, port in cases}


def one_rank(rank: int, world_size: int, ports: list[int]) -> dict[Any, Any]:
    kinds = zip(itertools.product(("dense", "moe"), (False, True)), ports, strict=True)
    return {kind: run(*kind, rank, world_size, port, context=1) for kind, port in kinds}


@pytest.fixture(scope="module")
def alone() -> dict[Any, Any]:
    return run_ranks(one_rank, 1, num_ports=4)[0]


@pytest.fixture(scope="module")
def together() -> list[dict[Any, Any]]:
    return run_ranks(all_layouts, 4, num_ports=len(CASES))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "packed"), CASES)
def test_split_rows_compute_what_whole_rows_do(alone, together, layout, packed):
    want = alone["moe" if layout.startswith("moe") else "dense", packed]
    for rank in range(4):
        got = together[rank][layout, packed]
        for name in ("losses", "grad_norms", "aux_losses"):
            assert got[name] == pytest.approx(want[name], rel=1e-5), name
        start, stop = got["rows"]
        for found, wanted in zip(got["logprobs"], want["logprobs"], strict=True):
            rows = torch.tensor(wanted)[start:stop]
            torch.testing.assert_close(torch.tensor(found), rows[:, : len(found[0])], rtol=2e-6, atol=2e-6)
        for name, weight in want["weights"].items():
            numpy.testing.assert_allclose(got["weights"][name], weight, rtol=0, atol=2e-6, err_msg=name)


def trained(first: int, last: int, rank: int, world_size: int, ports: list[int]) -> list[tuple[float, float]]:
    """Resumes before a step, trains up to another and saves; returns losses and gradient norms."""
    root = Path(os.environ["SAVE_BELOW"])
    policy = tiny.tiny_policy(context_parallel_size=world_size)
    policy |= {"max_total_sequence_length": 304, "sequence_packing": tiny.packed_rows(304)}
    worker = worker_of_rank(policy, rank, world_size, ports[0])
    if first:
        worker.load_checkpoint(str(root / f"step_{first}"))
    steps = [worker.train(batch_of_step(step), NLLLoss(), gbs=4, mbs=1) for step in range(first, last)]
    worker.save_checkpoint(str(root / f"step_{last}"), save_optimizer=True)
    worker.shutdown()
    return [(step["loss"], step["grad_norm"]) for step in steps]


@pytest.mark.slow
def test_a_run_resumes_with_another_number_of_context_ranks(tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    monkeypatch.setenv("SAVE_BELOW", str(tmp_path / "whole"))
    (want,) = run_ranks(partial(trained, 0, 6), 1, num_ports=1)
    monkeypatch.setenv("SAVE_BELOW", str(tmp_path))
    got = [run_ranks(partial(trained, 2 * n, 2 * n + 2), ranks, num_ports=1) for n, ranks in enumerate((2, 1, 2))]
    found = [pair for ranks in got for pair in ranks[0]]
    for one, other in zip(found, want, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_has_a_front_and_a_back_chunk_of_each_sequence(size):
    cu_seqlens = torch.tensor([0, 2 * size, 2 * size, 8 * size], dtype=torch.int32)
    positions = positions_of_ranks(cu_seqlens, size)
    assert positions.shape == (size, 8)
    for rank in range(size):
        first = [rank, 2 * size - 1 - rank]
        start, chunk = 2 * size, 3
        second = [start + number * chunk + token for number in (rank, 2 * size - 1 - rank) for token in range(chunk)]
        assert positions[rank].tolist() == first + second
