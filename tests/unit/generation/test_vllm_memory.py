"""Tests the memory of a sleeping engine."""

from types import SimpleNamespace

import pytest
import torch

from nemo_offload_rl.generation import vllm_memory
from nemo_offload_rl.generation.vllm_memory import engine_memory_stats

GIB = 2**30


def block(gib, is_asleep, copy=None):
    return SimpleNamespace(is_asleep=is_asleep, handle=(0, gib * GIB, 0, 0), cpu_backup_tensor=copy)


def test_what_sleeps_is_no_memory_of_the_gpu(monkeypatch):
    seen = []
    monkeypatch.setattr(vllm_memory, "memory_stats", lambda beside: seen.append(beside) or {"host_rss_gib": 1.0})
    weights, cache = block(3, True, torch.zeros(GIB // 1024, dtype=torch.uint8)), block(60, True)
    assert engine_memory_stats({1: weights, 2: cache}) == {
        "host_rss_gib": 1.0, "gpu_pools_gib": 0, "host_pools_gib": pytest.approx(1 / 1024)
    }  # fmt: skip
    assert engine_memory_stats({1: block(3, False), 2: cache})["gpu_pools_gib"] == 3
    assert seen == [-63 * GIB, -60 * GIB]
