"""Generation with Hugging Face models in Ray actors: one replica a GPU, or one that has all cores of a machine."""

import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from nemo_offload_rl.generation.interface import (
    Capabilities,
    EngineSpec,
    GenerationError,
    GenerationOutput,
    GenerationRequest,
    WakeUpTag,
)
from nemo_offload_rl.placement.cluster import ENGINE_SHARE, Cluster
from nemo_offload_rl.placement.signals import ignore_ending_signals
from nemo_offload_rl.refit.checksum import require_equal_checksums
from nemo_offload_rl.refit.interface import Receiver, WeightBucket, WeightLoader
from nemo_offload_rl.refit.plan import ExportPlan

_COLOUR_CODE = re.compile(r"\x1b\[\d+m")


class GeneratorActor(WeightLoader):
    """A `TransformersGenerator` in its own process."""

    def __init__(self, num_threads: int) -> None:
        ignore_ending_signals()
        self._num_threads = num_threads

    def process(self) -> tuple[str, int]:
        """This node's address and the process id there."""
        return ray.util.get_node_ip_address(), os.getpid()

    def build(
        self, model: Mapping[str, Any], *, device: str, generation_batch_size: int, max_sequence_length: int
    ) -> None:
        """Build the model, whose weights come by refit (`build_model`'s arguments, then `TransformersGenerator`'s)."""
        import torch  # here, not above: the driver needs none of these

        from nemo_offload_rl.generation.hf_model import build_model
        from nemo_offload_rl.generation.transformers_generator import TransformersGenerator

        torch.set_num_threads(self._num_threads)
        self._generator = TransformersGenerator(
            build_model(**model),
            device=device,
            generation_batch_size=generation_batch_size,
            max_sequence_length=max_sequence_length,
            has_weights=False,
        )

    def load_weights(self, bucket: WeightBucket) -> None:
        """Load a bucket of any transport (see `WeightLoader`)."""
        self._generator.load_weights(bucket.named_tensors())

    def call(self, verb: str, *arguments: Any) -> Any:
        """Run a method of the generator."""
        return getattr(self._generator, verb)(*arguments)


