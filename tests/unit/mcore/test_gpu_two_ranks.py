"""The offloader on two ranks, over NCCL, in every layout; numbers compare exactly.

Each rank has a GPU, or both share the only one (see `support.ranks`).
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.gpu import EXACTLY, gpu_policy
from support.other_ranks import KINDS, Part, differing, rejoined, run_part
from support.ranks import run_ranks, worker_of_rank

pytestmark = EXACTLY

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
CPU_OPTIMIZER = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.5,
    "overlap_cpu_optimizer_d2h_h2d": True,
    "use_precision_aware_optimizer": True,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"distributed_data_parallel_config": OVERLAP},
    "dp2_cpu_optimizer": {"distributed_data_parallel_config": OVERLAP, "optimizer": CPU_OPTIMIZER},
    "moe_ep2_cpu_optimizer": {"expert_model_parallel_size": 2, "optimizer": CPU_OPTIMIZER},
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2_vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "moe_ep2": {"expert_model_parallel_size": 2},
    "dp2_streamed": {"distributed_data_parallel_config": OVERLAP},
    "dp2_precision_aware_streamed": {"distributed_data_parallel_config": OVERLAP},
    "dp2_torch_adamw_streamed": {"distributed_data_parallel_config": OVERLAP},
    "moe_ep2_streamed": {"expert_model_parallel_size": 2},
}


def num_steps(layout: str) -> int:
    """More where state is streamed, since all of it is copied in each step."""
    return 20 if layout.endswith("streamed") else 5


def run(layout: str, rank: int, world_size: int, port: int, delay: str | None) -> list[dict[str, Any]]:
    """What the steps report on this rank, without phases between them, or with all of them and one of `DELAYS`."""
    from support import phases

    offload = delay is not None
    overrides = dict(LAYOUTS[layout])
    patch = pytest.MonkeyPatch()
    policy = gpu_policy(layout, patch)
    ddp_config = policy["megatron_cfg"]["distributed_data_parallel_config"]
    ddp_config.update(overrides.pop("distributed_data_parallel_config", {}))
    policy["megatron_cfg"]["optimizer"].update(overrides.pop("optimizer", {}))
    policy["megatron_cfg"].update(overrides)
    policy["use_pinned_optimizer_offload"] = offload
    policy["residency"] |= {"verify": offload, "huge_pages": False, "host_memory_limit_gib": None, "table": None}
    if offload and layout.endswith("streamed"):
        policy["residency"] |= {"stream_window_mib": 4, "table": {"train": {"optimizer_state": "streamed"}}}
    worker = worker_of_rank(policy, rank, world_size, port)
    if delay is not None:
        # A streamed step has hundreds of copies, and ranks that share a GPU spin one after the other.
        getattr(phases, delay)(patch, 0.001 if layout.endswith("streamed") else 0.01)
    reports = phases.run_steps(worker, num_steps(layout), visit_phases=offload)
    patch.undo()
    worker.shutdown()
    return reports


DELAYS = (None, "delay_moves", "delay_compute")


def run_each(layout: str, rank: int, world_size: int, ports: list[int]) -> list[Any]:
    return [run(layout, rank, world_size, port, delay) for port, delay in zip(ports, DELAYS, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_phases_between_steps_change_no_number(layout, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    found = run_ranks(partial(run_each, layout), 2, num_ports=len(DELAYS), timeout_s=480)
    for rank, (plain, *delayed) in enumerate(found):
        assert len(plain) == num_steps(layout)
        for delay, reports in zip(DELAYS[1:], delayed, strict=True):
            assert reports == plain, f"rank {rank}, {delay}"


def parts(folder: Path, rank: int, world_size: int, ports: list[int], **steps: int) -> dict[str, Part]:
    return {
        kind: run_part(kind, rank, world_size, port, folder / kind, **steps)
        for kind, port in zip(KINDS, ports, strict=True)
    }


def test_a_run_goes_on_with_other_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    num_ports = len(KINDS)
    on_two = run_ranks(partial(parts, tmp_path, first=0, last=4, save_at=2), 2, num_ports=num_ports)
    on_one = run_ranks(partial(parts, tmp_path, first=2, last=3, save_at=3), 1, num_ports=num_ports)
    again = run_ranks(partial(parts, tmp_path, first=3, last=4), 2, num_ports=num_ports)
    for kind in on_one[0]:
        (_, first, want), (got, second, third), (at_last, _, fourth) = (
            rejoined([rank[kind] for rank in ranks]) for ranks in (on_two, on_one, again)
        )
        assert bool(first) == bool(second) == (kind != "undistributed")
        assert differing(first, got) == differing(second, at_last) == [], kind
        assert third + fourth == pytest.approx(want[2:], abs=0.01), kind
