"""Generates with vLLM in Ray actors: one actor for each GPU of each engine."""

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch

from nemo_offload_rl.config.megatron import engine_devices, engine_replicas
from nemo_offload_rl.config.schema.policy import GRPOPolicyConfig
from nemo_offload_rl.generation.actor_engines import ActorEngines, EngineActor, GeneratorProcess, engine_class
from nemo_offload_rl.generation.interface import Capabilities, EngineSpec, InFlightUpdates, WakeUpTag
from nemo_offload_rl.generation.stop_strings import needs_tokenizer
from nemo_offload_rl.generation.vllm_arguments import engine_arguments, engine_environment, is_built_beside_policy
from nemo_offload_rl.hub import go_offline
from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.placement.network import LOOPBACK, choose_interface, rendezvous_store, reserve_port

# How long a process of an engine waits for the others, which import vLLM meanwhile, and for one that hangs.
_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Meeting:
    """Says where the processes of an engine meet.

    Attributes:
        address: An address of the first process's node.
        port: The port where the first process will listen.
        on_one_node: Whether all of them are on that node.
    """

    address: str
    port: int
    on_one_node: bool


@contextlib.contextmanager
def explain_kv_cache_oom(arguments: Mapping[str, Any], *, beside_policy: bool) -> Iterator[None]:
    """Adds the key to lower to the error of an engine that runs out of memory while it is built.

    Args:
        arguments: The arguments of `vllm.LLM`.
        beside_policy: Whether the policy is built at the same time.

    Raises:
        torch.OutOfMemoryError: If memory runs out inside this context.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        cache = arguments.get("kv_cache_memory_bytes")
        size = "" if cache is None else f" with a KV cache of {cache / 2**30:.2f} GiB"
        behind = "set policy.generation.vllm_cfg.build_beside_policy to false, or " if beside_policy else ""
        raise torch.OutOfMemoryError(
            f"vLLM has too little GPU memory on {socket.gethostname()}{size} ({str(error).partition('. ')[0]}); "
            f"{behind}lower policy.generation.vllm_cfg.gpu_memory_utilization, "
            "policy.generation.vllm_kwargs.max_num_seqs or policy.generation.vllm_kwargs.kv_cache_memory_bytes "
            "(bytes of each GPU, which override gpu_memory_utilization)."
        ) from error


class VllmActor(GeneratorProcess):
    """Runs a `VllmGenerator` in a process of its own, on one GPU.

    The actors of an engine join one process group, as torchrun's processes do. Those of a replica run the same
    requests: vLLM's scheduling is deterministic, so all of them sample the same tokens.
    """

    def meeting(self, port_range: tuple[int, int] | None, *, on_one_node: bool) -> Meeting:
        """Returns where the other processes of this engine find this one; the port stays reserved.

        Args:
            port_range: See `reserve_port`.
            on_one_node: Whether all of them are on this node, so that its loopback address suffices.
        """
        address = LOOPBACK if on_one_node else ray.util.get_node_ip_address()
        self._reserved = reserve_port(address, port_range)
        return Meeting(address, self._reserved.getsockname()[1], on_one_node)

    def build(
        self,
        policy: GRPOPolicyConfig,
        *,
        rank: int,
        meeting: Meeting | None,
        sleeps: bool,
        in_flight: InFlightUpdates | None,
    ) -> None:
        """Builds the engine, whose weights come by refit, and puts it to sleep unless it never sleeps.

        Args:
            policy: The recipe's `policy`.
            rank: Rank of this process in its engine.
            meeting: Where the engine's processes meet; None if this is the only one.
            sleeps: Whether the engine frees its GPU memory for the policy between generations.
            in_flight: How weights change while it generates; None if they do not.

        Raises:
            ValueError: If vLLM is not installed here, or refuses what the recipe asks for.
        """
        section = policy["generation"]["vllm_cfg"]
        if meeting is not None and not meeting.on_one_node:
            os.environ["VLLM_HOST_IP"] = ray.util.get_node_ip_address()
        self._write_model_folder(policy)
        go_offline()
        try:
            from vllm import LLM
        except ImportError as error:
            raise ValueError(
                f"policy.generation.backend is vllm, which cannot be imported on {socket.gethostname()} ({error}); run "
                'make setup EXTRAS="te vllm" there, or set policy.generation.backend to transformers.'
            ) from error
        from nemo_offload_rl.generation.vllm_generator import VllmGenerator

        arguments = engine_arguments(policy, Path(self._folder.name), sleeps=sleeps)
        if meeting is not None:
            self._join(meeting, rank, engine_devices(section))
        with explain_kv_cache_oom(arguments, beside_policy=is_built_beside_policy(policy)):
            llm = LLM(**arguments)
        self._generator = VllmGenerator(
            llm,
            precision=policy["precision"],
            max_sequence_length=policy["max_total_sequence_length"],
            sleeps=sleeps,
            keeps_weights=_keeps_weights(policy),
            shares_experts=engine_replicas(section) > 1,
            in_flight=in_flight,
        )
        if not is_built_beside_policy(policy):  # sleeping would fail vLLM's assertion if the policy allocates meanwhile
            self._generator.finish_generation()

    def _write_model_folder(self, policy: GRPOPolicyConfig) -> None:
        """Writes what vLLM reads, now and later, to a folder: the config and, if it needs one, the tokenizer."""
        from nemo_offload_rl.data.tokenizer import load_tokenizer, save_tokenizer
        from nemo_offload_rl.hf_config import hf_config, trusts_remote_code

        self._folder = tempfile.TemporaryDirectory()
        hf_config(policy).save_pretrained(self._folder.name)
        if needs_tokenizer(policy):
            tokenizer = load_tokenizer(policy["tokenizer"]["name"], trust_remote_code=trusts_remote_code(policy))
            save_tokenizer(tokenizer, Path(self._folder.name))

    def _join(self, meeting: Meeting, rank: int, num_processes: int) -> None:
        """Joins the engine's process group, which vLLM then uses; its own would listen on every interface."""
        choose_interface(meeting.address)
        torch.distributed.init_process_group(
            "nccl",
            store=rendezvous_store(
                meeting.address, meeting.port, rank=rank, world_size=num_processes, timeout=_TIMEOUT
            ),
            rank=rank,
            world_size=num_processes,
            timeout=_TIMEOUT,
        )
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(num_processes)}  # vLLM reads them


