"""For how long does training wait for a checkpoint that is written beside it, and for how long for one at once?

One worker trains on the same batch over and over, and saves in turn at once and beside the steps that follow. Exposed
is the time of the calls that training waits for; its bound is that of the checkpoint's bytes over the link, as the
worker has measured it. A step beside the writing stands beside a step alone. At the end the newest checkpoint is
loaded, and the policy compared with what it was.

    python benchmarks/async_save.py --folder /tmp/async_save [--scale tiny] [--out build/async_save.json]
"""

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checkpoint_integrity import policy
from model_shapes import QWEN2_1_5B, TINY_SIZES
from one_rank import one_rank_worker
from result_file import TableValue, print_rows, write_result

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.worker.worker import MegatronPolicyWorker


@dataclass(frozen=True)
class Scale:
    """What is trained on.

    Attributes:
        hf_config: the model's sizes.
        num_rows: of a step, which is one global batch.
        row_tokens: of each row; at most the policy's max_total_sequence_length.
    """

    hf_config: Mapping[str, Any]
    num_rows: int
    row_tokens: int

    def policy(self) -> dict[str, Any]:
        """Returns the policy section of `checkpoint_integrity` with this model."""
        of_recipe = policy(self.hf_config["num_hidden_layers"], self.hf_config["vocab_size"])
        return of_recipe | {"hf_config": dict(self.hf_config)}

    def batch(self) -> BatchedData:
        """Makes rows of random tokens."""
        shape = (self.num_rows, self.row_tokens)
        random = torch.Generator().manual_seed(0)
        return BatchedData(
            input_ids=torch.randint(0, self.hf_config["vocab_size"], shape, generator=random),
            input_lengths=torch.full((self.num_rows,), self.row_tokens),
            token_mask=torch.ones(shape),
            sample_mask=torch.ones(self.num_rows),
        )


SCALES: Mapping[str, Scale] = {
    "1.5B": Scale(QWEN2_1_5B, num_rows=16, row_tokens=512),
    "tiny": Scale(QWEN2_1_5B | TINY_SIZES, num_rows=8, row_tokens=16),
}


def seconds_of(function: Callable[[], object]) -> float:
    """Seconds until a call has returned and the GPU has nothing left to do."""
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


class Trial:
    """A worker that trains and saves.

    Args:
        worker: built.
        data: what it trains on.
        folder: of the checkpoints; each replaces the one before.
    """

    def __init__(self, worker: MegatronPolicyWorker, data: BatchedData, folder: Path) -> None:
        self.worker, self.data, self.folder = worker, data, folder

    def train(self) -> float:
        """Seconds of a step."""
        return seconds_of(lambda: self.worker.train(self.data, NLLLoss(), gbs=self.data.size, mbs=1))

    def prepare(self) -> str:
        """Makes room, and waits until the disk has what was written before."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        os.sync()
        return str(self.folder / "policy")

    def save_at_once(self) -> dict[str, TableValue]:
        """One checkpoint, and the step behind it."""
        path = self.prepare()
        exposed = seconds_of(lambda: self.worker.save_checkpoint(path, save_optimizer=True))
        return {"way": "at once", "exposed_s": exposed, "step_s": self.train()}

    def save_beside(self) -> dict[str, TableValue]:
        """One checkpoint, with as many steps beside it as it takes."""
        path = self.prepare()
        start = time.perf_counter()
        taken = seconds_of(lambda: self.worker.start_checkpoint(path, save_optimizer=True))
        steps = [self.train()]
        while not self.worker.is_checkpoint_written():
            steps.append(self.train())
        written = time.perf_counter() - start
        finished = seconds_of(self.worker.finish_checkpoint)
        return {
            "way": "beside",
            "exposed_s": taken + finished,
            "start_s": taken,
            "finish_s": finished,
            "written_s": written,
            "step_s": statistics.median(steps),
            "num_steps": len(steps),
        }

    def is_exact(self) -> bool:
        """Whether a checkpoint that was written beside a step has the log-probs of before that step."""
        path = self.prepare()
        want = self.worker.get_logprobs(self.data, mbs=self.data.size)["logprobs"]
        self.worker.start_checkpoint(path, save_optimizer=True)
        self.train()
        self.worker.finish_checkpoint()
        self.worker.load_checkpoint(path)
        return torch.equal(self.worker.get_logprobs(self.data, mbs=self.data.size)["logprobs"], want)


def measure(name: str, repeats: int, folder: Path) -> list[dict[str, TableValue]]:
    """The medians of each way, the first turn, in which host memory is page-locked, apart."""
    scale = SCALES[name]
    worker = one_rank_worker(scale.policy())
    trial = Trial(worker, scale.batch(), folder)
    alone = statistics.median([trial.train() for _ in range(5)][2:])
    turns: list[dict[str, TableValue]] = []
    for turn in range(repeats + 1):
        for save in (trial.save_at_once, trial.save_beside):
            turns.append({"turn": turn, **save()})
            print(turns[-1], flush=True)
    gb = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e9
    link = worker.engine.meter.link
    bound = None if link is None else gb * 1e9 / link.d2h_bytes_per_s
    case: dict[str, TableValue] = {"scale": name, "gb": gb, "step_alone_s": alone, "bound_s": bound}
    rows = [case | row for row in [turns[0], turns[1], *(median_of(turns[2:], way) for way in ("at once", "beside"))]]
    for row in rows:
        exposed: Any = row["exposed_s"]
        row["ratio_to_bound"] = None if bound is None else exposed / bound
    rows.append(case | {"way": "beside", "is_exact": trial.is_exact()})
    worker.shutdown()
    shutil.rmtree(folder)
    return [{name: round(v, 4) if isinstance(v, float) else v for name, v in row.items()} for row in rows]


def median_of(turns: list[dict[str, TableValue]], way: str) -> dict[str, TableValue]:
    """The medians of one way's figures."""
    of_way: list[Any] = [turn for turn in turns if turn["way"] == way]
    names = [name for name in of_way[0] if name not in ("way", "turn")]
    return {"way": way} | {name: statistics.median(turn[name] for turn in of_way) for name in names}


def main() -> None:
    """Measures, prints the table, writes the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", choices=SCALES, default="1.5B")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each way beside the first")
    parser.add_argument("--folder", type=Path, default=Path("build/async_save"), help="on the disk that is measured")
    parser.add_argument("--out", type=Path, default=Path("build/async_save.json"))
    arguments = parser.parse_args()
    rows = measure(arguments.scale, arguments.repeats, arguments.folder)
    write_result(arguments.out, rows)
    print_rows(rows)


if __name__ == "__main__":
    main()
