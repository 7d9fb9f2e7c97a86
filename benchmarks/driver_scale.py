"""How many seconds of a step does the driver take for its calls to 8 to 512 GPUs, apart from the GPUs' work?

    python benchmarks/driver_scale.py --output docs/results/driver_scale.json

The driver's own code shards a batch, calls ranks and engines and reduces their results, as in a step of GRPO with
sleeping engines on the policy's GPUs, which makes more calls than one with engines that stay awake. Nodes have 8 GPUs.
A few relays, in processes of their own as in a run, stand for all of them; one actor stands for all ranks and processes
of engines: it receives every call and its shard, and answers at once with a result of the usual size. On a machine of
few cores answers trickle in, so that the driver looks more often: a row is an upper bound.

Columns: `gpus`; `dp` and `replicas`: parts of a batch for the policy and for engines; `step_s`: CPU seconds of all
threads of the driver, of all verbs and of what Ray frees afterwards; `policy_s`, `engines_s`: of the verbs of each;
`largest_verb`, with its `verb_s`; `calls`: of the driver to Ray; `relays`: of the policy, and as many of engines;
`relay_s`: CPU seconds of two such in a step, which are not the driver's. Medians of the steps after the first.
"""

import argparse
import pickle
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
from nemo_offload_rl.generation.actor_engines import EngineActor
from nemo_offload_rl.generation.interface import GenerationOutput, GenerationRequest, SamplingParams
from nemo_offload_rl.generation.vllm_backend import VllmGeneration
from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.placement.relay import Part, Relay, Relays, groups_of
from nemo_offload_rl.worker.actor import verb_of
from nemo_offload_rl.worker.group import PolicyWorkerGroup, _Layout
from nemo_offload_rl.worker.wire import WireBatch

GPUS_PER_NODE = 8
NUM_RELAYS = 2
NUM_METRICS = 120
SAMPLES, LENGTH = 2048, 512
ANSWER, GENERATIONS = 384, 32  # tokens of an answer, whose prompt fills the rest of LENGTH; answers to each prompt
FIRST_TOKEN = 100_000
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


class Engines:
    """Answers for all processes of engines."""

    def process(self) -> tuple[str, int]:
        """Returns no process."""
        return "", 0

    def call(self, pickled: bytes, shards: list[bytes] | None, part: Part, *_: Any) -> list[Any]:
        """Returns what a method of a generator would."""
        if not part.wants_result:
            return []
        if shards is None:
            verb, _arguments = pickle.loads(pickled)
            return [{f"gpu_{number}_gib": 1.0 for number in range(8)} if verb == "memory_stats" else False]
        rows = len(pickle.loads(shards[part.shard]).prompt_ids)
        tokens, logprobs = list(range(FIRST_TOKEN, FIRST_TOKEN + ANSWER)), [-1 / (1 + token) for token in range(ANSWER)]
        return [
            GenerationOutput(
                [list(tokens) for _ in range(rows)], [list(logprobs) for _ in range(rows)], ["stop"] * rows
            )
        ]


class FewRelays:
    """Makes relays of any number of GPUs that share a few processes, and call one actor for all GPUs."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._of_size: dict[int, list[Any]] = {}

    def of(self, num_gpus: int) -> Relays:
        """Returns the relays of GPUs."""
        made = Relays.__new__(Relays)
        nodes = [list(range(first, first + GPUS_PER_NODE)) for first in range(0, num_gpus, GPUS_PER_NODE)]
        made._actors_by_bundle = dict.fromkeys(range(num_gpus), self._actor)
        made._groups = groups_of(nodes)
        few = [self._processes(len(group)) for group in made._groups] if len(nodes) > 1 else []
        made.actors = [actors[number % NUM_RELAYS] for number, actors in enumerate(few)]
        return made

    def pids(self) -> list[int]:
        """Returns the ids of the relays' processes."""
        every = [relay for relays in self._of_size.values() for relay in relays]
        return [pid for _, pid in ray.get([relay.process.remote() for relay in every])]

    def _processes(self, size: int) -> list[Any]:
        if size not in self._of_size:
            relay_class = ray.remote(num_cpus=0)(Relay)
            self._of_size[size] = [relay_class.remote([self._actor] * size) for _ in range(NUM_RELAYS)]
        return self._of_size[size]


