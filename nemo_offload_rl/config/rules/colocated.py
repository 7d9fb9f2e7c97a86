"""Rules for generation on its own devices."""

from typing import Any

from nemo_offload_rl.config.megatron import DeviceSplit, checked_split
from nemo_offload_rl.config.rules.base import COLOCATED, GPUS, NODES, REFIT_TRANSPORT, RuleResult, rule


@rule(COLOCATED, GPUS, NODES)
def colocated_resources(colocated: dict[str, Any], gpus: int, nodes: int) -> RuleResult:
    """Refuses a split of the cluster that leaves the policy or generation without the devices that the recipe says."""
    split = checked_split(gpus, nodes, colocated)
    if isinstance(split, DeviceSplit):
        return None
    key, message = split
    return f"{COLOCATED.removesuffix('?')}.resources.{key}", message


@rule(REFIT_TRANSPORT)
def colocated_refit_transport(transport: str | None) -> RuleResult:
    """Refuses a transport on shared GPUs, as NeMo-RL does; an adaptation has already handled separate GPUs."""
    if transport is None:
        return None
    return f"is {transport}, but only non-colocated generation uses a transport; set it to null"
