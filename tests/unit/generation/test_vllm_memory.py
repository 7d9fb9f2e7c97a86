"""Memory of an engine that sleeps."""

from types import SimpleNamespace

import pytest
import torch

from nemo_offload_rl.generation import vllm_memory
from nemo_offload_rl.generation.vllm_memory import engine_memory_stats

GIB = 2**30


def block(tag, gib, copy=None):
    return SimpleNamespace(tag=tag, handle=(0, gib * GIB, 0, 0), cpu_backup_tensor=copy)


def test_what_sleeps_is_no_memory_of_the_gpu(monkeypatch):
    seen = []
    monkeypatch.setattr(vllm_memory, "memory_stats", lambda beside: seen.append(beside) or {"host_rss_gib": 1.0})
    pools = {1: block("weights", 3, torch.zeros(GIB // 1024, dtype=torch.uint8)), 2: block("kv_cache", 60)}
    assert engine_memory_stats(pools, {"weights", "kv_cache"}) == {
        "host_rss_gib": 1.0, "gpu_pools_gib": 0, "host_pools_gib": pytest.approx(1 / 1024)
    }  # fmt: skip
    assert engine_memory_stats(pools, {"kv_cache"})["gpu_pools_gib"] == 3
    assert seen == [-63 * GIB, -60 * GIB]
