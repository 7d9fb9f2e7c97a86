import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import support.prepared  # noqa: F401  (before a test's first worker imports it, and its objects are collected anew)
import torch
from support.ranks import free_port
from support.tiny import tiny_policy

from nemo_offload_rl.worker.worker import MegatronPolicyWorker


@pytest.fixture
def make_worker() -> Iterator[Callable[..., MegatronPolicyWorker]]:
    """Builds one-rank workers; the process groups of the last one end with the test."""
    built: list[MegatronPolicyWorker] = []

    def make(policy: dict[str, Any] | None = None, **arguments: Any) -> MegatronPolicyWorker:
        if built:
            built[-1].shutdown()
        torch.set_num_threads(1)
        worker = MegatronPolicyWorker(
            tiny_policy() if policy is None else policy,
            rank=0,
            world_size=1,
            local_rank=0,
            master_addr="localhost",
            master_port=free_port(),
            **({"seed": 3, "init_reference_model": False} | arguments),
        )
        built.append(worker)
        return worker

    yield make
    if built:
        built[-1].shutdown()  # the others were, when their successors were built
        built.clear()
        gc.collect()  # models are cycles, and each holds 60 threads of gloo's until it is collected
