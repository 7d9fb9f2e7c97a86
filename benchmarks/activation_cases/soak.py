"""Measures table 4: hundreds of steps with random packed lengths and micro-batches, and log-probs now and then.

`pinned_mib` (the arena's, and torch's own page-locked memory) and `reserved_mib` must not grow from step 20 to the end;
the row is rewritten every 100 steps. `steps_with_all_offloaded` counts steps in which every micro-batch that was
trained on took part, and everything that should be offloaded was.
"""

import functools
import logging
import time
from collections.abc import Callable, Mapping

import torch

from activation_cases.combinations import ALL_OF_DENSE, ALL_OF_MOE, ATTENTION, Combination
from activation_cases.parity import describe
from activation_cases.table import Row, Setting
from activation_cases.worker import MIB, Feed, moved_by, policy, running
from nemo_offload_rl.worker.worker import MegatronPolicyWorker

logger = logging.getLogger(__name__)

NUM_STEPS = 500
SETTLED_STEP = 20
_WRITTEN_EVERY, _LOGPROBS_EVERY = 100, 10

CASES: Mapping[str, Combination] = {
    "tiny_dense": Combination("tiny_dense", ALL_OF_DENSE, micro_batches="changing", packed=True),
    "tiny_moe": Combination("tiny_moe", ALL_OF_MOE, micro_batches="changing", packed=True),
    "dense": Combination(
        "dense", ATTENTION, micro_batches="changing", packed=True, extra=("policy.train_micro_batch_size=1",)
    ),
}


def parts(setting: Setting) -> Mapping[str, Callable[[], None]]:
    """Returns one part for each model."""
    return {name: functools.partial(_soak, setting, name, combination) for name, combination in CASES.items()}


def _soak(setting: Setting, part: str, combination: Combination) -> None:
    section = policy(combination.model, combination.overrides())
    num_steps = setting.num_steps(NUM_STEPS)
    with running(section) as worker:
        feed = Feed(worker, section, combination.micro_batches, section["train_micro_batch_size"])
        settled: dict[str, float] = {}
        num_whole = num_micro_batches = num_tokens = refused = 0
        start = time.perf_counter()
        for step in range(1, num_steps + 1):
            data = feed.batch(step)
            if step % _LOGPROBS_EVERY == 0:
                worker.get_logprobs(data, mbs=feed.rows)
            report, moved = feed.train(data), moved_by(worker)
            whole = moved.num_micro_batches == report["num_microbatches"] and moved.moved == moved.should_leave > 0
            num_whole += whole
            if not whole and num_whole == step - 1:  # the first of them
                logger.warning("step %d: %s, of %d micro-batches", step, moved, report["num_microbatches"])
            num_micro_batches += report["num_microbatches"]
            num_tokens += report["tokens"]
            refused += moved.refused
            if step == SETTLED_STEP:
                settled = memory_mib(worker)
            if step % _WRITTEN_EVERY == 0 or step == num_steps:
                seconds = time.perf_counter() - start
                row: Row = describe(combination) | moved.cells() | settled_and_now(settled, memory_mib(worker))
                row |= {
                    "steps": step,
                    "steps_with_all_offloaded": num_whole,
                    "num_micro_batches": num_micro_batches,
                    "refused_mib": round(refused / MIB, 3),
                    "step_ms": round(seconds / step * 1e3, 2),
                    "tokens_per_s": round(num_tokens / seconds),
                    "host_slab_mib": round(moved.host / MIB, 1),
                }
                setting.file.add("soak", part, "offloaded", row)


def memory_mib(worker: MegatronPolicyWorker) -> dict[str, float]:
    """Returns the quantities that must not grow, in MiB."""
    by_torch = int(torch.cuda.host_memory_stats()["allocated_bytes.current"])
    return {
        "pinned_mib": (worker.offloader.context.arena.pinned_bytes + by_torch) / MIB,
        "reserved_mib": torch.cuda.memory_reserved() / MIB,
    }


def settled_and_now(settled: Mapping[str, float], now: Mapping[str, float]) -> Row:
    """Returns fields of a row; those of the settled step are null until it has come."""
    row: Row = {}
    for name, value in now.items():
        row |= {f"{name}_at_step_{SETTLED_STEP}": settled.get(name), f"{name}_at_end": round(value, 3)}
        row |= {f"{name}_growth": round(value - settled[name], 3) if settled else None}
    return row
