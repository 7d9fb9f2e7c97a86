"""Rules for generation on its own devices."""

from typing import Any

from nemo_offload_rl.config.megatron.device_split import DeviceSplit, checked_split
from nemo_offload_rl.config.rules.base import COLOCATED, GPUS, NODES, REFIT_TRANSPORT, Verdict, note, rule


@rule(COLOCATED, GPUS, NODES)
def policy_and_generation_share_out_the_cluster(colocated: dict[str, Any], gpus: int, nodes: int) -> Verdict:
    """Refuses a split of the cluster that leaves the policy or generation without the devices that the recipe says."""
    split = checked_split(gpus, nodes, colocated)
    if isinstance(split, DeviceSplit):
        return None
    key, message = split
    return f"{COLOCATED.removesuffix('?')}.resources.{key}", message


@rule(REFIT_TRANSPORT)
def a_transport_needs_gpus_of_its_own(transport: str | None) -> Verdict:
    """Refuses a transport on shared GPUs, as NeMo-RL does; an adaptation has already handled separate GPUs."""
    if transport is None:
        return None
    key = f"{COLOCATED.removesuffix('?')}.enabled"
    return f"is {transport}, but only non-colocated generation uses a transport, and {key} is not false; set it to null"


@note("policy.offload_optimizer_for_refit?", COLOCATED)
def nothing_moves_for_a_refit_to_other_gpus(enabled: bool | None, colocated: dict[str, Any] | None) -> Verdict:
    """Notes that the flag has no effect on separate GPUs, since NeMo-RL's recipes have it in common."""
    if not enabled or colocated is None or colocated["enabled"]:
        return None
    return "true has no effect, since generation is not colocated, and a refit needs no room on the policy's GPUs"
