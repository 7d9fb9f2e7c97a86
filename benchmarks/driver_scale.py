"""How many seconds of a step does the driver take for its calls to 8 to 512 ranks, apart from the ranks' work?

    python benchmarks/driver_scale.py --output docs/results/driver_scale.json

The driver's own code shards a batch, calls the ranks and reduces their results, as in a step of GRPO with an engine on
the same GPUs. A few Ray actors stand for all ranks: they receive every call of every rank and its shard, and answer at
once with a result of the usual size. On a machine of few cores their own work counts, too, so that a row is an upper
bound.

Columns: `ranks`, with `dp` data-parallel ones; `step_s`: of all verbs together; `largest_verb`, with its `verb_s`;
`calls`: to Ray. Medians of the steps after the first.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from result_file import TableValue, print_rows, write_result

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.worker.group import PolicyWorkerGroup, _Layout
from nemo_offload_rl.worker.wire import WireBatch

RANKS_OF_MODEL = 8
NUM_METRICS = 120
SAMPLES, LENGTH = 2048, 512


@ray.remote(num_cpus=0)
class Ranks:
    """Answers for several ranks."""

    def call(self, pickled: bytes, shard: WireBatch | None, *, wants_result: bool) -> Any:
        """Returns what a rank's verb would."""
        if not wants_result:
            return None
        if shard is None:
            return {f"residency/metric_{number}": 1.0 for number in range(NUM_METRICS)}
        rows = shard.unpack()["input_ids"].shape[0]
        return WireBatch.pack(BatchedData(logprobs=torch.zeros(rows, LENGTH)))

    def call_after(self, call: Any, *after: Any) -> None:
        """Stands for moves that begin after others."""

    def take_log(self) -> list[Any]:
        """Returns no records."""
        return []


def group_of(num_ranks: int, actors: list[Any]) -> PolicyWorkerGroup:
    """Returns a group of ranks that are built, for which a few actors answer."""
    group = PolicyWorkerGroup.__new__(PolicyWorkerGroup)
    group._actors = [actors[rank % len(actors)] for rank in range(num_ranks)]
    dp_size = num_ranks // RANKS_OF_MODEL
    group._layout = _Layout([{"dp_rank": rank // RANKS_OF_MODEL, "dp_size": dp_size} for rank in range(num_ranks)])
    group._cluster = Cluster.__new__(Cluster)
    group._cluster._watch = None
    group._failure, group._started = None, []
    return group


def verbs_of(group: PolicyWorkerGroup, batch: BatchedData) -> dict[str, Callable[[], Any]]:
    """Returns the calls of a step, in their order."""
    columns = {name: batch[name] for name in ("input_ids", "input_lengths", "token_mask", "sample_mask")}
    return {
        "offload_before_refit": group.offload_before_refit,
        "send_weights": lambda: group._run(lambda worker, _: worker.send_weights(), from_all_ranks=True),
        "offload_after_refit": group.offload_after_refit,
        "start_return": lambda: group.start_return([], logprobs=True),
        "get_logprobs": lambda: group.get_logprobs(BatchedData(columns), mbs=1),
        "train": lambda: group.train(batch, NLLLoss(), gbs=SAMPLES, mbs=1),
        "residency_metrics": group.residency_metrics,
        "memory_stats": group.memory_stats,
    }


def measure(num_ranks: int, actors: list[Any], num_steps: int) -> dict[str, TableValue]:
    """Returns the row of a number of ranks."""
    group, batch = group_of(num_ranks, actors), _batch()
    seconds: dict[str, list[float]] = {}
    for _ in range(num_steps):
        for name, verb in verbs_of(group, batch).items():
            start = time.process_time()
            verb()
            seconds.setdefault(name, []).append(time.process_time() - start)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    largest = max(medians, key=lambda name: medians[name])
    return {
        "ranks": num_ranks,
        "dp": num_ranks // RANKS_OF_MODEL,
        "step_s": round(sum(medians.values()), 3),
        "largest_verb": largest,
        "verb_s": round(medians[largest], 3),
        "calls": (len(medians) + 1) * num_ranks,  # the ranks' logs are fetched with residency_metrics
    }


def _batch() -> BatchedData:
    ones = torch.ones(SAMPLES, LENGTH)
    floats = {name: ones.clone() for name in ("token_mask", "advantages", "generation_logprobs", "prev_logprobs")}
    return BatchedData(
        input_ids=ones.long(),
        input_lengths=torch.full((SAMPLES,), LENGTH),
        sample_mask=torch.ones(SAMPLES),
        **floats,
    )


def main() -> None:
    """Measures each number of ranks, and writes the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 512], help="a multiple of 8 each")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", type=Path, default=Path("build/driver_scale.json"), help="the result file")
    arguments = parser.parse_args()
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    actors = [Ranks.remote() for _ in range(2)]  # type: ignore[attr-defined]
    rows = [measure(num_ranks, actors, arguments.steps) for num_ranks in arguments.ranks]
    write_result(arguments.output, rows)
    print_rows(rows)


if __name__ == "__main__":
    main()