class TransformersGeneration:
    """The driver's handle on the replicas, which share out every request (see `GenerationInterface`)."""

    capabilities = Capabilities(refit_transport="object_store", keeps_weights=True, batch_independent_sampling=True)

    def __init__(
        self,
        cluster: Cluster,
        ranks_by_engine: Sequence[tuple[int, ...]],
        *,
        model_name: str,
        hf_config: Mapping[str, Any] | None,
        hf_config_overrides: Mapping[str, Any] | None,
        precision: str,
        generation_batch_size: int,
        max_sequence_length: int,
    ) -> None:
        """Start to build every replica and return at once; `wait_until_ready`, or the first verb, waits for them.

        Args:
            cluster: Where actors run.
            ranks_by_engine: The policy ranks whose bundles each replica shares; it runs on the first one's GPU.
            model_name: Folder or hub name of the model's configuration; a label where `hf_config` is given.
            hf_config: A Hugging Face configuration as a mapping, or None.
            hf_config_overrides: Fields of the configuration to set anew, or None.
            precision: "bfloat16" or "float32".
            generation_batch_size: Most rows in one batch of a replica.
            max_sequence_length: Most tokens of a prompt and its continuation together.
        """
        self._cluster = cluster
        self._ranks_by_engine = ranks_by_engine
        has_node = len(ranks_by_engine[0]) == cluster.ranks_per_node
        num_threads = cluster.threads_per_node if has_node else cluster.threads_per_rank
        actor_class = ray.remote(GeneratorActor)
        self._actors = [
            actor_class.options(
                **cluster.actor_options(ranks[0], ENGINE_SHARE),
                runtime_env={"env_vars": {"OMP_NUM_THREADS": str(num_threads)}},
            ).remote(num_threads)
            for ranks in ranks_by_engine
        ]
        self._process_refs = [actor.process.remote() for actor in self._actors]
        model = {
            "model_name": model_name,
            "hf_config": hf_config,
            "hf_config_overrides": hf_config_overrides,
            "precision": precision,
        }
        self._build_refs = [
            actor.build.remote(
                model,
                device="cuda" if cluster.has_gpus else "cpu",
                generation_batch_size=generation_batch_size,
                max_sequence_length=max_sequence_length,
            )
            for actor in self._actors
        ]

    @property
    def receivers(self) -> Sequence[Receiver]:
        """The replicas; none after `shutdown`."""
        return tuple(map(Receiver, self._actors, self._ranks_by_engine))

    def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Continue every prompt; consecutive rows, such as those of one prompt, mostly go to the same replica."""
        num_rows, num_replicas = len(request.prompt_ids), len(self._actors)
        bounds = [num_rows * replica // num_replicas for replica in range(num_replicas + 1)]
        parts = [
            GenerationRequest(
                request.prompt_ids[start:stop], request.sample_ids[start:stop], request.step, request.sampling
            )
            for start, stop in itertools.pairwise(bounds)
        ]
        outputs = self._collect(
            "generate", [actor.call.remote("generate", part) for actor, part in zip(self._actors, parts, strict=True)]
        )
        return GenerationOutput(
            output_ids=[row for output in outputs for row in output.output_ids],
            logprobs=[row for output in outputs for row in output.logprobs],
            finish_reasons=[row for output in outputs for row in output.finish_reasons],
        )

    def prepare_for_generation(self, tags: Sequence[WakeUpTag]) -> None:
        """Bring the replicas' models onto their GPUs; a KV cache grows there while a batch is generated."""
        if "weights" in tags:
            self._run("prepare_for_generation")

    def finish_generation(self) -> None:
        """Give the GPU memory back."""
        self._run("finish_generation")

    def prepare_refit_info(self, plan: ExportPlan) -> None:
        """Check that the tensors a refit will bring are the model's (see `GenerationInterface`)."""
        self._run("prepare_refit_info", plan)

    def weights_checksum(self) -> dict[str, int]:
        """Checksums of the weights that a refit brings.

        Raises:
            RuntimeError: If the replicas' weights differ.
        """
        first, *others = self._run("weights_checksum")
        for other in others:
            require_equal_checksums(first, other)
        return first

    def memory_stats(self) -> dict[str, float]:
        """Memory in GiB; of each quantity the largest value of any replica."""
        every_replica = self._run("memory_stats")
        return {name: max(stats[name] for stats in every_replica) for name in every_replica[0]}

    def wait_until_ready(self) -> None:
        """Wait until every replica is built."""
        self._collect("its construction", self._build_refs)

    def shutdown(self) -> None:
        """End the replicas."""
        actors, self._actors = self._actors, []
        self._cluster.stop(actors, self._process_refs)

    def _run(self, verb: str, *arguments: Any) -> list[Any]:
        return self._collect(verb, [actor.call.remote(verb, *arguments) for actor in self._actors])

    def _collect(self, verb: str, refs: Sequence[Any]) -> list[Any]:
        """The replicas' results.

        Raises:
            GenerationError: If one failed to be built or to run.
        """
        try:
            ray.get(self._build_refs)
            return ray.get(list(refs))
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            raise GenerationError(verb, cause, _COLOUR_CODE.sub("", str(error))) from None


def _bundles_per_engine(policy_config: Mapping[str, Any], cluster: Cluster) -> int:
    return 1 if cluster.has_gpus else cluster.ranks_per_node


def _start(
    policy_config: Mapping[str, Any], cluster: Cluster, ranks_by_engine: Sequence[tuple[int, ...]]
) -> TransformersGeneration:
    return TransformersGeneration(
        cluster,
        ranks_by_engine,
        model_name=policy_config["model_name"],
        hf_config=policy_config.get("hf_config"),
        hf_config_overrides=policy_config.get("hf_config_overrides"),
        precision=policy_config["precision"],
        generation_batch_size=policy_config["generation_batch_size"],
        max_sequence_length=policy_config["max_total_sequence_length"],
    )


ENGINE = EngineSpec(_bundles_per_engine, _start)
