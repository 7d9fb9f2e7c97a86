"""Rules for the lists of a layer's modules: those that are recomputed, offloaded, or captured, and for tiled MLPs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_offload_rl.config.installed.declared_fields import untested_megatron_core
from nemo_offload_rl.config.megatron import ACTIVATION_MODULES, GRAPH_MODULES, LAYER_INPUT
from nemo_offload_rl.config.megatron import GRAPH_IMPL_KEY as GRAPHS
from nemo_offload_rl.config.megatron import GRAPH_MODULES_KEY as CAPTURED
from nemo_offload_rl.config.megatron import MLP_TILES_KEY as TILES
from nemo_offload_rl.config.megatron import OFFLOAD_MODULES_KEY as OFFLOADED
from nemo_offload_rl.config.problems import show, show_choices, unknown_names
from nemo_offload_rl.config.rules.base import (
    CP,
    DIVISOR,
    LENGTH,
    MEGATRON,
    OFFLOADING,
    PACKING,
    PP,
    RuleResult,
    rule,
)

RECOMPUTE_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
RECOMPUTING, GRANULARITY, RECOMPUTED = (
    f"{MEGATRON}.{name}" for name in ("activation_checkpointing", "recompute_granularity", "recompute_modules")
)
RECOMPUTATION = (RECOMPUTING, GRANULARITY, RECOMPUTED)
_OFFLOADS, _CAPTURES = (OFFLOADED, OFFLOADING), (CAPTURED, GRAPHS)
# Transformer Engine keeps cuDNN's fused attention out of graphs of padded training rows whose length is no multiple of
# this, for a known fault of cuDNN up to 9.15.0; its unfused kernel then runs in the graph, and the fused one in eager
# passes. The driver does not know the workers' cuDNN, so the rule is the same for all.
CAPTURED_ATTENTION_MULTIPLE = 128

# A recomputed module: the modules that are not offloaded, or not captured, beside it.
NOT_OFFLOADED_BESIDE = {
    "core_attn": ("core_attn",),  # megatron-core silently skips offloading of recomputed attention
    "mla_up_proj": ("core_attn",),  # it recomputes the queries, keys and values that core_attn moves
    "moe": ("expert_fc1", "moe_act", "fused_group_mlp"),
}
KEPT_ATTENTION = "core_attn"
"""The module whose activations may be offloaded beside layer_input, instead of being recomputed."""
NOT_CAPTURED_BESIDE = {"moe": ("moe_router",)}


def recomputes_layers(enabled: bool, granularity: str | None) -> bool:
    """Returns whether whole layers are recomputed; no other key counts without activation_checkpointing."""
    return enabled and granularity == "full"


def recomputed_modules(enabled: bool, granularity: str | None, modules: list[str] | None) -> list[str]:
    """Returns the modules that are recomputed; null stands for megatron-core's default."""
    if not enabled or granularity != "selective":
        return []
    return ["core_attn"] if modules is None else modules


def listed(modules: list[str] | None, switch: Any) -> list[str]:
    """Returns the modules that are offloaded, or captured; none while the feature is off."""
    return [] if switch in (False, "none") else modules or []


def padded_row(longest: int, divisible_by: int) -> tuple[int, str]:
    """Returns the number of tokens of the longest sequence after padding, and the words for it in a message."""
    padded = math.ceil(longest / divisible_by) * divisible_by
    return padded, f"{longest}" if padded == longest else f"{longest}, which {DIVISOR} {divisible_by} makes {padded}"


@rule(*_OFFLOADS)
def offload_modules_names(modules: list[str] | None, enabled: bool) -> RuleResult:
    """Requires known modules to offload."""
    return _names(OFFLOADING, ACTIVATION_MODULES, modules, enabled)


@rule(*_CAPTURES)
def cuda_graph_modules_names(modules: list[str], impl: str) -> RuleResult:
    """Requires parts that can be captured: megatron-core reads an empty list as whole layers."""
    return _names(GRAPHS, GRAPH_MODULES, modules, impl != "none")


def _names(switch: str, known: Any, modules: list[str] | None, enabled: bool) -> RuleResult:
    unknown = [name for name in modules or [] if name not in known]
    if not enabled or (modules and not unknown):
        return None
    found = unknown_names(unknown, known) if unknown else show(modules)
    return f"must name some of {show_choices(known)} while {switch} is on; found {found}"


