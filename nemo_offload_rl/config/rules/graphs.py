"""Rules for CUDA graphs: the parts can be captured, and their shapes do not change."""

import math
from typing import Any

from nemo_offload_rl.config.installed.libraries import TORCH_2_9, TRANSFORMER_ENGINE_2_14, too_old
from nemo_offload_rl.config.megatron.graph_modules import (
    GRAPH_MODULES,
    GRAPH_MODULES_KEY,
    REFUSED_GRAPH_MODULES,
    allocator_that_unmaps,
    graph_refusal,
)
from nemo_offload_rl.config.model.model_kind import model_kind
from nemo_offload_rl.config.problems import show, show_choices, unknown_names
from nemo_offload_rl.config.rules.activations import (
    GRAPHS,
    MODULES,
    OFFLOADING,
    offloaded,
    quoted,
    repeated_names,
)
from nemo_offload_rl.config.rules.base import DIVISOR, LENGTH, MEGATRON, MODEL, PACKING, PP, Verdict, rule
from nemo_offload_rl.config.rules.batches import padded_row
from nemo_offload_rl.config.rules.memory import RECOMPUTATION, recomputed_modules, recomputes_layers

CAPTURED = GRAPH_MODULES_KEY
# Transformer Engine keeps cuDNN's fused attention out of graphs of padded training rows whose length is no multiple of
# this, for a known fault of cuDNN up to 9.15.0; its unfused kernel then runs in the graph, and the fused one in eager
# passes. The driver does not know the workers' cuDNN, so the rule is the same for all.
CAPTURED_ATTENTION_MULTIPLE = 128


def captured(impl: str, modules: list[str]) -> list[str]:
    """Returns the modules that are captured; an empty list while graphs are off."""
    return modules if impl != "none" else []


@rule(GRAPHS, "policy.precision")
def graphs_take_bfloat16(impl: str, precision: str) -> Verdict:
    """Requires bfloat16, the dtype of megatron-core's static inputs, which silently round others."""
    if impl == "none" or precision == "bfloat16":
        return None
    return (
        f"is {impl}, whose graphs take bfloat16, but policy.precision is {precision}; set that to bfloat16, or this "
        "to none"
    )


@rule(GRAPHS, f"{MEGATRON}.fp32_residual_connection?")
def captured_residuals_are_bfloat16(impl: str, fp32: bool | None) -> Verdict:
    """Refuses float32 residuals, since the static inputs of graphs are bfloat16."""
    if impl == "none" or not fp32:
        return None
    return (
        f"is {impl}, whose graphs take bfloat16, but {MEGATRON}.fp32_residual_connection is true; set that to false, "
        "or this to none"
    )


@rule(CAPTURED, GRAPHS)
def graphs_name_modules(modules: list[str], impl: str) -> Verdict:
    """Refuses an empty list, which megatron-core reads as whole layers."""
    if impl == "none" or modules:
        return None
    return (
        f"must name the modules to capture while {GRAPHS} is {impl}: {show_choices(GRAPH_MODULES)}; found []: name "
        f"some, or set {GRAPHS} to none"
    )


@rule(CAPTURED, GRAPHS)
def graph_modules_are_known(modules: list[str], impl: str) -> Verdict:
    """Refuses unknown parts, and names the reason for those that cannot be captured here."""
    unknown = [name for name in captured(impl, modules) if name not in GRAPH_MODULES]
    refused = next((name for name in unknown if name in REFUSED_GRAPH_MODULES), None)
    if refused is not None:
        return f"may hold {show_choices(GRAPH_MODULES)}; found {show(refused)}: {REFUSED_GRAPH_MODULES[refused]}"
    if unknown:
        return f"may hold {show_choices(GRAPH_MODULES)}; found {unknown_names(unknown, GRAPH_MODULES)}"
    return None


@rule(CAPTURED, GRAPHS)
def graph_modules_are_named_once(modules: list[str], impl: str) -> Verdict:
    """Refuses a module that is named twice, since the user probably meant another one."""
    repeated = repeated_names(captured(impl, modules))
    return f"names {quoted(repeated)} more than once; name each module once" if repeated else None


@rule(CAPTURED, GRAPHS, *MODEL)
def moe_preprocess_needs_moe_router(modules: list[str], impl: str, *model: Any) -> Verdict:
    """Refuses moe_preprocess without moe_router, whose graph contains it; a dense model has neither."""
    names = captured(impl, modules)
    if "moe_preprocess" not in names or "moe_router" in names or model_kind(*model).has_experts is False:
        return None
    return f"has moe_preprocess, which is captured with moe_router; found {show(modules)}; add moe_router"


