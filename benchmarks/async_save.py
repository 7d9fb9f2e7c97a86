"""How long does training wait for an asynchronous checkpoint, and how long for a synchronous one?

One worker trains on the same batch over and over. It saves synchronously and in the background of the steps that
follow, with optimizer state that stays on the GPU (`resident`, a run's default where the GPU has room) and with state
that moves to the host after each step (`leaves`).

`exposed_s` is the time of the calls that training waits for, counted from when offloaded state has reached the host; it
includes the copies to the host and megatron-core's planning. `snapshot_gb` is what such a save copies into its own host
memory: with resident state everything that is written, otherwise the weights, because offloaded state is read where it
already is. `bound_s` is those bytes over the link's speed as the worker measured it. `step_s` is a step until its
result is there; it includes the return of offloaded state but not the offload after the step; during a save, state
stays on the GPU until the checkpoint is finished. The first background save also allocates and page-locks host memory,
and has a row of its own (`turn` 0). `is_exact` compares log-probs from before the last save with those of the policy
loaded from it.

python benchmarks/async_save.py --folder /tmp/async_save [--state resident] [--scale tiny] [--out FILE]

With 1.5 B parameters a save is 21.6 GB; each state makes one, and two more for each of `--repeats`.
"""

import argparse
import gc
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import random_rows
from model_shapes import QWEN2_1_5B, TINY_SIZES
from one_rank import one_rank_worker
from result_file import TableValue, print_rows, write_result

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.config import for_machine, load
from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.worker.actor import exempt_from_gc
from nemo_offload_rl.worker.worker import MegatronPolicyWorker

STATES: Mapping[str, Mapping[str, Any]] = {
    "resident": {"leaves": False, "table": {"generate": {"params": "keep"}}},
    "leaves": {"leaves": True, "table": {}},
}
"""By name: whether optimizer state leaves for a refit, and the recipe's cells of the residency table."""


@dataclass(frozen=True)
class Scale:
    """Describes the model and the batch that are trained.

    Attributes:
        hf_config: the model's sizes.
        num_rows: of a step, which is one global batch.
        row_tokens: of each row; at most the policy's max_total_sequence_length.
    """

    hf_config: Mapping[str, Any]
    num_rows: int
    row_tokens: int

    def policy(self, state: str) -> dict[str, Any]:
        """Returns the policy section of grpo_math_1B_megatron.yaml with this model and a state; in fp32 on a CPU."""
        overrides = ["policy.sequence_packing.enabled=false", "policy.megatron_cfg.empty_unused_memory_level=0"]
        on_gpu = torch.cuda.is_available()
        if not on_gpu:
            overrides += ["policy.precision=float32", "policy.megatron_cfg.optimizer.bf16=false"]
        config = dict(load("examples/configs/grpo_math_1B_megatron.yaml", overrides).config)
        config, _ = for_machine(config, has_gpus=on_gpu)
        return dict(config["policy"]) | {
            "hf_config": dict(self.hf_config),
            "offload_optimizer_for_refit": STATES[state]["leaves"],
            "residency": dict(config["policy"]["residency"]) | {"table": STATES[state]["table"]},
        }


SCALES: Mapping[str, Scale] = {
    "1.5B": Scale(QWEN2_1_5B, num_rows=16, row_tokens=512),
    "tiny": Scale(QWEN2_1_5B | TINY_SIZES, num_rows=8, row_tokens=16),
}


def seconds_of(function: Callable[[], object]) -> float:
    """Returns the seconds until a call has returned and its stream is idle."""
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() - start


class Trial:
    """Trains and saves with one worker.

    Args:
        worker: built.
        data: what it trains on.
        folder: of the checkpoints; each replaces the one before.
    """

    def __init__(self, worker: MegatronPolicyWorker, data: BatchedData, folder: Path) -> None:
        self.worker, self.data, self.folder = worker, data, folder

    def train(self) -> float:
        """Trains one step and returns its seconds."""
        return seconds_of(lambda: self.worker.train(self.data, NLLLoss(), gbs=self.data.size, mbs=1))

    def prepare(self) -> str:
        """Makes room, waits for state that is being offloaded, and syncs earlier writes to the disk."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        os.sync()
        self.worker.residency.wait_until_released()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return str(self.folder / "policy")

    def save_at_once(self) -> dict[str, TableValue]:
        """Saves one checkpoint synchronously, then trains a step."""
        path = self.prepare()
        exposed = seconds_of(lambda: self.worker.save_checkpoint(path, save_optimizer=True))
        return {"exposed_s": exposed, "step_s": self.train()}

    def save_beside(self) -> dict[str, TableValue]:
        """Saves one checkpoint in the background and trains until it is written."""
        path = self.prepare()
        start = time.perf_counter()
        taken = seconds_of(lambda: self.worker.start_checkpoint(path, save_optimizer=True))
        steps = [self.train()]
        while not self.worker.is_checkpoint_written():
            steps.append(self.train())
        written = time.perf_counter() - start
        finished = seconds_of(self.worker.finish_checkpoint)
        return {
            "exposed_s": taken + finished,
            "start_s": taken,
            "finish_s": finished,
            "written_s": written,
            "step_s": statistics.median(steps),
            "num_steps": len(steps),
        }

    def logprobs(self) -> torch.Tensor:
        """Returns the log-probs of the batch under the current policy."""
        return self.worker.get_logprobs(self.data, mbs=1)["logprobs"]

    def written_gb(self) -> float:
        """Returns the size of the last checkpoint's files."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file()) / 1e9


