"""Divides the devices of a cluster between the policy and generation, as `policy.generation.colocated` says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DeviceSplit:
    """Counts the devices (GPUs, or processes where there are none) of the policy and of generation.

    Attributes:
        num_nodes: Number of nodes of the cluster.
        per_node: Number of devices of each node.
        num_engine_devices: Number of devices reserved for generation: the last ones of a single node, or all devices of
            the last ones of several nodes; 0 if generation shares the policy's.
    """

    num_nodes: int
    per_node: int
    num_engine_devices: int = 0

    @property
    def policy_nodes(self) -> int:
        """Number of nodes that train."""
        return self.policy_ranks // self.policy_per_node

    @property
    def policy_per_node(self) -> int:
        """Number of devices that train on each of these nodes."""
        return self.per_node - self.num_engine_devices if self.num_nodes == 1 else self.per_node

    @property
    def policy_ranks(self) -> int:
        """Number of devices that train, which are the policy's ranks."""
        return self.num_nodes * self.per_node - self.num_engine_devices

    @property
    def engine_devices_per_node(self) -> int:
        """Number of devices that the engines divide among themselves on each node with generation."""
        return self.num_engine_devices or self.per_node if self.num_nodes == 1 else self.per_node

    @property
    def all_engine_devices(self) -> int:
        """Number of devices that the engines divide among themselves on all nodes."""
        return self.num_engine_devices or self.num_nodes * self.per_node


def engine_replicas(vllm_cfg: Mapping[str, Any]) -> int:
    """Returns how many replicas of the model a vLLM engine has, which divide its experts among all of their GPUs.

    They are vLLM's data-parallel size: it has no expert-parallel size of its own, but takes the product of its tensor-
    and data-parallel sizes.

    Args:
        vllm_cfg: The section `policy.generation.vllm_cfg`.
    """
    return max(1, vllm_cfg["expert_parallel_size"] // vllm_cfg["tensor_parallel_size"])


def engine_devices(vllm_cfg: Mapping[str, Any]) -> int:
    """Returns how many devices a vLLM engine has.

    Args:
        vllm_cfg: The section `policy.generation.vllm_cfg`.
    """
    return int(vllm_cfg["tensor_parallel_size"]) * engine_replicas(vllm_cfg)


def is_colocated(policy: Mapping[str, Any]) -> bool:
    """Returns whether generation shares the policy's devices; also true for a policy without generation."""
    return "generation" not in policy or bool(policy["generation"]["colocated"]["enabled"])


def split_devices(cluster: Mapping[str, Any], policy: Mapping[str, Any]) -> DeviceSplit:
    """Returns the split for the sections `cluster` and `policy` of a validated recipe."""
    colocated = None if is_colocated(policy) else policy["generation"]["colocated"]
    split = checked_split(cluster["gpus_per_node"], cluster["num_nodes"], colocated)
    assert isinstance(split, DeviceSplit), "a rule checks it"
    return split


def checked_split(per_node: int, num_nodes: int, colocated: Mapping[str, Any] | None) -> DeviceSplit | tuple[str, str]:
    """Divides the devices as NeMo-RL does, or says what is wrong with the section.

    Args:
        per_node: `cluster.gpus_per_node`.
        num_nodes: `cluster.num_nodes`.
        colocated: The section `policy.generation.colocated`; None if it is absent.

    Returns:
        The split; or a key of `colocated.resources` and what is wrong with it.
    """
    if colocated is None or colocated["enabled"]:
        return DeviceSplit(num_nodes, per_node)
    gpus, nodes = colocated["resources"]["gpus_per_node"], colocated["resources"]["num_nodes"]
    if num_nodes > 1 and gpus not in (None, per_node):
        return "gpus_per_node", (
            f"is {gpus}, but on a cluster of several nodes generation uses all GPUs of a node; set it to "
            f"cluster.gpus_per_node ({per_node}) or null"
        )
    if num_nodes == 1 and nodes not in (None, 1):
        return "num_nodes", f"is {nodes}, but cluster.num_nodes is 1; set it to null, or raise cluster.num_nodes"
    key, unit, taken, total = (
        ("gpus_per_node", 1, gpus, per_node) if num_nodes == 1 else ("num_nodes", per_node, nodes, num_nodes)
    )
    if taken is None:
        return key, (
            "is missing, but policy.generation.colocated.enabled is false; set it to the part that generation gets, "
            f"below cluster.{key} ({total}), or raise that: the policy needs at least one"
        )
    if taken >= total:
        return key, (
            f"is {taken}, but the policy needs at least one of cluster.{key} ({total}); lower it, or raise "
            f"cluster.{key}"
        )
    return DeviceSplit(num_nodes, per_node, taken * unit)