class VllmGeneration(ActorEngines):
    """Generates with vLLM engines in Ray actors (see `GenerationInterface`)."""

    capabilities = Capabilities(
        refit_transport="cuda_ipc", keeps_weights=False, batch_independent_sampling=True, built_alone=True
    )

    def __init__(
        self,
        cluster: Cluster,
        bundles_by_engine: Sequence[tuple[int, ...]],
        policy: GRPOPolicyConfig,
        in_flight: InFlightUpdates | None = None,
    ) -> None:
        """Starts to build every engine and returns at once; `wait_until_ready`, or the first call, waits for them.

        Args:
            cluster: Where actors run; it has GPUs.
            bundles_by_engine: The bundles (GPUs) of each engine.
            policy: The recipe's `policy`.
            in_flight: How weights change while engines generate; None if they do not.
        """
        self.capabilities = replace(
            self.capabilities, keeps_weights=_keeps_weights(policy), built_alone=not is_built_beside_policy(policy)
        )
        section = policy["generation"]["vllm_cfg"]
        tp, replicas = section["tensor_parallel_size"], engine_replicas(section)
        sleeps = not cluster.engines_are_apart and not _stays_awake(policy)
        environment = engine_environment(policy, num_threads=cluster.threads_per_engine_bundle)
        actor_class = engine_class(VllmActor, in_flight)
        actors: list[EngineActor] = []
        build_refs: list[Any] = []
        for engine, bundles in enumerate(bundles_by_engine):
            of_engine = [
                actor_class.options(
                    **cluster.actor_options(bundle, cluster.engine_share),
                    runtime_env={"env_vars": environment},
                ).remote()
                for bundle in bundles
            ]
            meeting = None
            if len(bundles) > 1:
                meeting = of_engine[0].meeting.remote(
                    cluster.master_port_range, on_one_node=cluster.are_on_one_node(bundles)
                )
            for rank, actor in enumerate(of_engine):
                actors.append(
                    EngineActor(actor, engine, replica=engine * replicas + rank // tp, ranks=(bundles[rank],))
                )
                build_refs.append(
                    actor.build.remote(policy, rank=rank, meeting=meeting, sleeps=sleeps, in_flight=in_flight)
                )
        super().__init__(cluster, actors, build_refs, stays_awake=_stays_awake(policy), in_flight=in_flight)

    def prepare_for_generation(self, tags: Sequence[WakeUpTag]) -> bool:
        """Allocates the memory of weights or of the KV cache again.

        Returns:
            Whether every GPU has room for everything that generation needs (see `GenerationInterface`).
        """
        if "kv_cache" in tags and not self._gives_memory_back and not self._is_in_flight:
            return False  # it is there, and nothing waits for it
        return all(self._of_all("prepare_for_generation", all, tags))


def _bundles_per_engine(policy_config: GRPOPolicyConfig, cluster: Cluster) -> int:
    if not cluster.has_gpus:
        raise ValueError(
            "policy.generation.backend is vllm, which needs GPUs, and the ranks have none; set it to transformers."
        )
    return engine_devices(policy_config["generation"]["vllm_cfg"])


def _stays_awake(policy: GRPOPolicyConfig) -> bool:
    return bool(policy["residency"]["generation_weights"] == "gpu")


def _keeps_weights(policy: GRPOPolicyConfig) -> bool:
    return policy["residency"]["generation_weights"] in ("host", "gpu")


def _start(
    policy_config: GRPOPolicyConfig,
    cluster: Cluster,
    bundles_by_engine: Sequence[tuple[int, ...]],
    in_flight: InFlightUpdates | None,
) -> VllmGeneration:
    return VllmGeneration(cluster, bundles_by_engine, policy_config, in_flight)


ENGINE = EngineSpec(_bundles_per_engine, _start)
