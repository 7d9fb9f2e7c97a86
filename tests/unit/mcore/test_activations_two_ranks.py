"""Tests activation offloading with several micro-batches in flight, in every two-rank layout, on gloo."""

from typing import Any

import pytest
import torch
from support.ranks import off_and_on, run_ranks, worker_of_rank
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, layout_of, offloading_activations, random_batch, tiny_policy

ATTENTION = ["qkv_linear", "core_attn", "attn_proj"]
LAYOUTS = ["dp2", "tp2 sp", "pp2", "pp2 uneven", "pp2 vpp2", "moe ep2"]
UNEVEN = {"delta_offload_bytes_across_pp_ranks": 30_000}
"""With it a stage keeps more."""
FULL = {"activation_checkpointing": True, "recompute_granularity": "full", "recompute_num_layers": 2}
RECOMPUTED = [f"{layout}, again" for layout in ("tp2 sp", "cp2", "pp2 vpp2", "moe ep2")]
"""Layouts in which whole layers are recomputed from what is offloaded; the plain run recomputes nothing."""
ROWS = (8, 12, 4)
"""Of a data-parallel rank, step by step; two make a micro-batch."""


def run(layout: str, rank: int, world_size: int, port: int, *, offload: bool) -> tuple[list[dict[str, Any]], int]:
    """Returns the reports of the steps on this rank, and the bytes that the last step moved."""
    from support.late_copies import LateCopies
    from support.phases import checksums

    from nemo_offload_rl.algorithms.losses import NLLLoss
    from nemo_offload_rl.mcore.patches import activation_offload

    config = TINY_QWEN3_MOE if layout.startswith("moe") else TINY_QWEN3
    policy = tiny_policy(config, **layout_of(layout.removesuffix(", again"), uneven=UNEVEN))
    if offload:
        modules, again = (["layer_input", "core_attn"], FULL) if layout in RECOMPUTED else (ATTENTION, {})
        policy = offloading_activations(policy, modules, gbs=max(ROWS), **again)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation_offload, "CudaCopies", lambda device, graphs: LateCopies(rank, eager_share=0.1))
        worker = worker_of_rank(policy, rank, world_size, port)
    torch.set_num_threads(1)
    ranks = worker.parallel_ranks()
    reports = []
    for step, rows in enumerate(ROWS):
        data = random_batch(rows, 8 + 4 * step, seed=step * ranks["dp_size"] + ranks["dp_rank"])
        report = worker.train(data, NLLLoss(), gbs=rows * ranks["dp_size"], mbs=2)
        reports.append({name: report[name] for name in ("loss", "grad_norm")} | {"checksums": checksums(worker)})
    moved = worker.activations.offloader.report.total().moved_bytes if offload else 0
    worker.shutdown()
    return reports, moved


def all_layouts(rank: int, world_size: int, ports: list[int]) -> dict[str, tuple[Any, Any]]:
    plain: dict[str, Any] = {}  # recomputation is not part of a plain run

    def run_once(layout: str, port: int, on: bool) -> tuple[list[dict[str, Any]], int]:
        parallel = layout.removesuffix(", again")
        if not on and parallel in plain:
            return plain[parallel]
        found = run(layout, rank, world_size, port, offload=on)
        if not on:
            plain[parallel] = found
        return found

    return off_and_on((*LAYOUTS, *RECOMPUTED), ports, run_once)


@pytest.fixture(scope="module")
def both() -> list[dict[str, tuple[Any, Any]]]:
    return run_ranks(all_layouts, 2, num_ports=2 * len((*LAYOUTS, *RECOMPUTED)), timeout_s=400)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, *RECOMPUTED])
def test_numbers_are_those_of_a_plain_run(both, layout):
    moved = []
    for rank, layouts in enumerate(both):
        (plain, _), (offloaded, nbytes) = layouts[layout]
        assert offloaded == plain, f"rank {rank}"
        moved.append(nbytes)
    assert min(moved) > 0
    if layout == "pp2 uneven":  # so the second stage moves less
        assert moved[1] < both[1]["pp2"][1][1]