def group_of(num_ranks: int, model_ranks: int, relays: Relays) -> PolicyWorkerGroup:
    """Returns a group of ranks that are built."""
    group = PolicyWorkerGroup.__new__(PolicyWorkerGroup)
    group._actors = list(relays._actors_by_bundle.values())
    group._relays = relays
    dp_size = num_ranks // model_ranks
    group._layout = _Layout([{"dp_rank": rank // model_ranks, "dp_size": dp_size} for rank in range(num_ranks)])
    group._cluster = _cluster()
    group._failure, group._started = None, {}
    return group


def engines_of(num_gpus: int, tp: int, relays: Relays) -> VllmGeneration:
    """Returns engines that are built, and sleep between generations."""
    engines = VllmGeneration.__new__(VllmGeneration)
    engines._actors = [
        EngineActor(actor, gpu // tp, gpu // tp, (gpu,)) for gpu, actor in relays._actors_by_bundle.items()
    ]
    engines._relays = relays
    engines._cluster = _cluster()
    engines._gives_memory_back, engines._is_in_flight, engines._is_built, engines._finishing = True, False, True, {}
    return engines


def _cluster() -> Cluster:
    cluster = Cluster.__new__(Cluster)
    cluster._watch = None
    return cluster


def verbs_of(
    group: PolicyWorkerGroup, engines: VllmGeneration, batch: BatchedData, request: GenerationRequest
) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Returns the verbs of a step and whose they are, in their order."""
    columns = {name: batch[name] for name in ("input_ids", "input_lengths", "token_mask", "sample_mask")}
    return {
        "offload_before_refit": ("policy", group.offload_before_refit),
        "wake_weights": ("engines", lambda: engines.prepare_for_generation(["weights"])),
        "send_weights": ("policy", group.send_weights),
        "offload_after_refit": ("policy", group.offload_after_refit),
        "wake_kv_cache": ("engines", lambda: engines.prepare_for_generation(["kv_cache"])),
        "generate": ("engines", lambda: engines.generate(request)),
        "start_finish_generation": ("engines", engines.start_finish_generation),
        "start_return": ("policy", lambda: group.start_return(engines.start_finish_generation(), logprobs=True)),
        "finish_generation": ("engines", engines.finish_generation),
        "get_logprobs": ("policy", lambda: group.get_logprobs(BatchedData(columns), mbs=1)),
        "train": ("policy", lambda: group.train(batch, NLLLoss(), gbs=SAMPLES, mbs=1)),
        "engines_memory_stats": ("engines", engines.memory_stats),
        "residency_metrics": ("policy", group.residency_metrics),
        "memory_stats": ("policy", group.memory_stats),
    }


def measure(
    group: PolicyWorkerGroup, engines: VllmGeneration, relays: list[psutil.Process], num_steps: int
) -> dict[str, TableValue]:
    """Returns the row of a group and engines on its GPUs."""
    batch, request, steps, of_relays = _batch(), _request(), [], []
    seconds: dict[str, list[float]] = {}
    of_whom: dict[str, list[float]] = {"policy": [], "engines": []}
    for _ in range(num_steps):
        begin, begin_relays = time.process_time(), _cpu_seconds(relays)
        for values in of_whom.values():
            values.append(0.0)
        for name, (whose, verb) in verbs_of(group, engines, batch, request).items():
            start = time.process_time()
            verb()
            seconds.setdefault(name, []).append(time.process_time() - start)
            of_whom[whose][-1] += seconds[name][-1]
        time.sleep(SETTLE_S)
        steps.append(time.process_time() - begin)
        of_relays.append(_cpu_seconds(relays) - begin_relays)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    largest = max(medians, key=lambda name: medians[name])
    num_relays, num_gpus = len(group._relays.actors), len(group._actors)
    num_verbs = len(medians) - 1  # `finish_generation` waits for what `start_finish_generation` has called
    return {
        "gpus": num_gpus,
        "dp": group._built().dp_size,
        "replicas": engines._actors[-1].replica + 1,
        "step_s": round(statistics.median(steps[1:]), 3),
        **{f"{whose}_s": round(statistics.median(values[1:]), 3) for whose, values in of_whom.items()},
        "largest_verb": largest,
        "verb_s": round(medians[largest], 3),
        "calls": num_verbs * (num_relays or num_gpus),
        "relays": num_relays,
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


def _request() -> GenerationRequest:
    prompts = [list(range(FIRST_TOKEN + n, FIRST_TOKEN + n + LENGTH - ANSWER)) for n in range(SAMPLES // GENERATIONS)]
    return GenerationRequest(
        prompt_ids=[prompts[row // GENERATIONS] for row in range(SAMPLES)],
        sample_ids=[row % GENERATIONS for row in range(SAMPLES)],
        step=1,
        sampling=SamplingParams(ANSWER, 1.0, 1.0, None, (2,), seed=1),
    )


def main() -> None:
    """Measures each number of ranks, and writes the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 256, 512], help="a multiple of 8 each")
    parser.add_argument("--model", type=int, nargs="+", default=[1, 8, 64], help="ranks of a model, a power of 2 each")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2], help="GPUs of an engine, a power of 2 each")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--output", type=Path, default=Path("build/driver_scale.json"), help="the result file")
    arguments = parser.parse_args()
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    ranks, engines = (ray.remote(num_cpus=0)(kind).remote() for kind in (Ranks, Engines))
    of_ranks, of_engines = FewRelays(ranks), FewRelays(engines)
    rows = []
    for gpus in arguments.gpus:
        rank_relays, engine_relays = of_ranks.of(gpus), of_engines.of(gpus)
        processes = [psutil.Process(pid) for pid in [*of_ranks.pids(), *of_engines.pids()]]
        rows += [
            measure(group_of(gpus, model, rank_relays), engines_of(gpus, tp, engine_relays), processes, arguments.steps)
            for model in arguments.model
            if model <= gpus
            for tp in arguments.tp
        ]
    write_result(arguments.output, rows)
    print_rows(rows)


if __name__ == "__main__":
    main()