@rule(CAPTURED, GRAPHS, *MODEL)
def captured_modules_are_in_the_model(modules: list[str], impl: str, *model: Any) -> Verdict:
    """Refuses routers of a model without experts, and MLPs of one without dense layers."""
    kind = model_kind(*model)
    names = captured(impl, modules)
    return graph_refusal(names, has_experts=kind.has_experts, has_dense_mlps=kind.has_dense_mlps)


@rule(
    CAPTURED,
    GRAPHS,
    f"{MEGATRON}.moe_token_dispatcher_type?",
    f"{MEGATRON}.moe_expert_capacity_factor?",
    f"{MEGATRON}.moe_pad_expert_input_to_capacity?",
)
def captured_preprocessing_does_not_wait(
    modules: list[str], impl: str, dispatcher: str | None, capacity: float | None, pads: bool | None
) -> Verdict:
    """Refuses to capture preprocessing that waits for a copy to the host, which a graph cannot contain.

    Megatron-Bridge's dispatcher is alltoall.
    """
    waits = dispatcher in (None, "alltoall") and capacity is not None and not pads
    if "moe_preprocess" not in captured(impl, modules) or not waits:
        return None
    return (
        f"has moe_preprocess, which cannot be captured with {MEGATRON}.moe_expert_capacity_factor {show(capacity)}, "
        "since it then waits for a copy to the host; take it out, or set moe_expert_capacity_factor to null"
    )


@rule(MODULES, OFFLOADING, CAPTURED, GRAPHS, *MODEL)
def captured_norms_are_not_offloaded(
    modules: list[str] | None, enabled: bool, graph_modules: list[str], impl: str, *model: Any
) -> Verdict:
    """Refuses to offload a norm at the edge of a graph: its input is the graph's own buffer.

    megatron-core would skip these with a warning:

    - attn_norm where attn is captured;
    - mlp_norm of a dense layer where only one of attn and mlp is captured, and of a mixture-of-experts layer where
      attn or moe_router is.
    """
    moved, names = offloaded(enabled, modules), captured(impl, graph_modules)
    if "attn_norm" in moved and "attn" in names:
        return (
            f"has attn_norm, which cannot move while {CAPTURED} has attn, whose graph begins with it; take either out"
        )
    if "mlp_norm" not in moved:
        return None
    kind = model_kind(*model)
    has_dense, has_experts = kind.has_dense_mlps or "mlp" in names, kind.has_experts or "moe_router" in names
    on_dense = ("attn" in names) != ("mlp" in names)
    on_experts = "attn" in names or "moe_router" in names
    if (on_dense and has_dense) or (on_experts and has_experts) or (on_dense and on_experts):
        return (
            f"has mlp_norm, which cannot move while {CAPTURED} is {show(graph_modules)}: it lies at the edge of a "
            "graph; take it out, or capture other parts"
        )
    return None


@rule(CAPTURED, GRAPHS, PACKING)
def captured_layers_have_fixed_shapes(modules: list[str], impl: str, packs: bool) -> Verdict:
    """Refuses to capture attn or mlp with packing.

    A graph replays the shapes it was captured with, but the lengths in a packed row change with each batch.
    """
    fixed = [name for name in captured(impl, modules) if name in ("attn", "mlp")]
    if not fixed or not packs:
        return None
    return (
        f"has {quoted(fixed)}, whose graphs take padded batches of {LENGTH}, but {PACKING} is "
        "true; set that to false, or capture none of attn and mlp (moe_router may be, in a mixture of experts)"
    )


@rule(LENGTH, DIVISOR, CAPTURED, GRAPHS)
def captured_attention_runs_the_kernel_of_eager_passes(
    longest: int, divisible_by: int, modules: list[str], impl: str
) -> Verdict:
    """Requires row lengths at which Transformer Engine takes the same attention kernel with and without graphs."""
    padded, found = padded_row(longest, divisible_by)
    if "attn" not in captured(impl, modules) or padded % CAPTURED_ATTENTION_MULTIPLE == 0:
        return None
    both = math.lcm(divisible_by, CAPTURED_ATTENTION_MULTIPLE)
    return (
        f"must be a multiple of {CAPTURED_ATTENTION_MULTIPLE} while {CAPTURED} has attn; found {found}: at other "
        "lengths Transformer Engine runs another attention kernel in the graph than in eager passes, which gives "
        f"other numbers and takes more memory; set it to {math.ceil(padded / both) * both}, or take attn out there"
    )


@rule(GRAPHS, PP, PACKING)
def pipelined_graphs_have_a_fixed_number_of_micro_batches(impl: str, pp: int, packs: bool) -> Verdict:
    """Refuses packing with pipelined graphs, which are captured for one order of micro-batches.

    Without packing there are always train_global_batch_size / (data-parallel size x train_micro_batch_size) of them;
    with packing their number depends on the lengths in a batch.
    """
    if impl == "none" or pp == 1 or not packs:
        return None
    return (
        f"is {impl} with {PP} {pp}, where graphs are captured for one number of micro-batches, but {PACKING} is true, "
        "with which that number changes from step to step; set that to false, this to none, or the pipeline to 1"
    )


