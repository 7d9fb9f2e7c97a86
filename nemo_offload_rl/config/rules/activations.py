"""Rules for activation offloading: the modules exist, their activations are offloaded, and only once."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from nemo_offload_rl.config.installed.libraries import TRANSFORMER_ENGINE_2_14, too_old, untested_megatron_core
from nemo_offload_rl.config.megatron.activation_modules import (
    ACTIVATION_MODULES,
    OFFLOAD_MODULES_KEY,
    dense_refusal,
    modules_without_layer,
)
from nemo_offload_rl.config.megatron.graph_modules import GRAPH_IMPL_KEY
from nemo_offload_rl.config.model.model_kind import model_kind
from nemo_offload_rl.config.problems import show, show_choices, unknown_names
from nemo_offload_rl.config.rules.base import ETP, MEGATRON, MODEL, Verdict, rule
from nemo_offload_rl.config.rules.memory import RECOMPUTATION, recomputed_modules, recomputes_layers

OFFLOADING = f"{MEGATRON}.fine_grained_activation_offloading"
MODULES = OFFLOAD_MODULES_KEY
DELAY = f"{MEGATRON}.delay_offload_until_cuda_graph"
GRAPHS = GRAPH_IMPL_KEY
OP_FUSER = f"{MEGATRON}.use_transformer_engine_op_fuser"
# The arguments of `fuses_experts`.
EXPERT_FUSION = (f"{OP_FUSER}?", MODULES, OFFLOADING, *MODEL)
FRACTION = f"{MEGATRON}.activation_offload_fraction"
LIMIT = "policy.activation_offload.host_memory_limit_gib"
RESIDENCY_LIMIT = "policy.residency.host_memory_limit_gib"


def offloaded(enabled: bool, modules: list[str] | None) -> list[str]:
    """Returns the modules whose activations are offloaded; an empty list while the feature is off."""
    return list(modules or []) if enabled else []


def fuses_experts(fused: bool | None, modules: list[str] | None, enabled: bool, *model: Any) -> bool:
    """Returns whether Transformer Engine fuses the experts.

    If the model's kind is unknown, offload_modules decides: fused_group_mlp implies fused experts.
    """
    has_experts = model_kind(*model).has_experts
    return bool(fused) and (has_experts or (has_experts is None and "fused_group_mlp" in offloaded(enabled, modules)))


def quoted(names: Sequence[str]) -> str:
    """Returns the names as a list in prose."""
    return " and ".join(show(name) for name in names)


def repeated_names(names: Sequence[str]) -> list[str]:
    """Returns the names that occur more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


@rule(OFFLOADING)
def offloading_knows_megatron_core(enabled: bool) -> Verdict:
    """Refuses untested versions of megatron-core, whose layers may call the manager of activations differently."""
    return untested_megatron_core() if enabled else None


@rule(MODULES, OFFLOADING)
def offloading_names_modules(modules: list[str] | None, enabled: bool) -> Verdict:
    """Refuses offloading that is on but names no modules."""
    if not enabled or modules:
        return None
    return (
        f"must name the modules whose activations are offloaded while {OFFLOADING} is true, such as [qkv_linear, "
        f"core_attn, attn_proj]: {show_choices(ACTIVATION_MODULES)}; found {show(modules)}"
    )


@rule(MODULES, OFFLOADING)
def offload_modules_are_known(modules: list[str] | None, enabled: bool) -> Verdict:
    """Refuses unknown modules, which would fail an assertion in every worker."""
    unknown = [name for name in offloaded(enabled, modules) if name not in ACTIVATION_MODULES]
    if not unknown:
        return None
    return f"may hold {show_choices(ACTIVATION_MODULES)}; found {unknown_names(unknown, ACTIVATION_MODULES)}"


