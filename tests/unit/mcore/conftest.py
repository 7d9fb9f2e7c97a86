import gc
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import support.prepared  # noqa: F401  (before a test's first worker imports it, so that its objects are frozen once)
import torch
from megatron.core.tensor_parallel import random as checkpoints
from support.late_copies import LateCopies
from support.ranks import free_port, worker_of_rank
from support.tiny import tiny_policy

from nemo_offload_rl.mcore.patches import activation_offload
from nemo_offload_rl.worker.worker import MegatronPolicyWorker


@pytest.fixture
def make_worker() -> Iterator[Callable[..., MegatronPolicyWorker]]:
    """Builds one-rank workers; destroys the process groups of the last one when the test ends."""
    built: list[MegatronPolicyWorker] = []

    def make(policy: dict[str, Any] | None = None, **arguments: Any) -> MegatronPolicyWorker:
        if built:
            built[-1].shutdown()
        torch.set_num_threads(1)
        policy = tiny_policy() if policy is None else policy
        built.append(worker_of_rank(policy, 0, 1, free_port(), **arguments))
        return built[-1]

    yield make
    if built:
        built[-1].shutdown()  # each earlier one was shut down when the next was built
        built.clear()
        gc.collect()  # models are reference cycles; each holds 60 gloo threads until collected


@pytest.fixture(scope="module")
def once() -> Callable[[Any, Callable[[], Any]], Any]:
    """Computes what several tests of a module compare with, once a key."""
    found: dict[Any, Any] = {}

    def get(key: Any, compute: Callable[[], Any]) -> Any:
        if key not in found:
            found[key] = compute()
        return found[key]

    return get


@pytest.fixture
def late(monkeypatch) -> None:
    """Makes every copy of activations as late as the waits for it allow, without a GPU."""
    monkeypatch.setattr(activation_offload, "CudaCopies", lambda device, graphs: LateCopies(eager_share=0.1))


def fill_again(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Refills an emptied tensor; megatron-core's C++ extension, built only for CUDA, does this without a copy."""
    storage, full = output.untyped_storage(), recomputed.untyped_storage()
    storage.resize_(full.nbytes())
    storage.copy_(full)


@pytest.fixture
def recomputing(monkeypatch):
    """Lets megatron-core discard and recompute outputs without Transformer Engine, which it asks about fp8."""
    no_fp8 = SimpleNamespace(is_fp8_enabled=lambda: False)
    monkeypatch.setattr(checkpoints, "FP8GlobalStateManager", no_fp8, raising=False)
    monkeypatch.setattr(checkpoints, "activation_recompute_forward", lambda **_: nullcontext(), raising=False)
    monkeypatch.setattr(checkpoints, "fp8_autocast", lambda **_: nullcontext(), raising=False)
    monkeypatch.setattr(checkpoints, "_get_share_storage", lambda: fill_again)


@pytest.fixture
def deterministic_kernels() -> None:
    assert os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0", "run with NVTE_ALLOW_NONDETERMINISTIC_ALGO=0"
