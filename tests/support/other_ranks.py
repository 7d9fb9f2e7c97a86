"""Saves a run on some ranks and goes on with it on others; the state of each parameter is compared bit by bit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import worker_of_rank
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, random_batch, tiny_policy

ROWS = 12
SEVERAL_BUCKETS = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000}
CPU_OPTIMIZER = {
    "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": True,
    "use_precision_aware_optimizer": True,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "resident": {},
    "streamed": {"table": {"train": {"optimizer_state": "streamed"}}},
    "moe cpu optimizer": {"optimizer": CPU_OPTIMIZER},
    "context parallel": {"context": 2},
    "precision aware": {"optimizer": {"use_precision_aware_optimizer": True}},
    "undistributed": {"optimizer": {"use_distributed_optimizer": False}, "ddp": {"overlap_param_gather": False}},
}
"""Ways to keep optimizer state, in models that one rank holds whole; gradients have several buckets."""

TWO_RANKS: dict[str, dict[str, Any]] = {
    "moe tp2 ep2": {
        "megatron": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2}
    }
}
"""Models that at least two ranks hold."""

Shard = dict[str, np.ndarray]
"""A parameter's master and moments, of a range of its elements."""


@dataclass(frozen=True)
class Part:
    loaded: dict[tuple[str, int], Shard]
    saved: dict[tuple[str, int], Shard]
    losses: list[float]
    num_buckets: list[int]


def run_part(
    kind: str, rank: int, world_size: int, port: int, folder: Path, *, first: int, last: int, save_at: int = 0
) -> Part:
    """Trains steps of a run, from a checkpoint or from the beginning; call it on every rank."""
    from support.late_streams import LateStream

    from nemo_offload_rl.residency.streamed import window

    keys = (KINDS | TWO_RANKS)[kind]
    hf_config = (TINY_QWEN3_MOE if "moe" in kind else TINY_QWEN3) | {"num_hidden_layers": 2}
    policy = tiny_policy(hf_config, "bfloat16", **keys.get("megatron", {}))
    policy["megatron_cfg"]["context_parallel_size"] = min(world_size, keys.get("context", 1))
    policy["megatron_cfg"]["optimizer"] |= keys.get("optimizer", {})
    policy["megatron_cfg"]["distributed_data_parallel_config"] |= SEVERAL_BUCKETS | keys.get("ddp", {})
    policy["residency"] |= {"huge_pages": False, "stream_window_mib": 1, "table": keys.get("table")}
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(window, "CopyStream", LateStream)
        worker = worker_of_rank(policy, rank, world_size, port)
    torch.set_num_threads(1)
    if first:
        _step(worker, 99)  # loading must replace these moments and counts
        worker.load_checkpoint(str(folder / f"step_{first}"))
    loaded, saved, losses = _shards(worker), {}, []
    for step in range(first, last):
        losses.append(_step(worker, step))
        if step + 1 == save_at:
            saved = _shards(worker)
            worker.save_checkpoint(str(folder / f"step_{save_at}"), save_optimizer=True)
    num_buckets = [len(buffer.buckets) for buffer in _buffers(worker)]
    worker.shutdown()
    return Part(loaded, saved, losses, num_buckets)


def joined(shards: list[dict[tuple[str, int], Shard]]) -> dict[str, Shard]:
    """Returns whole parameters' masters and moments from the shards of all ranks; asserts that none is missing."""
    found: dict[str, dict[int, Shard]] = {}
    for of_rank in shards:
        for (name, first), shard in of_rank.items():
            found.setdefault(name, {})[first] = shard
    whole = {}
    for name, parts in found.items():
        ends = [first + parts[first]["param"].size for first in sorted(parts)]
        assert sorted(parts) == [0, *ends[:-1]], f"{name}: a shard is missing"
        whole[name] = {key: np.concatenate([parts[first][key] for first in sorted(parts)]) for key in parts[0]}
    return whole


def rejoined(ranks: list[Part]) -> tuple[dict[str, Shard], dict[str, Shard], list[float]]:
    """Returns the whole state as loaded and as saved, and the losses, on which all ranks must agree."""
    assert all(rank.losses == ranks[0].losses for rank in ranks)
    loaded, saved = joined([rank.loaded for rank in ranks]), joined([rank.saved for rank in ranks])
    return loaded, saved, ranks[0].losses


def differing(one: dict[str, Shard], other: dict[str, Shard]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if any(not np.array_equal(one[name][key], other[name][key]) for key in one[name])]


def _step(worker: Any, step: int) -> float:
    from nemo_offload_rl.algorithms.losses import NLLLoss

    ranks = worker.parallel_ranks()
    share = ROWS // ranks["dp_size"]
    mine = random_batch(ROWS, seed=step).slice(ranks["dp_rank"] * share, (ranks["dp_rank"] + 1) * share)
    return float(worker.train(mine, NLLLoss(), gbs=ROWS, mbs=share)["loss"])


def _buffers(worker: Any) -> list[Any]:
    return [buffer for chunk in worker.state.model for buffer in chunk.buffers + chunk.expert_parallel_buffers]


def _shards(worker: Any) -> dict[tuple[str, int], Shard]:
    """Returns this rank's part of the distributed optimizers' state; nothing of other optimizers."""
    from megatron.core import parallel_state as mpu

    read = worker.offloader.checkpoint_reader()
    name_of = {id(param): name for name, param in worker.state.parameters()}
    shards = {}
    for optimizer in worker.state.optimizer.chained_optimizers:
        for ranges in getattr(optimizer, "gbuf_ranges", ()):
            for bucket in (bucket for buckets in ranges.values() for bucket in buckets):
                for param, at in bucket["param_map"].items():
                    ep_rank = 0 if getattr(param, "allreduce", True) else mpu.get_expert_model_parallel_rank()
                    name = f"{name_of[id(param)]} of tp {mpu.get_tensor_model_parallel_rank()}, ep {ep_rank}"
                    tensors = optimizer._get_main_param_and_optimizer_states(param)
                    shards[name, at["param"].start] = {
                        key: read(tensor.detach()).cpu().numpy().copy()
                        for key, tensor in tensors.items()
                        if tensor.numel() == len(range(at["param"].start, at["param"].end)) and key != "step"
                    }
    return shards
