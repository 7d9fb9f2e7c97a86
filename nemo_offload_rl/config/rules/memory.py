"""Rules for recomputation of activations."""

from typing import Any

from nemo_offload_rl.config.model.model_kind import model_kind
from nemo_offload_rl.config.problems import show_choices, unknown_names
from nemo_offload_rl.config.rules.base import MEGATRON, MODEL, Verdict, rule

RECOMPUTE_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
RECOMPUTATION = (
    f"{MEGATRON}.activation_checkpointing",
    f"{MEGATRON}.recompute_granularity",
    f"{MEGATRON}.recompute_modules",
)


def recomputes_layers(enabled: bool, granularity: str | None) -> bool:
    """Returns whether whole layers are recomputed; no other key counts without activation_checkpointing."""
    return enabled and granularity == "full"


def recomputed_modules(enabled: bool, granularity: str | None, modules: list[str] | None) -> list[str]:
    """Returns the modules that are recomputed; null stands for megatron-core's default."""
    if not enabled or granularity != "selective":
        return []
    return ["core_attn"] if modules is None else modules


@rule(*RECOMPUTATION)
def recomputation_says_what(enabled: bool, granularity: str | None, modules: list[str] | None) -> Verdict:
    """Requires activation checkpointing to say what it recomputes."""
    if not enabled:
        return None
    if granularity is None:
        return (
            f"{MEGATRON}.recompute_granularity",
            "must be full or selective with activation_checkpointing; found null",
        )
    unknown = [module for module in modules or [] if module not in RECOMPUTE_MODULES]
    if granularity == "selective" and unknown:
        found = unknown_names(unknown, RECOMPUTE_MODULES)
        return f"{MEGATRON}.recompute_modules", f"may hold {show_choices(RECOMPUTE_MODULES)}; found {found}"
    return None


@rule(f"{MEGATRON}.recompute_modules", *RECOMPUTATION[:2], f"{MEGATRON}.moe_grouped_gemm?", *MODEL)
def recomputed_experts_are_grouped(
    modules: list[str] | None, enabled: bool, granularity: str | None, grouped: bool | None, *model: Any
) -> Verdict:
    """Refuses moe_act without grouped experts, the only ones whose activation megatron-core recomputes."""
    if "moe_act" not in recomputed_modules(enabled, granularity, modules):
        return None
    if model_kind(*model).has_experts is False:
        return "has moe_act, which only a mixture of experts has, and the model is dense; take it out"
    if grouped is False:
        return (
            f"has moe_act, which needs {MEGATRON}.moe_grouped_gemm true; found false: take it out, or set that to true"
        )
    return None


@rule(f"{MEGATRON}.fused_residual_rmsnorm?", *RECOMPUTATION)
def recomputed_norms_return_no_residual(
    fused: bool | None, enabled: bool, granularity: str | None, modules: list[str] | None
) -> Verdict:
    """Refuses to recompute fused norms: they also return their input, and recomputation frees what a norm returns."""
    if not fused or "layernorm" not in recomputed_modules(enabled, granularity, modules):
        return None
    return (
        f"is true, but {MEGATRON}.recompute_modules holds layernorm, whose recomputation would also discard the "
        "residual that a fused norm returns; remove layernorm from that list, or set this to false"
    )