@rule(MODULES, OFFLOADING)
def offload_modules_are_named_once(modules: list[str] | None, enabled: bool) -> Verdict:
    """Refuses a module that is named twice, since the user probably meant another one."""
    repeated = repeated_names(offloaded(enabled, modules))
    return f"names {quoted(repeated)} more than once; name each module once" if repeated else None


@rule(MODULES, OFFLOADING)
def attn_proj_needs_core_attn(modules: list[str] | None, enabled: bool) -> Verdict:
    """Refuses attn_proj without core_attn.

    The input of the projection is the output of attention, which attention's backward pass keeps on the GPU.
    """
    moved = offloaded(enabled, modules)
    if "attn_proj" not in moved or "core_attn" in moved:
        return None
    return (
        f"has attn_proj without core_attn; found {show(modules)}: the input of attn_proj is the output of core_attn, "
        "which stays on the GPU for core_attn's backward pass; add core_attn"
    )


@rule(MODULES, OFFLOADING, *MODEL)
def expert_modules_need_experts(modules: list[str] | None, enabled: bool, *model: Any) -> Verdict:
    """Refuses expert modules for a dense model; if the recipe does not tell the model's kind, the worker checks."""
    kind = model_kind(*model)
    if kind.has_experts is not False:
        return None
    absent = modules_without_layer(offloaded(enabled, modules), has_experts=False)
    return dense_refusal(absent, kind.name) if absent else None


@rule(MODULES, OFFLOADING, f"{MEGATRON}.moe_grouped_gemm?")
def expert_modules_need_grouped_gemm(modules: list[str] | None, enabled: bool, grouped: bool | None) -> Verdict:
    """Refuses expert modules without grouped GEMM: megatron-core silently offloads only grouped experts."""
    moved = [name for name in offloaded(enabled, modules) if name in _of_experts()]
    if not moved or grouped is not False:
        return None
    verb = "needs" if len(moved) == 1 else "need"
    return (
        f"names {quoted(moved)}, which {verb} {MEGATRON}.moe_grouped_gemm true, since megatron-core offloads only "
        f"grouped experts; found false: set that to true, or take {quoted(moved)} out"
    )


@rule(MODULES, OFFLOADING)
def fused_group_mlp_moves_as_a_whole(modules: list[str] | None, enabled: bool) -> Verdict:
    """Refuses fused_group_mlp together with expert_fc1 or moe_act, whose activations it contains."""
    moved = offloaded(enabled, modules)
    parts = [name for name in moved if name in ("expert_fc1", "moe_act")]
    if "fused_group_mlp" not in moved or not parts:
        return None
    return (
        f"has fused_group_mlp with {quoted(parts)}, which are parts of it; keep the whole where {OP_FUSER} is true, "
        "else the parts"
    )


@rule(MODULES, OFFLOADING, f"{OP_FUSER}?", *MODEL)
def fused_group_mlp_needs_op_fuser(
    modules: list[str] | None, enabled: bool, fused: bool | None, *model: Any
) -> Verdict:
    """Refuses fused_group_mlp without the op fuser; another rule covers dense models."""
    if "fused_group_mlp" not in offloaded(enabled, modules) or fused or model_kind(*model).has_experts is False:
        return None
    return (
        f"names 'fused_group_mlp', which needs {OP_FUSER} true; found {show(fused)}: set it, or name expert_fc1 and "
        "moe_act instead"
    )


@rule(MODULES, OFFLOADING, f"{OP_FUSER}?")
def fused_experts_have_no_parts(modules: list[str] | None, enabled: bool, fused: bool | None) -> Verdict:
    """Refuses expert_fc1 and moe_act with fused experts: megatron-core builds no fused experts to offload parts of."""
    moved = offloaded(enabled, modules)
    parts = [name for name in moved if name in ("expert_fc1", "moe_act")]
    if not parts or not fused or "fused_group_mlp" in moved:
        return None
    verb = "is" if len(parts) == 1 else "are"
    return f"names {quoted(parts)}, which {verb} fused while {OP_FUSER} is true; name fused_group_mlp instead"


