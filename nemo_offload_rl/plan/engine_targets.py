"""Says where the engine's weights and KV cache are in each phase; the engine moves them, not the residency table."""

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeGuard

from nemo_offload_rl.config.megatron.device_split import is_colocated
from nemo_offload_rl.config.schema.policy import GRPOPolicyConfig, PolicyConfig, has_generation
from nemo_offload_rl.residency.table import Phase

GENERATION_WEIGHTS_KEY = "policy.residency.generation_weights"


class EngineTarget(StrEnum):
    """Names a kind of state of a generation engine that shares the policy's GPUs."""

    GENERATION_WEIGHTS = "generation_weights"
    KV_CACHE = "kv_cache"


EngineTable = Mapping[Phase, Mapping[EngineTarget, str]]

_AWAKE = (Phase.REFIT, Phase.GENERATE)


def colocates_vllm(policy: PolicyConfig) -> TypeGuard[GRPOPolicyConfig]:
    """Returns whether vLLM generates on the GPUs of this policy, given the validated `policy` section."""
    return has_generation(policy) and policy["generation"]["backend"] == "vllm" and is_colocated(policy)


def keeps_generation_weights(policy: PolicyConfig) -> bool:
    """Returns whether a sleeping vLLM keeps its weights in host memory, so that only a changed policy needs a refit.

    Args:
        policy: the recipe's `policy` section, validated, with its absent keys resolved.
    """
    return colocates_vllm(policy) and policy["residency"]["generation_weights"] == "host"


def stays_awake(policy: PolicyConfig) -> bool:
    """Returns whether vLLM keeps its weights and KV cache on the GPU while the policy computes there.

    Args:
        policy: as in `keeps_generation_weights`, with the decision of `plan.colocation` where the recipe leaves it
            open.
    """
    return colocates_vllm(policy) and policy["residency"]["generation_weights"] == "gpu"


def engine_table(policy: PolicyConfig) -> EngineTable:
    """Returns where the engine has its weights and KV cache in each phase.

    Empty without an engine, or where the engine has GPUs of its own.

    Args:
        policy: as in `keeps_generation_weights`.

    Returns:
        For each phase "gpu", "host", "discarded", or "gpu at its end".
    """
    if not has_generation(policy) or not is_colocated(policy):
        return {}
    if stays_awake(policy):
        return {phase: dict.fromkeys(EngineTarget, "gpu") for phase in Phase}
    asleep = "discarded" if colocates_vllm(policy) and not keeps_generation_weights(policy) else "host"
    cache = dict.fromkeys(Phase, "discarded") | {Phase.GENERATE: "gpu"}
    if colocates_vllm(policy):
        cache[Phase.REFIT] = "gpu at its end"
    return {
        phase: {
            EngineTarget.GENERATION_WEIGHTS: "gpu" if phase in _AWAKE else asleep,
            EngineTarget.KV_CACHE: cache[phase],
        }
        for phase in Phase
    }


def engine_remark(policy: PolicyConfig) -> str:
    """Returns a line for the user: which key changes the placements of `engine_table`."""
    if not colocates_vllm(policy):
        return "generation_weights and kv_cache belong to the transformers engine, and no key changes where they live"
    if stays_awake(policy):
        return f"vLLM does not sleep; {GENERATION_WEIGHTS_KEY}=discard makes it free its GPU memory for training"
    if keeps_generation_weights(policy):
        return f"generation_weights and kv_cache belong to vLLM; {GENERATION_WEIGHTS_KEY}=discard frees the host memory"
    return (
        "generation_weights and kv_cache belong to vLLM; the next refit resends discarded weights; "
        f"{GENERATION_WEIGHTS_KEY}=host keeps them in host memory"
    )
