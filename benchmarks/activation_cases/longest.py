"""Measures table 5: the longest sequence that one GPU trains the dense model on, to within 4,096 tokens.

Each length is tried in its own process, one row for each try, so a later run continues where one was stopped. A
micro-batch is one sequence; the way `longest` has the answer, with the peaks of that try. Attention's activations are
offloaded, into at most 64 GiB of host memory; training state stays on the GPU.

Kernels are those of a run, not the deterministic ones of the other tables: cuDNN's deterministic backward pass of
attention takes 2 bytes x heads x tokens^2 of workspace, 61 GiB at 45,056 tokens of 16 heads, and would be the limit.
"""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from activation_cases import figures
from activation_cases.combinations import ATTENTION, Combination
from activation_cases.measuring import peaks_of
from activation_cases.parity import describe
from activation_cases.processes import run_processes
from activation_cases.table import DETERMINISTIC, Row, Setting
from activation_cases.trial import num_replays
from activation_cases.worker import STATE_STAYS, Feed, moved_by, policy, running

logger = logging.getLogger(__name__)

START, STEP = 65536, 4096
TRY_TIMEOUT_S = 180

WAYS: Mapping[str, Combination] = {
    "dense/off": Combination("dense"),
    "dense/offloaded": Combination("dense", ATTENTION),
    "dense/offloaded+graphs": Combination("dense", ATTENTION, graphs=("attn", "mlp")),
}
_OUT_OF_MEMORY = ("out of memory", "alloc_failed")


def parts(setting: Setting) -> Mapping[str, Callable[[], None]]:
    """Returns one part for each way to train."""
    return {name: functools.partial(_search, setting, name, combination) for name, combination in WAYS.items()}


def _search(setting: Setting, part: str, combination: Combination) -> None:
    tries = f"{part}/tries"
    while True:
        rows = {int(row["seq_length"]): row for row in setting.file.rows if row["part"] == tries}  # type: ignore[arg-type]
        length = figures.next_length({known: row["fill"] for known, row in rows.items()}, START, STEP)  # type: ignore[misc]
        if length is None:
            break
        if setting.time_is_up():
            logger.warning("%s: not settled yet; run again with the same file", part)
            return
        start = time.perf_counter()
        with any_kernels():
            [found] = run_processes(_try, 1, combination, length, timeout_s=TRY_TIMEOUT_S)
        found |= {"seconds": round(time.perf_counter() - start, 1)}
        setting.file.add("longest_sequence", tries, f"{length} tokens", _row(combination, length) | found)
    longest = max((length for length, row in rows.items() if row["fits"]), default=None)
    if longest is None:
        raise RuntimeError(f"{part}: not even {STEP} tokens fit")
    measured = {name: value for name, value in rows[longest].items() if name not in ("table", "part", "way")}
    setting.file.add("longest_sequence", part, "longest", measured)


@contextlib.contextmanager
def any_kernels() -> Iterator[None]:
    """Lets processes started in the block choose kernels whose results differ from run to run."""
    before = os.environ[DETERMINISTIC]
    os.environ[DETERMINISTIC] = "1"
    try:
        yield
    finally:
        os.environ[DETERMINISTIC] = before


def _row(combination: Combination, length: int) -> Row:
    settings: Row = {"micro_batch": 1, "micro_batches": "1", "seq_length": length, "deterministic": False}
    return {**describe(combination), **settings}


def _try(_: int, combination: Combination, length: int) -> Row:
    """Trains a warm-up step and two measured ones; with graphs the first measured step captures."""
    sizes = [
        f"policy.max_total_sequence_length={length}",
        "policy.train_micro_batch_size=1",
        *STATE_STAYS,
        "policy.activation_offload.host_memory_limit_gib=64",
        "policy.megatron_cfg.cuda_graph_warmup_steps=1",
    ]
    try:
        section = policy(combination.model, [*combination.overrides(), *sizes])
        return _train(section, with_graphs=bool(combination.graphs))
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or any(word in str(error).lower() for word in _OUT_OF_MEMORY):
            return {"fits": False, "fill": None, "why": str(error).splitlines()[0][:200]}
        raise


def _train(section: dict[str, Any], *, with_graphs: bool) -> Row:
    with running(section) as worker:
        feed = Feed(worker, section, "1", 1, full=True)
        data = feed.batch(0)
        free, total = torch.cuda.mem_get_info()
        at_rest = torch.cuda.memory_allocated()
        feed.train(data)
        taken: list[float] = []

        def step() -> None:
            torch.cuda.synchronize()
            start = time.perf_counter()
            feed.train(data)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)

        peaks = peaks_of(step)
        # torch's count omits what graphs hold; without graphs the driver's count includes the allocator's slack.
        filled = peaks.driver - (total - free) if with_graphs else peaks.allocated - at_rest
        return {
            "fits": True,
            "fill": round(filled / free, 4),
            "step_ms": round(min(taken) * 1e3, 1),
            "tokens_per_s": round(int(data["input_lengths"].sum()) / min(taken)),
            "steps": len(taken),
            "num_graph_replays": num_replays(worker),
            **peaks.cells(),
            **moved_by(worker).cells(),
        }