@rule(f"{OP_FUSER}?", MODULES, OFFLOADING, *MODEL)
def fused_experts_have_their_library(*fusion: Any) -> Verdict:
    """Refuses fused experts with an old Transformer Engine, which megatron-core rejects with an assertion."""
    old = too_old(TRANSFORMER_ENGINE_2_14)
    if not old or not fuses_experts(*fusion):
        return None
    return f"is true, and fused experts need {old[0]}; install that, or set it to false"


@rule(f"{MEGATRON}.env_vars?", *EXPERT_FUSION)
def fused_experts_are_switched_on_in_workers(env_vars: dict[str, str] | None, *fusion: Any) -> Verdict:
    """Refuses env_vars that switch fused experts off.

    megatron-core fuses experts only if the variable is set; workers set it to 1, and env_vars override that.
    """
    name = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
    if not fuses_experts(*fusion) or not env_vars or name not in env_vars or env_vars[name] == "1":
        return None
    return (
        f"{MEGATRON}.env_vars.{name}",
        f'must be "1" while {OP_FUSER} is true, or no fused experts can be built; found {show(env_vars[name])}; '
        "delete it, since workers set it",
    )


@rule(ETP, *EXPERT_FUSION)
def fused_experts_are_whole(etp: int, *fusion: Any) -> Verdict:
    """Refuses fused experts with expert tensor parallelism, which they do not support."""
    if etp == 1 or not fuses_experts(*fusion):
        return None
    return (
        f"must be 1 while {OP_FUSER} is true, which does not support expert tensor parallelism; found {etp}: set "
        "this to 1, or that to false"
    )


@rule(f"{MEGATRON}.moe_grouped_gemm?", *EXPERT_FUSION)
def fused_experts_are_grouped(grouped: bool | None, *fusion: Any) -> Verdict:
    """Refuses the op fuser without grouped GEMM, since experts that are computed one by one are not fused.

    Another rule covers such experts if fused_group_mlp is to be offloaded.
    """
    _, modules, enabled, *_ = fusion
    if grouped is not False or "fused_group_mlp" in offloaded(enabled, modules) or not fuses_experts(*fusion):
        return None
    return (
        f"must be true while {OP_FUSER} is true, which fuses grouped experts only; found false: set this to true, or "
        "that to false"
    )


@rule(f"{MEGATRON}.moe_apply_probs_on_input?", *EXPERT_FUSION)
def fused_experts_scale_their_output(on_input: bool | None, *fusion: Any) -> Verdict:
    """Refuses scaling on the input: fused experts apply the router's probabilities after the activation."""
    if not on_input or not fuses_experts(*fusion):
        return None
    return (
        f"must be false while {OP_FUSER} is true, since fused experts apply the router's probabilities after the "
        "activation; found true: set either to false"
    )


@rule(OFFLOADING, *RECOMPUTATION)
def recomputed_layers_keep_nothing_to_offload(
    enabled: bool, recompute: bool, granularity: str | None, modules: list[str] | None
) -> Verdict:
    """Refuses offloading with full recomputation, which saves only the input of each layer."""
    if not enabled or not recomputes_layers(recompute, granularity):
        return None
    return (
        f"is true, but {MEGATRON}.activation_checkpointing with recompute_granularity full keeps no activations "
        "inside a layer that could move; set one of them to false, or recompute_granularity to selective"
    )


