"""The driver's handle on generation engines in Ray actors: one actor for each engine, or for each of its GPUs."""

import itertools
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError

from nemo_offload_rl.generation.interface import (
    Capabilities,
    GenerationError,
    GenerationOutput,
    GenerationRequest,
    InFlightUpdates,
)
from nemo_offload_rl.metrics.memory import largest_of
from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.placement.gather import cause_of, first_to_name, gather, text_of
from nemo_offload_rl.placement.relay import Part, Relays, concat, each_alone, remote_class
from nemo_offload_rl.placement.signals import ignore_ending_signals
from nemo_offload_rl.refit.checksum import require_equal_checksums
from nemo_offload_rl.refit.interface import Receiver, WeightBucket, WeightLoader
from nemo_offload_rl.refit.plan import ExportPlan

_SAMPLING = "sampling"


class GeneratorProcess(WeightLoader):
    """Runs a generator in a Ray actor's process; a base of engines' actor classes, which build it."""

    _generator: Any

    def __init__(self) -> None:
        ignore_ending_signals()

    def process(self) -> tuple[str, int]:
        """Returns this node's address and the process id there."""
        return ray.util.get_node_ip_address(), os.getpid()

    def load_weights(self, bucket: WeightBucket) -> float:
        """Loads a bucket of any transport (see `WeightLoader`)."""
        start = time.perf_counter()
        with bucket.opened() as named_tensors:
            self._generator.load_weights(named_tensors)
        return time.perf_counter() - start

    def call(self, pickled: bytes, shards: Sequence[bytes] | None, part: Part, *_: Any) -> list[Any]:
        """Runs a method of the generator; see `Relays.call`.

        Args:
            pickled: The method's name and arguments.
            shards: The pickled requests of the relay's replicas, each a further argument of its own processes.
            part: What is for this process.

        Returns:
            The result in a list; an empty one if it is not wanted.
        """
        verb, arguments = cloudpickle.loads(pickled)
        requests = () if shards is None else (pickle.loads(shards[part.shard]),)
        result = self.run(verb, *arguments, *requests)
        return [result] if part.wants_result else []

    def run(self, verb: str, *arguments: Any) -> Any:
        """Runs a method of the generator."""
        return getattr(self._generator, verb)(*arguments)


def engine_class(actor: type[GeneratorProcess], in_flight: InFlightUpdates | None) -> Any:
    """Returns Ray's class of an engine's actor; with weights in flight, `generate` has a thread of its own."""
    return remote_class(actor, None if in_flight is None else _SAMPLING)


@dataclass(frozen=True)
class EngineActor:
    """Describes one process of an engine, and its bundles.

    Attributes:
        actor: Ray's handle of a `GeneratorProcess`.
        engine: The number of its engine.
        replica: The number of its replica of the model among those of all engines, which share out every request.
        ranks: Its bundles (GPUs), by the policy ranks that it shares them with; higher numbers for GPUs of its own.
    """

    actor: Any
    engine: int
    replica: int
    ranks: tuple[int, ...]