def measure(scale: str, state: str, repeats: int, folder: Path) -> list[dict[str, TableValue]]:
    """Measures the first background save, and the medians of each way.

    Args:
        scale: a key of `SCALES`.
        state: a key of `STATES`.
        repeats: saves of each way that are counted, at least one.
        folder: of the checkpoints; nothing of it is left.
    """
    of_scale = SCALES[scale]
    worker = one_rank_worker(of_scale.policy(state))
    exempt_from_gc()  # as a run's rank is
    data = random_rows(of_scale.num_rows, of_scale.row_tokens, of_scale.hf_config["vocab_size"])
    trial = Trial(worker, data, folder)
    alone = statistics.median([trial.train() for _ in range(4)][2:])
    arena = worker.offloader.context.arena
    before = arena.allocated_bytes
    first = trial.save_beside()
    snapshot_gb = (arena.allocated_bytes - before) / 1e9
    print(f"{state}, first save beside training: {first}", flush=True)
    at_once, beside, want = [], [], None
    for _ in range(repeats):
        at_once.append(trial.save_at_once())
        print(f"{state}, at once: {at_once[-1]}", flush=True)
        want = trial.logprobs()
        beside.append(trial.save_beside())
        print(f"{state}, beside: {beside[-1]}", flush=True)
    gb = trial.written_gb()
    worker.load_checkpoint(str(folder / "policy"))
    is_exact = want is not None and torch.equal(trial.logprobs(), want)
    link = worker.offloader.meter.link
    bound = None if link is None else snapshot_gb * 1e9 / link.d2h_bytes_per_s
    worker.shutdown()
    shutil.rmtree(folder)
    case: dict[str, TableValue] = {"scale": scale, "state": state, "gb": gb, "step_alone_s": alone}
    rows = [
        case | {"way": "beside", "turn": 0} | beside_bound(first, snapshot_gb, bound),
        case | {"way": "at once"} | medians(at_once),
        case | {"way": "beside"} | beside_bound(medians(beside), snapshot_gb, bound) | {"is_exact": is_exact},
    ]
    return [{name: round(v, 4) if isinstance(v, float) else v for name, v in row.items()} for row in rows]


def beside_bound(figures: Mapping[str, Any], snapshot_gb: float, bound_s: float | None) -> dict[str, TableValue]:
    """Adds the snapshot's size and time on the link to the figures of background saves."""
    ratio = None if bound_s is None else figures["exposed_s"] / bound_s
    return {**figures, "snapshot_gb": snapshot_gb, "bound_s": bound_s, "ratio_to_bound": ratio}


def medians(turns: Sequence[Mapping[str, Any]]) -> dict[str, TableValue]:
    """Returns the medians of one way's figures."""
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def main() -> None:
    """Measures, prints the table, writes the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", choices=SCALES, default="1.5B")
    parser.add_argument("--state", choices=STATES, action="append", help="measure this one alone; may be repeated")
    parser.add_argument("--repeats", type=int, default=1, help="saves of each way that are counted, at least 1")
    parser.add_argument("--folder", type=Path, default=Path("build/async_save"), help="on the disk that is measured")
    parser.add_argument("--out", type=Path, default=Path("build/async_save.json"))
    arguments = parser.parse_args()
    rows = []
    for state in arguments.state or STATES:
        rows += measure(arguments.scale, state, arguments.repeats, arguments.folder)
        gc.unfreeze()
        gc.collect()  # models are cycles
        write_result(arguments.out, rows)
        print_rows(rows)


if __name__ == "__main__":
    main()