@rule(f"{MEGATRON}.cuda_graph_warmup_steps", GRAPHS)
def graphs_are_captured_after_a_warm_up(steps: int, impl: str) -> Verdict:
    """Requires a step before the capture, which allocates memory that a graph must find in place."""
    if impl == "none" or steps >= 1:
        return None
    return f"must be at least 1 while {GRAPHS} is {impl}; found {steps}"


@rule(GRAPHS, *RECOMPUTATION)
def recomputed_layers_are_not_captured(
    impl: str, recompute: bool, granularity: str | None, modules: list[str] | None
) -> Verdict:
    """Refuses graphs with full recomputation, which runs each layer twice."""
    if impl == "none" or not recomputes_layers(recompute, granularity):
        return None
    return (
        f"is {impl}, but {MEGATRON}.activation_checkpointing with recompute_granularity full runs each layer twice, "
        "which CUDA graphs cannot; set recompute_granularity to selective, activation_checkpointing to false, or this "
        "to none"
    )


@rule(CAPTURED, GRAPHS, *RECOMPUTATION)
def captured_routers_are_not_recomputed(
    modules: list[str], impl: str, recompute: bool, granularity: str | None, recomputed: list[str] | None
) -> Verdict:
    """Refuses recomputed parts that contain a captured one; they must lie inside the graph or outside."""
    if "moe_router" not in captured(impl, modules):
        return None
    if "moe" not in recomputed_modules(recompute, granularity, recomputed):
        return None
    return (
        f"has moe_router, but {MEGATRON}.recompute_modules holds moe, which contains the router; take either out "
        "(moe_act can be recomputed instead)"
    )


@rule(f"{MEGATRON}.env_vars?", GRAPHS)
def graphs_with_expandable_segments_need_unregistered_nccl(env_vars: dict[str, str] | None, impl: str) -> Verdict:
    """Refuses expandable segments while NCCL registers the buffers of graphs.

    NCCL registers them by address, and expandable segments map the addresses anew: illegal memory accesses.
    """
    settings = env_vars or {}
    name = allocator_that_unmaps(settings)
    if impl == "none" or name is None:
        return None
    found = show(settings["NCCL_GRAPH_REGISTER"]) if "NCCL_GRAPH_REGISTER" in settings else "none"
    return (
        f'needs NCCL_GRAPH_REGISTER: "0" with {name} {show(settings[name])} while {GRAPHS} is {impl}, since NCCL '
        f"would otherwise use addresses of memory that has been remapped; found {found}"
    )


@rule(CAPTURED, GRAPHS, MODULES, OFFLOADING)
def offloading_in_graphs_has_its_libraries(
    modules: list[str], impl: str, offload_modules: list[str] | None, enabled: bool
) -> Verdict:
    """Refuses old versions of torch and Transformer Engine, with which megatron-core refuses copies inside a graph."""
    inside = _offloaded_in_graphs(captured(impl, modules), offloaded(enabled, offload_modules))
    old = too_old(TORCH_2_9, TRANSFORMER_ENGINE_2_14)
    if not inside or not old:
        return None
    return (
        f"captures {quoted(inside)} of {MODULES}, which needs {' and '.join(old)}; install that, or capture other parts"
    )


@rule(CAPTURED, GRAPHS, MODULES, OFFLOADING, PP)
def offloading_in_graphs_has_one_stage(
    modules: list[str], impl: str, offload_modules: list[str] | None, enabled: bool, pp: int
) -> Verdict:
    """Refuses copies inside graphs with pipeline parallelism.

    A pipeline has one graph for each micro-batch, and several of them hold offloaded activations at a time.
    """
    inside = _offloaded_in_graphs(captured(impl, modules), offloaded(enabled, offload_modules))
    if not inside or pp == 1:
        return None
    return (
        f"captures {quoted(inside)} of {MODULES} with {PP} {pp}, but copies inside captured graphs are supported on "
        "one pipeline stage; capture other parts, offload modules outside of the graph, or set the pipeline to 1"
    )


def _offloaded_in_graphs(modules: list[str], moved: list[str]) -> list[str]:
    """Returns the modules that are offloaded inside a graph; another rule refuses a norm at its edge."""
    inside = ["qkv_linear", "core_attn", "attn_proj"] if "attn" in modules else []
    inside += ["mlp_norm"] if {"attn", "mlp"} <= set(modules) else []
    return [name for name in moved if name in inside]