class ActorEngines:
    """Calls all engines and divides requests among their replicas; a base of `GenerationInterface`'s implementations.

    Args:
        cluster: Where the actors run.
        actors: The actors of all engines; those of one replica are consecutive, and get the same requests.
        build_refs: References to the result of each actor's build.
        stays_awake: Whether the engines keep all of their memory on GPUs that they share with the policy.
        in_flight: How weights change while engines generate; None if they do not.
    """

    capabilities: Capabilities

    def __init__(
        self,
        cluster: Cluster,
        actors: Sequence[EngineActor],
        build_refs: Sequence[Any],
        *,
        stays_awake: bool = False,
        in_flight: InFlightUpdates | None = None,
    ) -> None:
        self._cluster = cluster
        self._is_in_flight = in_flight is not None
        self._gives_memory_back = not cluster.engines_are_apart and not stays_awake
        self._actors = list(actors)
        handles = {one.ranks[0]: one.actor for one in actors}
        self._relays = Relays(handles, cluster, thread=_SAMPLING if in_flight is not None else None)
        self._process_refs = [actor.process.remote() for actor in [*handles.values(), *self._relays.actors]]
        self._building = each_alone(build_refs, handles)
        self._is_built = False
        self._finishing: dict[Any, Sequence[int]] = {}
        if cluster.engines_are_apart:
            self.capabilities = replace(
                self.capabilities, refit_transport="broadcast", keeps_weights=True, built_alone=False
            )

    @property
    def receivers(self) -> Sequence[Receiver]:
        """Returns the engines' processes; none after `shutdown`."""
        return tuple(Receiver(one.actor, one.ranks, self._name(one)) for one in self._actors)

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Continues every prompt; consecutive rows, such as those of one prompt, mostly go to the same replica."""
        num_rows, num_replicas = len(request.prompt_ids), self._actors[-1].replica + 1
        bounds = [num_rows * replica // num_replicas for replica in range(num_replicas + 1)]
        requests = [
            GenerationRequest(
                request.prompt_ids[start:stop], request.sample_ids[start:stop], request.step, request.sampling
            )
            for start, stop in itertools.pairwise(bounds)
        ]
        first_of: dict[int, int] = {}  # all actors of a replica have the same answer
        for one in self._actors:
            first_of.setdefault(one.replica, one.ranks[0])
        calls = self._start(
            "generate",
            shards=[pickle.dumps(one) for one in requests],
            shard_of={one.ranks[0]: one.replica for one in self._actors},
            wanted=set(first_of.values()),
            thread=_SAMPLING if self._is_in_flight else None,
        )
        outputs: list[GenerationOutput] = concat(self._collect("generate", calls))
        return GenerationOutput(
            output_ids=[row for output in outputs for row in output.output_ids],
            logprobs=[row for output in outputs for row in output.logprobs],
            finish_reasons=[row for output in outputs for row in output.finish_reasons],
            num_updates=[row for output in outputs for row in output.num_updates or ()] if self._is_in_flight else None,
            held_s=max(output.held_s for output in outputs),
        )

    def start_finish_generation(self) -> Sequence[Any]:
        """Starts to free the engines' GPU memory, unless they keep it, as on GPUs of their own."""
        if not self._finishing and self._gives_memory_back:
            self._finishing = self._start("finish_generation")
        return tuple(self._finishing)

    def finish_generation(self) -> None:
        """Frees the engines' GPU memory, and waits until the CUDA driver has it back."""
        if self._gives_memory_back:
            calls, self._finishing = self._finishing or self._start("finish_generation"), {}
            self._collect("finish_generation", calls)

    def prepare_refit_info(self, plan: ExportPlan) -> None:
        """Checks that the tensors of a refit match the model's (see `GenerationInterface`)."""
        self._run("prepare_refit_info", plan)

    def weights_checksum(self) -> dict[str, int]:
        """Returns checksums of the weights that a refit brings.

        Raises:
            RuntimeError: If the engines' weights differ.
        """
        first, *others = self._of_all("weights_checksum", None)
        for other in others:
            require_equal_checksums(first, other)
        return first

    def memory_stats(self) -> dict[str, float]:
        """Returns memory in GiB: for each quantity, the largest value of any process."""
        return largest_of(self._of_all("memory_stats", largest_of))

    def wait_until_ready(self) -> None:
        """Waits until every engine is built."""
        if not self._is_built:
            self._collect("its construction", self._building)
            self._is_built = True

    def shutdown(self) -> None:
        """Ends the engines' actors."""
        if self._actors:
            actors, self._actors = [one.actor for one in self._actors], []
            self._cluster.stop([*actors, *self._relays.actors], self._process_refs)

    def _run(self, verb: str, *arguments: Any) -> None:
        self._collect(verb, self._start(verb, *arguments))

    def _of_all(self, verb: str, combine: Callable[[list[Any]], Any] | None, *arguments: Any) -> list[Any]:
        """Returns the results of all actors, or what `combine` makes of those of a relay."""
        wanted = [one.ranks[0] for one in self._actors]
        return concat(self._collect(verb, self._start(verb, *arguments, wanted=wanted, combine=combine)))

    def _start(self, verb: str, *arguments: Any, **options: Any) -> dict[Any, Sequence[int]]:
        """Calls a method of all generators; `options` are those of `Relays.call`."""
        self.wait_until_ready()  # a relay's call could overtake the build, which the driver has called itself
        return self._relays.call((verb, arguments), **options)

    def _collect(self, verb: str, calls: Mapping[Any, Sequence[int]]) -> list[Any]:
        """Waits for the results of calls and returns them.

        Raises:
            GenerationError: If an actor failed.
        """
        results, failures = gather(calls, self._cluster)
        if failures:
            raise self._error(verb, failures)
        return results

    def _error(self, verb: str, failures: Mapping[int, RayError]) -> GenerationError:
        """Makes the error for the actor to name; if its process is gone, perhaps with its node, that is the cause."""
        bundle = first_to_name(failures)
        error, node = failures[bundle], self._cluster.node_name(bundle)
        place = None if node is None else (None if self._cluster.engines_are_apart else bundle, node)
        return GenerationError(verb, cause_of(error), text_of(error), place)

    def _name(self, actor: EngineActor) -> str:
        node = self._cluster.node_name(actor.ranks[0])
        where = "" if node is None else f" on node {node}"
        return f"generation engine {actor.engine}{where} (device {actor.ranks[0] % self._cluster.bundles_per_node})"
