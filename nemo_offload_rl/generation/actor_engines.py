"""The driver's handle on generation engines in Ray actors: one actor for each engine, or for each of its GPUs."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from nemo_offload_rl.generation.interface import (
    Capabilities,
    GenerationError,
    GenerationOutput,
    GenerationRequest,
    InFlightUpdates,
)
from nemo_offload_rl.metrics.memory import largest_of
from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.refit.checksum import require_equal_checksums
from nemo_offload_rl.refit.interface import Receiver
from nemo_offload_rl.refit.plan import ExportPlan

_SAMPLING = "sampling"
_COLOUR_CODE = re.compile(r"\x1b\[\d+m")


def remote_class(actor: type, in_flight: InFlightUpdates | None) -> Any:
    """Returns Ray's class of an engine's actor; with weights in flight, `generate` has a thread of its own."""
    return ray.remote(actor) if in_flight is None else ray.remote(concurrency_groups={_SAMPLING: 1})(actor)


@dataclass(frozen=True)
class EngineActor:
    """Describes one process of an engine, and its bundles.

    Attributes:
        actor: Ray's handle of a `WeightLoader` with `process()`, and with `call(verb, *arguments)` for other methods.
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
        self._process_refs = [one.actor.process.remote() for one in actors]
        self._build_refs = list(build_refs)
        self._finishing: list[Any] = []
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
        parts = [
            GenerationRequest(
                request.prompt_ids[start:stop], request.sample_ids[start:stop], request.step, request.sampling
            )
            for start, stop in itertools.pairwise(bounds)
        ]
        calls = [one.actor.call for one in self._actors]
        if self._is_in_flight:
            calls = [call.options(concurrency_group=_SAMPLING) for call in calls]
        refs = [call.remote("generate", parts[one.replica]) for call, one in zip(calls, self._actors, strict=True)]
        answers = self._collect("generate", refs)
        of_replica: dict[int, GenerationOutput] = {}
        for one, answer in zip(self._actors, answers, strict=True):
            of_replica.setdefault(one.replica, answer)  # all actors of a replica return the same answer
        outputs = list(of_replica.values())
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
        return self._finishing

    def finish_generation(self) -> None:
        """Frees the engines' GPU memory, and waits until the CUDA driver has it back."""
        if self._gives_memory_back:
            refs, self._finishing = self._finishing or self._start("finish_generation"), []
            self._collect("finish_generation", refs)

    def prepare_refit_info(self, plan: ExportPlan) -> None:
        """Checks that the tensors of a refit match the model's (see `GenerationInterface`)."""
        self._run("prepare_refit_info", plan)

    def weights_checksum(self) -> dict[str, int]:
        """Returns checksums of the weights that a refit brings.

        Raises:
            RuntimeError: If the engines' weights differ.
        """
        first, *others = self._run("weights_checksum")
        for other in others:
            require_equal_checksums(first, other)
        return first

    def memory_stats(self) -> dict[str, float]:
        """Returns memory in GiB: for each quantity, the largest value of any process."""
        return largest_of(self._run("memory_stats"))

    def wait_until_ready(self) -> None:
        """Waits until every engine is built."""
        self._collect("its construction", self._build_refs)

    def shutdown(self) -> None:
        """Ends the engines' actors."""
        actors, self._actors = [one.actor for one in self._actors], []
        self._cluster.stop(actors, self._process_refs)

    def _run(self, verb: str, *arguments: Any) -> list[Any]:
        return self._collect(verb, self._start(verb, *arguments))

    def _start(self, verb: str, *arguments: Any) -> list[Any]:
        return [one.actor.call.remote(verb, *arguments) for one in self._actors]

    def _collect(self, verb: str, refs: Sequence[Any]) -> list[Any]:
        """Waits for the actors' results and returns them.

        Raises:
            GenerationError: If an actor failed while it was built or called.
        """
        for some in (self._build_refs, refs):
            actor_of = dict(zip(some, self._actors, strict=True))
            pending = list(actor_of)
            while pending:
                done, pending = self._cluster.wait(pending, None)
                for ref in done:
                    try:
                        ray.get(ref)
                    except RayError as error:
                        raise self._error(verb, actor_of[ref], error) from None
                for ref in pending:
                    if (loss := self._cluster.loss_of(actor_of[ref].ranks[0])) is not None:
                        raise self._error(verb, actor_of[ref], loss)
        return ray.get(list(refs))

    def _error(self, verb: str, actor: EngineActor, error: RayError) -> GenerationError:
        """Makes the error for a failed actor; if its process is gone, perhaps with its node, that is the cause."""
        rank = actor.ranks[0]
        cause = error.cause if isinstance(error, RayTaskError) else self._cluster.loss_of(rank, ask=True) or error
        node = self._cluster.node_name(rank)
        place = None if node is None else (None if self._cluster.engines_are_apart else rank, node)
        return GenerationError(verb, cause, _COLOUR_CODE.sub("", str(error)), place)

    def _name(self, actor: EngineActor) -> str:
        node = self._cluster.node_name(actor.ranks[0])
        where = "" if node is None else f" on node {node}"
        return f"generation engine {actor.engine}{where} (device {actor.ranks[0] % self._cluster.bundles_per_node})"
