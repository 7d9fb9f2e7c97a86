"""Tests streamed optimizer state on two gloo ranks: shards that cut parameters, and separate experts' optimizers."""

from typing import Any

import pytest
import torch
from support.ranks import off_and_on, run_ranks, worker_of_rank
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, tiny_policy

LAYOUTS: dict[str, dict[str, Any]] = {"dp2": {}, "moe_ep2": {"expert_model_parallel_size": 2}}


def run(layout: str, rank: int, world_size: int, port: int, *, streamed: bool) -> tuple[list[dict[str, Any]], int]:
    """Returns the steps' reports on this rank, and the number of its chunks."""
    from support.late_streams import LateStream
    from support.phases import run_steps

    from nemo_offload_rl.residency.streamed import window
    from nemo_offload_rl.residency.table import Target

    config = TINY_QWEN3_MOE if layout.startswith("moe") else TINY_QWEN3
    policy = tiny_policy(config, "bfloat16", **LAYOUTS[layout])
    policy["residency"] |= {"huge_pages": False, "stream_window_mib": 1}
    if streamed:
        policy["residency"]["table"] = {"train": {"optimizer_state": "streamed"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "CopyStream", LateStream)
        worker = worker_of_rank(policy, rank, world_size, port)
    torch.set_num_threads(1)
    reports = run_steps(worker, 3, visit_phases=streamed)
    steps = worker.offloader.targets[Target.OPTIMIZER_STATE].steps if streamed else []
    worker.shutdown()
    return reports, sum(step.num_chunks for step in steps)


def all_layouts(rank: int, world_size: int, ports: list[int]) -> dict[str, tuple[Any, Any]]:
    return off_and_on(LAYOUTS, ports, lambda layout, port, on: run(layout, rank, world_size, port, streamed=on))


def test_numbers_are_those_of_resident_state():
    for rank, layouts in enumerate(run_ranks(all_layouts, 2, num_ports=2 * len(LAYOUTS))):
        for layout, ((plain, _), (streamed, num_chunks)) in layouts.items():
            assert streamed == plain, f"rank {rank}, {layout}"
            assert num_chunks > 3
