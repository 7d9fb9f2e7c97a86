"""How many seconds of a step does the driver take for its calls to 8 to 512 ranks, apart from the ranks' work?

    python benchmarks/driver_scale.py --output docs/results/driver_scale.json

The driver's own code shards a batch, calls the ranks and reduces their results, as in a step of GRPO with an engine on
the same GPUs. A few relays, in processes of their own as in a run, stand for those of all nodes of 8 ranks; one actor
stands for all ranks: it receives every call of every rank and its shard, and answers at once with a result of the usual
size. On a machine of few cores answers trickle in, so that the driver looks more often: a row is an upper bound.

Columns: `ranks`, with `dp` data-parallel ones; `step_s`: CPU seconds of all threads of the driver, of all verbs and of
what Ray frees afterwards; `largest_verb`, with its `verb_s`; `calls`: of the driver to Ray; `relay_s`: CPU seconds of a
node's relay in a step, which is not the driver's. Medians of the steps after the first.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from result_file import TableValue, print_rows, write_result

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.worker.actor import verb_of
from nemo_offload_rl.worker.group import PolicyWorkerGroup, _Layout
from nemo_offload_rl.worker.relay import NodeRelay, Part, Relays
from nemo_offload_rl.worker.wire import WireBatch

RANKS_PER_NODE = 8
NUM_RELAYS = 2
NUM_METRICS = 120
SAMPLES, LENGTH = 2048, 512
SETTLE_S = 0.3  # until Ray's threads have freed what a step has used


class Ranks:
    """Answers for all ranks."""

    def call(self, pickled: bytes, shards: list[WireBatch] | None, part: Part, *_: Any) -> list[Any]:
        """Returns what a rank's verb would."""
        if not part.wants_result:
            return []
        if shards is not None:
            rows = shards[part.shard].unpack()["input_ids"].shape[0]
            return [WireBatch.pack(BatchedData(logprobs=torch.zeros(rows, LENGTH)))]
        metrics = {f"residency/metric_{number}": 1.0 for number in range(NUM_METRICS)}
        name = verb_of(ray.cloudpickle.loads(pickled))
        return [(metrics, []) if name == "residency_metrics" else {} if name == "send_weights" else metrics]


def group_of(num_ranks: int, model_ranks: int, relays: list[Any], rank_actor: Any) -> PolicyWorkerGroup:
    """Returns a group of ranks that are built, for whose nodes a few relays answer."""
    group = PolicyWorkerGroup.__new__(PolicyWorkerGroup)
    group._actors = [rank_actor] * num_ranks
    group._relays = Relays.__new__(Relays)
    nodes = [list(range(first, first + RANKS_PER_NODE)) for first in range(0, num_ranks, RANKS_PER_NODE)]
    group._relays._rank_actors = group._actors
    group._relays._nodes = nodes
    group._relays.actors = [relays[node % len(relays)] for node in range(len(nodes))] if len(nodes) > 1 else []
    dp_size = num_ranks // model_ranks
    group._layout = _Layout([{"dp_rank": rank // model_ranks, "dp_size": dp_size} for rank in range(num_ranks)])
    group._cluster = Cluster.__new__(Cluster)
    group._cluster._watch = None
    group._failure, group._started = None, {}
    return group


def verbs_of(group: PolicyWorkerGroup, batch: BatchedData) -> dict[str, Callable[[], Any]]:
    """Returns the verbs of a step, in their order."""
    columns = {name: batch[name] for name in ("input_ids", "input_lengths", "token_mask", "sample_mask")}
    return {
        "offload_before_refit": group.offload_before_refit,
        "send_weights": group.send_weights,
        "offload_after_refit": group.offload_after_refit,
        "start_return": lambda: group.start_return([], logprobs=True),
        "get_logprobs": lambda: group.get_logprobs(BatchedData(columns), mbs=1),
        "train": lambda: group.train(batch, NLLLoss(), gbs=SAMPLES, mbs=1),
        "residency_metrics": group.residency_metrics,
        "memory_stats": group.memory_stats,
    }


def measure(group: PolicyWorkerGroup, relays: list[psutil.Process], num_steps: int) -> dict[str, TableValue]:
    """Returns the row of a group."""
    batch, steps, of_relays = _batch(), [], []
    seconds: dict[str, list[float]] = {}
    for _ in range(num_steps):
        begin, begin_relays = time.process_time(), _cpu_seconds(relays)
        for name, verb in verbs_of(group, batch).items():
            start = time.process_time()
            verb()
            seconds.setdefault(name, []).append(time.process_time() - start)
        time.sleep(SETTLE_S)
        steps.append(time.process_time() - begin)
        of_relays.append(_cpu_seconds(relays) - begin_relays)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    largest = max(medians, key=lambda name: medians[name])
    num_relays = len(group._relays.actors)
    return {
        "ranks": len(group._actors),
        "dp": group._built().dp_size,
        "step_s": round(statistics.median(steps[1:]), 3),
        "largest_verb": largest,
        "verb_s": round(medians[largest], 3),
        "calls": len(medians) * (num_relays or len(group._actors)),
        "relay_s": round(statistics.median(of_relays[1:]) / num_relays, 3) if num_relays else None,
    }


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


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
    parser.add_argument("--model", type=int, nargs="+", default=[1, 8, 64], help="ranks of a model, a power of 2 each")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", type=Path, default=Path("build/driver_scale.json"), help="the result file")
    arguments = parser.parse_args()
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    rank_actor = ray.remote(num_cpus=0)(Ranks).remote()
    relay_class = ray.remote(num_cpus=0)(NodeRelay)
    relays = [relay_class.remote([rank_actor] * RANKS_PER_NODE) for _ in range(NUM_RELAYS)]
    processes = [psutil.Process(pid) for _, pid in ray.get([relay.process.remote() for relay in relays])]
    rows = [
        measure(group_of(num_ranks, model, relays, rank_actor), processes, arguments.steps)
        for num_ranks in arguments.ranks
        for model in arguments.model
        if model <= num_ranks
    ]
    write_result(arguments.output, rows)
    print_rows(rows)


if __name__ == "__main__":
    main()
