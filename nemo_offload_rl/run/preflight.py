"""Resolves a recipe for the machines that it runs on, and checks that it fits, before anything is built."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from nemo_offload_rl.config.megatron import check_graph_environment
from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.config.schema.policy import PolicyConfig, has_generation
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.placement.gpus import gpu_facts
from nemo_offload_rl.placement.host import HostFacts, host_facts
from nemo_offload_rl.placement.machine import rates_here
from nemo_offload_rl.placement.rates import Rates
from nemo_offload_rl.plan.decisions import Machine, Resolved, check_fits
from nemo_offload_rl.plan.resolve import resolve
from nemo_offload_rl.worker.environment import library_environment

if TYPE_CHECKING:
    from nemo_offload_rl.placement.cluster import Cluster

NodeFacts = tuple[HostFacts, list[int | None], Rates]
"""A node's memory, that of each of its GPUs in bytes, None where that is not known, and their rates."""


def machine_here() -> Machine:
    """Returns this machine, for a run whose Ray starts on it."""
    return _machine([node_facts()], has_gpus=torch.cuda.device_count() > 0)


def machine_of(cluster: Cluster) -> Machine:
    """Returns the machines of a cluster's nodes that have ranks of the policy or engines."""
    return _machine(cluster.on_each_node(node_facts), has_gpus=cluster.has_gpus)


def node_facts() -> NodeFacts:
    """Returns the facts of the node that this process is on."""
    return host_facts(), [gpu.total_bytes for gpu in gpu_facts()], rates_here()


def _machine(nodes: Sequence[NodeFacts], *, has_gpus: bool) -> Machine:
    sizes = [size for _, gpus, _ in nodes for size in gpus]
    known = [size for size in sizes if size is not None]
    is_known = has_gpus and known and len(known) == len(sizes)
    rates = nodes[0][-1]
    return Machine(has_gpus, min(known) if is_known else None, tuple(host for host, *_ in nodes), rates)


def resolve_for(machine: Machine, config: MasterConfig, algorithm: str) -> Resolved:
    """Reads the config of a recipe's model, resolves the recipe for a machine, and checks that it fits.

    Args:
        machine: the machine that it is to run on.
        config: a validated recipe's config; not modified.
        algorithm: a key of `ALGORITHMS`, the section that marks the recipe.

    Raises:
        HostBudgetError: a rank needs more host memory than the recipe's limit, or a host has too little.
        ValueError: the model's config cannot be read; others as in `resolve` and `check_fits`.
    """
    policy = config["policy"]
    fields = hf_config(policy).to_dict()
    resolved = resolve(config, machine, fields, algorithm=algorithm)
    check_fits(resolved, machine)
    return resolved


def check_environment(policy: PolicyConfig) -> None:
    """Checks what this machine must have for a recipe whose Ray starts on it.

    Args:
        policy: the recipe's `policy` section, resolved for this machine.

    Raises:
        ValueError: vLLM is missing, or the environment does not allow CUDA graphs.
    """
    uses_vllm = has_generation(policy) and policy["generation"]["backend"] == "vllm"
    if uses_vllm and importlib.util.find_spec("vllm") is None:
        raise ValueError(
            'policy.generation.backend is vllm, which is not installed; run make setup EXTRAS="te vllm", or set it to '
            "transformers."
        )
    megatron = policy["megatron_cfg"]
    if megatron["cuda_graph_impl"] != "none":
        check_graph_environment(os.environ | library_environment(megatron, refit_follows="generation" in policy))