@rule(RECOMPUTED, RECOMPUTING, GRANULARITY)
def recompute_modules_names(modules: list[str] | None, enabled: bool, granularity: str | None) -> RuleResult:
    """Requires recomputation to say what it recomputes."""
    if enabled and granularity is None:
        return GRANULARITY, f"must be full or selective while {RECOMPUTING} is true; found null"
    unknown = [name for name in recomputed_modules(enabled, granularity, modules) if name not in RECOMPUTE_MODULES]
    if not unknown:
        return None
    return f"may hold {show_choices(RECOMPUTE_MODULES)}; found {unknown_names(unknown, RECOMPUTE_MODULES)}"


@rule(*_OFFLOADS, *RECOMPUTATION)
def offload_modules_recomputed(modules: list[str] | None, enabled: bool, *recomputation: Any) -> RuleResult:
    """Refuses to offload what is recomputed, of which nothing is saved.

    A recomputed norm or activation keeps its input, which is what attn_norm, mlp_norm and moe_act move.
    """
    moved = listed(modules, enabled)
    if LAYER_INPUT not in moved:
        return _beside(OFFLOADING, NOT_OFFLOADED_BESIDE, moved, *recomputation)
    if not recomputes_layers(*recomputation[:2]):
        return f"has {LAYER_INPUT}, which needs {RECOMPUTING} true and {GRANULARITY} full; set both, or take it out"
    inside = [name for name in moved if name not in (LAYER_INPUT, KEPT_ATTENTION)]
    if not inside:
        return None
    return (
        f"has {LAYER_INPUT} and {' and '.join(inside)}, but whole layers are recomputed; beside {LAYER_INPUT} only "
        f"{KEPT_ATTENTION} can be kept"
    )


@rule(f"{MEGATRON}.recompute_method?", *_OFFLOADS)
def recompute_method_layer_input(method: str | None, modules: list[str] | None, enabled: bool) -> RuleResult:
    """Refuses layer_input where some layers keep all of their tensors."""
    if method != "block" or LAYER_INPUT not in listed(modules, enabled):
        return None
    return f"is block, which keeps all tensors of some layers, but {OFFLOADED} has {LAYER_INPUT}; set it to uniform"


@rule(f"{MEGATRON}.recompute_num_layers?", RECOMPUTING, GRANULARITY)
def recompute_num_layers(number: int | None, enabled: bool, granularity: str | None) -> RuleResult:
    """Refuses segments without a layer: megatron-core's loop over them never ends, and ours runs no layer."""
    if number is None or number >= 1 or not recomputes_layers(enabled, granularity):
        return None
    return f"must be 1 or more layers; found {number}"


@rule(*_CAPTURES, *RECOMPUTATION)
def cuda_graph_modules_recomputed(modules: list[str], impl: str, *recomputation: Any) -> RuleResult:
    """Refuses graphs inside recomputed modules, which run twice."""
    return _beside(GRAPHS, NOT_CAPTURED_BESIDE, listed(modules, impl), *recomputation)


def _beside(
    switch: str,
    refused: Mapping[str, tuple[str, ...]],
    modules: Sequence[str],
    enabled: bool,
    granularity: Any,
    again: Any,
) -> RuleResult:
    if modules and recomputes_layers(enabled, granularity):
        return switch, f"is on, but {GRANULARITY} is full, which runs whole layers twice; set that to selective"
    for name in recomputed_modules(enabled, granularity, again):
        clash = [module for module in modules if module in refused.get(name, ())]
        if clash:
            default = f", and null means {name}" if again is None else ""
            return f"has {' and '.join(clash)}, which {RECOMPUTED} with {name} excludes{default}; take either out"
    return None


@rule(f"{MEGATRON}.fused_residual_rmsnorm?", *RECOMPUTATION)
def recompute_modules_fused_residual(fused: bool | None, *recomputation: Any) -> RuleResult:
    """Refuses to recompute fused norms: they also return their input, and recomputation frees what a norm returns."""
    if not fused or "layernorm" not in recomputed_modules(*recomputation):
        return None
    return f"is true, but {RECOMPUTED} has layernorm, which would discard a fused norm's residual; change either"


@rule(TILES, *RECOMPUTATION)
def mlp_tiles_recomputed(tile: int | str | None, *recomputation: Any) -> RuleResult:
    """Refuses to recompute MLPs twice: tiles are recomputed anyway."""
    if tile is None or "mlp" not in recomputed_modules(*recomputation):
        return None
    return f"is {tile}, which recomputes MLPs, but {RECOMPUTED} has mlp, which would do so again; take that out"