@rule(MODULES, OFFLOADING, *RECOMPUTATION)
def recomputed_activations_are_not_offloaded(
    modules: list[str] | None, enabled: bool, recompute: bool, granularity: str | None, recomputed: list[str] | None
) -> Verdict:
    """Refuses to offload activations that are recomputed: they are not saved, so there is nothing to offload.

    It refuses:

    - core_attn recomputed and offloaded: megatron-core silently skips offloading of recomputed attention;
    - mla_up_proj recomputed with core_attn offloaded: the queries, keys and values that core_attn moves are what
      mla_up_proj discards and recomputes;
    - moe recomputed with expert_fc1, moe_act or fused_group_mlp offloaded: recomputation includes the experts,
      and megatron-core asserts that it does not.

    Other combinations work. A recomputed norm (layernorm) or activation (moe_act) discards its output and keeps its
    input, which is what attn_norm, mlp_norm and moe_act move; of the tensors that qkv_linear saves, the output of its
    own norm stays on the GPU (`ExcludedStorages`). mlp and shared_experts contain no module that is offloaded.
    """
    moved = offloaded(enabled, modules)
    again = recomputed_modules(recompute, granularity, recomputed)
    pairs = {
        "core_attn": (["core_attn"], "recomputed attention does not offload"),
        "mla_up_proj": (["core_attn"], "it recomputes the queries, keys and values that core_attn would offload"),
        "moe": (
            _of_experts(),
            "it computes the experts again from their input, with all that they would move",
        ),
    }
    for name, (inside, why) in pairs.items():
        clash = [module for module in moved if module in inside]
        if name in again and clash:
            holds, remedy = f"holds {name}", f"{name} out there"
            if recomputed is None:
                holds, remedy = f"is null, which means {name}", "name other modules there (or [])"
            return (
                f"names {quoted(clash)}, but {MEGATRON}.recompute_modules {holds}: {why}; take {quoted(clash)} out "
                f"here, or {remedy}"
            )
    return None


@rule(f"{DELAY}?", OFFLOADING, GRAPHS)
def delayed_offload_needs_graphs(delay: bool | None, enabled: bool, graphs: str) -> Verdict:
    """Refuses delayed copies without offloading and CUDA graphs, since the copies wait for the replay of a graph."""
    if not delay or (enabled and graphs == "transformer_engine"):
        return None
    key, found = (OFFLOADING, show(enabled)) if not enabled else (GRAPHS, graphs)
    needed = "true" if not enabled else "transformer_engine"
    return f"is true, which needs {key} to be {needed}; found {found}: set that, or this to false"


@rule(f"{MEGATRON}.env_vars?", OFFLOADING)
def transformer_engine_leaves_offloading_to_megatron(env_vars: dict[str, str] | None, enabled: bool) -> Verdict:
    """Refuses env_vars that override the variable Transformer Engine reads on import, which workers set to 1."""
    name = "NVTE_CPU_OFFLOAD_V1"
    if not enabled or not env_vars or name not in env_vars or env_vars[name] == "1":
        return None
    return (
        f"{MEGATRON}.env_vars.{name}",
        f'must be "1" while {OFFLOADING} is true, otherwise weights would be offloaded, too; found '
        f"{show(env_vars[name])}; delete it, since workers set it",
    )


@rule("policy.activation_offload.strict?", OFFLOADING, f"{FRACTION}?")
def strictness_lets_something_leave(strict: bool | None, enabled: bool, fraction: float | None) -> Verdict:
    """Refuses strict with a fraction of 0, with which the first step would always fail."""
    if not strict or not enabled or fraction != 0:
        return None
    return f"is true, but {FRACTION} is 0, so that no activation is offloaded; raise that, or set this to false"


@rule(f"{LIMIT}?", f"{RESIDENCY_LIMIT}?", OFFLOADING)
def activations_fit_into_host_memory_limit(limit: float | None, all_of_it: float | None, enabled: bool) -> Verdict:
    """Refuses a limit above the rank's own: its host memory holds activations as well as training state."""
    if not enabled or limit is None or all_of_it is None or limit <= all_of_it:
        return None
    return f"is {limit:g}, above {RESIDENCY_LIMIT} ({all_of_it:g}), which includes it; lower it, or raise that"


def _of_experts() -> list[str]:
    return [name for name, module in ACTIVATION_MODULES.items() if module.of_experts]
