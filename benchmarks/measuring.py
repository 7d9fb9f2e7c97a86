"""Measures seconds, memory and planned memory in one way, and creates rows of random tokens."""

import time
from collections.abc import Callable
from typing import Any

import torch

from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.placement.host import HostFacts
from nemo_offload_rl.plan.planner import Planner
from nemo_offload_rl.plan.row_tokens import training_bytes
from nemo_offload_rl.residency.table import Phase
from nemo_offload_rl.worker.worker import MegatronPolicyWorker


def planned_gib(algorithm: str, config: Any, host: HostFacts) -> float:
    """Returns the GPU memory of a training step by the plan: state, activations and logits, without any margin."""
    planner = Planner(hf_config(config["policy"]).to_dict(), algorithm, gpu_bytes=None)
    run = planner.plan(config)
    assert run is not None
    run.check_hosts([host])
    [rank], [training] = run.plan.ranks, training_bytes(config, planner)
    return (sum(rank.gpu_bytes[Phase.TRAIN].values()) + max(training, rank.step_grad_bytes)) / GIB


def timed_call[Result](function: Callable[[], Result]) -> tuple[float, Result]:
    """Returns the seconds of a call, with the GPU's work, and its result."""
    start = now()
    result = function()
    return now() - start, result


def now() -> float:
    """Returns the clock once the GPU is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_gib(worker: MegatronPolicyWorker, verb: str) -> float | None:
    """Returns the peak of the last call of a worker method, with the engine's ranges; None without a GPU."""
    return worker.memory_stats().get(f"gpu_peak_{verb}_gib")


def random_rows(num_rows: int, row_tokens: int, vocab_size: int, seed: int = 0) -> BatchedData:
    """Creates rows of random tokens, all of which are trained on; equal for equal seeds."""
    shape = (num_rows, row_tokens)
    return BatchedData(
        input_ids=torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(seed)),
        input_lengths=torch.full((num_rows,), row_tokens),
        token_mask=torch.ones(shape),
        sample_mask=torch.ones(num_rows),
    )
