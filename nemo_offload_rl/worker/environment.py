"""Builds the environment variables of the processes that train."""

import os

from nemo_offload_rl.config.megatron import ALLOCATOR_SETTINGS, exchanges_weights, megatron_field
from nemo_offload_rl.config.schema.megatron import MegatronConfig


def library_environment(megatron_cfg: MegatronConfig, *, refit_follows: bool) -> dict[str, str]:
    """Returns the variables that Transformer Engine, megatron-core, CUDA and NCCL read, on import or later.

    Settings of torch's allocator in this process's environment are handed over, and win over the default here.

    Args:
        megatron_cfg: The recipe's `policy.megatron_cfg`; its `env_vars` win over the defaults here.
        refit_follows: Whether the ranks send weights to generation engines.
    """
    environment = {"NVTE_CPU_OFFLOAD_V1": "1"}
    if megatron_field(megatron_cfg, "use_transformer_engine_op_fuser"):
        # megatron-core needs it to fuse gated experts, even if Transformer Engine then has no kernel for the GPU.
        environment["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] = "1"
    if megatron_cfg["tensor_model_parallel_size"] > 1 or megatron_cfg["sequence_parallel"]:
        # One hardware queue: kernels start in the order of their launch, which overlapping communication relies on.
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if refit_follows and exchanges_weights(megatron_cfg):
        # Exports of weights that ranks exchange are recorded in CUDA graphs. NCCL would register the memory that a
        # captured collective reads, by its address, and map it on the other ranks. But the parameters leave the GPU
        # after each refit and return to other memory at the same addresses: replays would read what was unmapped.
        environment["NCCL_GRAPH_REGISTER"] = "0"
    own = {name: os.environ[name] for name in ALLOCATOR_SETTINGS if name in os.environ}  # also on other nodes
    own |= {name: str(value) for name, value in (megatron_cfg["env_vars"] or {}).items()}
    if megatron_cfg["cuda_graph_impl"] == "none" and own.keys().isdisjoint(ALLOCATOR_SETTINGS):
        # The tokens of experts and of packed rows vary, so that freed blocks rarely fit: torch kept 3.4 times what was
        # allocated, and 1.3 times with segments that grow (docs/results/scale.md). Refits do not send torch's memory.
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return environment | own


def worker_environment(
    megatron_cfg: MegatronConfig, *, rank: int, world_size: int, threads: int, refit_follows: bool
) -> dict[str, str]:
    """Returns the environment variables that one rank's process starts with: torch and others read some on import.

    Args:
        megatron_cfg: The recipe's `policy.megatron_cfg`; its `env_vars` win over the defaults, but not over the ranks.
        rank: This rank.
        world_size: Number of ranks.
        threads: CPU threads of the rank.
        refit_follows: Whether the ranks send weights to generation engines.
    """
    environment = {"OMP_NUM_THREADS": str(threads)} | library_environment(megatron_cfg, refit_follows=refit_follows)
    # Ray makes only its own GPU visible to an actor, so that this is device 0 on every rank.
    return environment | {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