@rule(TILES, *_CAPTURES)
def mlp_tiles_captured(tile: int | str | None, modules: list[str], impl: str) -> RuleResult:
    """Refuses to capture MLPs in tiles, which was never compared with eager steps."""
    if tile is None or "mlp" not in listed(modules, impl):
        return None
    return f"is {tile}, but {CAPTURED} has mlp, and graphs of MLPs in tiles are not supported; take that out"


@rule(OFFLOADING)
def offloading_megatron_core_version(enabled: bool) -> RuleResult:
    """Refuses untested versions of megatron-core, whose layers may call the manager of activations differently."""
    return untested_megatron_core() if enabled else None


@rule(*_OFFLOADS)
def offload_modules_attn_proj(modules: list[str] | None, enabled: bool) -> RuleResult:
    """Refuses attn_proj without core_attn, whose output it would move and core_attn's backward pass keeps."""
    moved = listed(modules, enabled)
    if "attn_proj" not in moved or "core_attn" in moved:
        return None
    return "has attn_proj, whose input is the output of core_attn and stays for that; add core_attn"


@rule(f"{MEGATRON}.env_vars?", OFFLOADING)
def offloading_env_vars(env_vars: dict[str, str] | None, enabled: bool) -> RuleResult:
    """Refuses to override the variable Transformer Engine reads on import, without which it moves weights, too."""
    name = "NVTE_CPU_OFFLOAD_V1"
    if not enabled or not env_vars or env_vars.get(name, "1") == "1":
        return None
    return f"{MEGATRON}.env_vars.{name}", f'must be "1" while {OFFLOADING} is true; delete it, since workers set it'


@rule(*_CAPTURES, PACKING)
def cuda_graph_modules_packing(modules: list[str], impl: str, packs: bool) -> RuleResult:
    """Refuses to capture attn or mlp with packing: a graph replays fixed shapes, but lengths in a row change."""
    fixed = [name for name in listed(modules, impl) if name in ("attn", "mlp")]
    if not fixed or not packs:
        return None
    return f"has {' and '.join(fixed)}, captured for padded rows, but {PACKING} is true; change either"


@rule(LENGTH, DIVISOR, CP, *_CAPTURES)
def cuda_graph_attn_length(longest: int, divisible_by: int, cp: int, modules: list[str], impl: str) -> RuleResult:
    """Requires row lengths at which Transformer Engine takes the same attention kernel with and without graphs.

    With context parallelism it has no other: what a rank has of a row must be such a length.
    """
    multiple = CAPTURED_ATTENTION_MULTIPLE * cp
    padded, found = padded_row(longest, divisible_by)
    if "attn" not in listed(modules, impl) or padded % multiple == 0:
        return None
    both = math.lcm(divisible_by, multiple)
    shared = "" if cp == 1 else f" ({CAPTURED_ATTENTION_MULTIPLE} x {CP} {cp})"
    return (
        f"must be a multiple of {multiple}{shared} while {CAPTURED} has attn, or graphs run another kernel "
        f"than eager passes; found {found}: set it to {math.ceil(padded / both) * both}, or take attn out there"
    )


@rule(GRAPHS, PP, PACKING)
def cuda_graph_pipeline_packing(impl: str, pp: int, packs: bool) -> RuleResult:
    """Refuses packing with pipelined graphs, which are captured for one number of micro-batches."""
    if impl == "none" or pp == 1 or not packs:
        return None
    return f"is {impl} with {PP} {pp}, captured for one number of micro-batches, but {PACKING} is true; change one"


@rule(*_CAPTURES, *_OFFLOADS, PP)
def cuda_graph_offload_pipeline(
    modules: list[str], impl: str, offload_modules: list[str] | None, enabled: bool, pp: int
) -> RuleResult:
    """Refuses copies inside graphs on a pipeline: it has a graph for each micro-batch, and several hold activations."""
    captured = listed(modules, impl)
    inside = ["qkv_linear", "core_attn", "attn_proj"] if "attn" in captured else []
    inside += ["mlp_norm"] if {"attn", "mlp"} <= set(captured) else []
    moved = [name for name in listed(offload_modules, enabled) if name in inside]
    if not moved or pp == 1:
        return None
    return f"captures {' and '.join(moved)} of {OFFLOADED}, which needs one pipeline stage; found {PP} {pp}: change one"
