"""Generates with Hugging Face models in Ray actors: one replica for each GPU, or one on all cores of a machine."""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_offload_rl.config.schema.policy import GRPOPolicyConfig, HfConfigFields
from nemo_offload_rl.generation.actor_engines import ActorEngines, EngineActor, GeneratorProcess, engine_class
from nemo_offload_rl.generation.interface import Capabilities, EngineSpec, InFlightUpdates, WakeUpTag
from nemo_offload_rl.generation.stop_strings import needs_tokenizer
from nemo_offload_rl.hf_config import trusts_remote_code
from nemo_offload_rl.placement.cluster import Cluster


class GeneratorActor(GeneratorProcess):
    """Runs a `TransformersGenerator` in a process of its own."""

    def __init__(self, num_threads: int) -> None:
        super().__init__()
        self._num_threads = num_threads

    def build(
        self,
        model: Mapping[str, Any],
        *,
        device: str,
        generation_batch_size: int,
        max_sequence_length: int,
        tokenizer_name: str | None,
        in_flight: InFlightUpdates | None,
    ) -> None:
        """Builds the model, whose weights come by refit (see `build_model` and `TransformersGenerator`)."""
        import torch  # not at the top: the driver imports this module and needs none of these

        from nemo_offload_rl.data.tokenizer import fast_tokenizer, load_tokenizer
        from nemo_offload_rl.generation.hf_model import build_model
        from nemo_offload_rl.generation.transformers_generator import TransformersGenerator

        torch.set_num_threads(self._num_threads)
        self._generator = TransformersGenerator(
            build_model(**model),
            device=device,
            generation_batch_size=generation_batch_size,
            max_sequence_length=max_sequence_length,
            has_weights=False,
            tokenizer=None
            if tokenizer_name is None
            else fast_tokenizer(load_tokenizer(tokenizer_name, trust_remote_code=model["trust_remote_code"])),
            in_flight=in_flight,
        )


class TransformersGeneration(ActorEngines):
    """Generates with replicas of a Hugging Face model, each in its own actor (see `GenerationInterface`)."""

    capabilities = Capabilities(refit_transport="cuda_ipc", keeps_weights=True, batch_independent_sampling=True)

    def __init__(
        self,
        cluster: Cluster,
        bundles_by_engine: Sequence[tuple[int, ...]],
        *,
        model_name: str,
        hf_config: HfConfigFields | None,
        hf_config_overrides: HfConfigFields | None,
        precision: str,
        generation_batch_size: int,
        max_sequence_length: int,
        tokenizer_name: str | None = None,
        trust_remote_code: bool = False,
        stays_awake: bool = False,
        in_flight: InFlightUpdates | None = None,
    ) -> None:
        """Starts to build every replica and returns at once; `wait_until_ready`, or the first call, waits for them.

        Args:
            cluster: Where actors run.
            bundles_by_engine: The bundles of each replica; it runs on the GPU of the first one.
            model_name: Folder or hub name of the model's configuration; a label if `hf_config` is given.
            hf_config: A Hugging Face configuration as a mapping, or None.
            hf_config_overrides: Fields of the configuration to override, or None.
            precision: "bfloat16" or "float32".
            generation_batch_size: Largest number of rows in one batch of a replica.
            max_sequence_length: Largest number of tokens of a prompt and its continuation together.
            tokenizer_name: `policy.tokenizer.name`, for stop strings and bad words; None if the recipe has neither.
            trust_remote_code: `policy.trust_remote_code`.
            stays_awake: Whether the replicas keep their weights on GPUs that they share with the policy.
            in_flight: How weights change while replicas generate; None if they do not.
        """
        has_node = len(bundles_by_engine[0]) == cluster.engine_bundles_per_node
        num_threads = cluster.threads_per_node if has_node else cluster.threads_per_engine_bundle
        actor_class = engine_class(GeneratorActor, in_flight)
        actors = [
            EngineActor(
                actor_class.options(
                    **cluster.actor_options(bundles[0], cluster.engine_share),
                    runtime_env={"env_vars": {"OMP_NUM_THREADS": str(num_threads)}},
                ).remote(num_threads),
                engine=engine,
                replica=engine,
                ranks=bundles,
            )
            for engine, bundles in enumerate(bundles_by_engine)
        ]
        model = {
            "model_name": model_name,
            "hf_config": hf_config,
            "hf_config_overrides": hf_config_overrides,
            "precision": precision,
            "trust_remote_code": trust_remote_code,
        }
        build_refs = [
            one.actor.build.remote(
                model,
                device="cuda" if cluster.has_gpus else "cpu",
                generation_batch_size=generation_batch_size,
                max_sequence_length=max_sequence_length,
                tokenizer_name=tokenizer_name,
                in_flight=in_flight,
            )
            for one in actors
        ]
        super().__init__(cluster, actors, build_refs, stays_awake=stays_awake, in_flight=in_flight)

    def prepare_for_generation(self, tags: Sequence[WakeUpTag]) -> bool:
        """Moves the replicas' models to their GPUs; a KV cache grows there while a batch is generated."""
        if "weights" in tags or self._is_in_flight:
            self._run("prepare_for_generation", tags)
        return False


def _bundles_per_engine(policy_config: GRPOPolicyConfig, cluster: Cluster) -> int:
    return 1 if cluster.has_gpus else cluster.engine_bundles_per_node


def _start(
    policy_config: GRPOPolicyConfig,
    cluster: Cluster,
    bundles_by_engine: Sequence[tuple[int, ...]],
    in_flight: InFlightUpdates | None,
) -> TransformersGeneration:
    return TransformersGeneration(
        cluster,
        bundles_by_engine,
        model_name=policy_config["model_name"],
        hf_config=policy_config["hf_config"],
        hf_config_overrides=policy_config["hf_config_overrides"],
        precision=policy_config["precision"],
        generation_batch_size=policy_config["generation_batch_size"],
        max_sequence_length=policy_config["max_total_sequence_length"],
        tokenizer_name=policy_config["tokenizer"]["name"] if needs_tokenizer(policy_config) else None,
        trust_remote_code=trusts_remote_code(policy_config),
        stays_awake=policy_config["residency"]["generation_weights"] == "gpu",
        in_flight=in_flight,
    )


ENGINE = EngineSpec(_bundles_per_engine, _start)
