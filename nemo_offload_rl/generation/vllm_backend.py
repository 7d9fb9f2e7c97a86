"""Generation with vLLM: an engine a Ray actor, or with tensor parallelism an actor for each of its GPUs."""

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch

from nemo_offload_rl.generation.actor_engines import ActorEngines, EngineActor
from nemo_offload_rl.generation.interface import Capabilities, EngineSpec, WakeUpTag
from nemo_offload_rl.generation.stop_strings import stop_strings_of
from nemo_offload_rl.generation.vllm_arguments import engine_arguments, engine_environment, is_built_beside_policy
from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.placement.signals import ignore_ending_signals
from nemo_offload_rl.refit.interface import WeightBucket, WeightLoader


@contextlib.contextmanager
def cache_named_where_memory_runs_out(arguments: Mapping[str, Any], *, beside_policy: bool) -> Iterator[None]:
    """Have an engine that finds no memory while it is built say which key to lower.

    Args:
        arguments: Of `vllm.LLM`.
        beside_policy: Whether the policy is built at the same time.

    Raises:
        torch.OutOfMemoryError: If memory runs out inside.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        cache = arguments.get("kv_cache_memory_bytes")
        size = "" if cache is None else f" with a KV cache of {cache / 2**30:.2f} GiB"
        behind = "set policy.generation.vllm_cfg.build_beside_policy to false, or " if beside_policy else ""
        raise torch.OutOfMemoryError(
            f"vLLM finds too little GPU memory on {socket.gethostname()}{size} ({str(error).partition('. ')[0]}); "
            f"{behind}lower policy.generation.vllm_cfg.gpu_memory_utilization, "
            "policy.generation.vllm_kwargs.max_num_seqs or "
            "policy.generation.vllm_kwargs.kv_cache_memory_bytes (bytes of each GPU; it goes before the first)."
        ) from error


class VllmActor(WeightLoader):
    """Runs a `VllmGenerator` in a process of its own, on one GPU.

    With tensor parallelism the actors of an engine meet as torchrun's processes do, and each runs the same requests:
    vLLM's scheduling is deterministic, and each samples the same tokens.
    """

    def __init__(self) -> None:
        ignore_ending_signals()

    def process(self) -> tuple[str, int]:
        """This node's address and the process id there."""
        return ray.util.get_node_ip_address(), os.getpid()

    def rendezvous(self) -> tuple[str, int]:
        """An address of this node, and a port that is free now, where the actors of this engine meet."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            return "127.0.0.1", int(listener.getsockname()[1])

    def build(self, policy: Mapping[str, Any], *, rank: int, rendezvous: tuple[str, int], sleeps: bool) -> None:
        """Build the engine, whose weights come by refit, and put it to sleep if it ever is.

        Args:
            policy: The recipe's `policy`.
            rank: Of this process in its engine.
            rendezvous: Where the engine's processes meet.
            sleeps: Whether it leaves the GPU to the policy between generations.

        Raises:
            ValueError: If vLLM is not installed here, or refuses what the recipe asks for.
        """
        address, port = rendezvous
        size = policy["generation"]["vllm_cfg"]["tensor_parallel_size"]
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        try:
            from vllm import LLM
        except ImportError as error:
            raise ValueError(
                f"policy.generation.backend is vllm, which cannot be imported on {socket.gethostname()} ({error}); run "
                'make setup EXTRAS="te vllm" there, or set policy.generation.backend to transformers.'
            ) from error
        from nemo_offload_rl.data.tokenizer import load_tokenizer, save_tokenizer
        from nemo_offload_rl.generation.vllm_generator import VllmGenerator
        from nemo_offload_rl.hf_config import hf_config

        self._folder = tempfile.TemporaryDirectory()  # vLLM reads a model's config from a folder, also later
        hf_config(policy).save_pretrained(self._folder.name)
        if stop_strings_of(policy):
            save_tokenizer(load_tokenizer(policy["tokenizer"]["name"]), Path(self._folder.name))
        arguments = engine_arguments(policy, Path(self._folder.name), sleeps=sleeps)
        with cache_named_where_memory_runs_out(arguments, beside_policy=is_built_beside_policy(policy)):
            llm = LLM(**arguments)
        self._generator = VllmGenerator(
            llm,
            precision=policy["precision"],
            max_sequence_length=policy["max_total_sequence_length"],
            sleeps=sleeps,
            keeps_weights=_keeps_weights(policy),
        )
        if not is_built_beside_policy(policy):  # else a policy that takes memory meanwhile would fail vLLM's assertion
            self._generator.finish_generation()

    def load_weights(self, bucket: WeightBucket) -> float:
        """Load a bucket of any transport (see `WeightLoader`)."""
        start = time.perf_counter()
        with bucket.opened() as named_tensors:
            self._generator.load_weights(named_tensors)
        return time.perf_counter() - start

    def call(self, verb: str, *arguments: Any) -> Any:
        """Run a method of the generator."""
        return getattr(self._generator, verb)(*arguments)


class VllmGeneration(ActorEngines):
    """Generates with vLLM engines that are Ray actors (see `GenerationInterface`)."""

    capabilities = Capabilities(
        refit_transport="cuda_ipc", keeps_weights=False, batch_independent_sampling=True, built_alone=True
    )

    def __init__(
        self, cluster: Cluster, bundles_by_engine: Sequence[tuple[int, ...]], policy: Mapping[str, Any]
    ) -> None:
        """Start to build every engine and return at once; `wait_until_ready`, or the first verb, waits for them.

        Args:
            cluster: Where actors run; it has GPUs.
            bundles_by_engine: The bundles (GPUs) of each engine.
            policy: The recipe's `policy`.
        """
        self.capabilities = replace(
            self.capabilities, keeps_weights=_keeps_weights(policy), built_alone=not is_built_beside_policy(policy)
        )
        environment = engine_environment(policy, num_threads=cluster.threads_per_engine_bundle)
        actor_class = ray.remote(VllmActor)
        actors = [
            EngineActor(
                actor_class.options(
                    **cluster.actor_options(bundle, cluster.engine_share), runtime_env={"env_vars": environment}
                ).remote(),
                engine,
                (bundle,),
            )
            for engine, bundles in enumerate(bundles_by_engine)
            for bundle in bundles
        ]
        first = [bundles[0] for bundles in bundles_by_engine]
        meetings = [one.actor.rendezvous.remote() for one in actors if one.ranks[0] in first]
        build_refs = [
            one.actor.build.remote(
                policy,
                rank=one.ranks[0] - first[one.engine],
                rendezvous=meetings[one.engine],
                sleeps=not cluster.engines_are_apart and not _stays_awake(policy),
            )
            for one in actors
        ]
        super().__init__(cluster, actors, build_refs, stays_awake=_stays_awake(policy))

    def prepare_for_generation(self, tags: Sequence[WakeUpTag]) -> bool:
        """Map the memory of weights or of the KV cache; returns whether every GPU has room for all that comes."""
        return all(self._run("prepare_for_generation", tags))


def _bundles_per_engine(policy_config: Mapping[str, Any], cluster: Cluster) -> int:
    if not cluster.has_gpus:
        raise ValueError(
            "policy.generation.backend is vllm, which needs GPUs, and the ranks have none; set it to transformers."
        )
    return int(policy_config["generation"]["vllm_cfg"]["tensor_parallel_size"])


def _stays_awake(policy: Mapping[str, Any]) -> bool:
    return bool(policy["residency"]["generation_weights"] == "gpu")


def _keeps_weights(policy: Mapping[str, Any]) -> bool:
    return policy["residency"]["generation_weights"] in ("host", "gpu")


def _start(
    policy_config: Mapping[str, Any], cluster: Cluster, bundles_by_engine: Sequence[tuple[int, ...]]
) -> VllmGeneration:
    return VllmGeneration(cluster, bundles_by_engine, policy_config)


ENGINE = EngineSpec(_bundles_per_engine, _start)
