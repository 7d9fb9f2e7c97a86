"""Checks what a recipe asks of a model's layers, once Megatron-Bridge has read the model, of which rules know less."""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_offload_rl.config.megatron import (
    ACTIVATION_MODULES,
    EXPERT_MODULES,
    GRAPH_MODULES_KEY,
    MLP_TILES_KEY,
    OFFLOAD_MODULES_KEY,
)
from nemo_offload_rl.config.schema.megatron import MegatronConfig
from nemo_offload_rl.config.schema.policy import PolicyConfig


def check_layers(policy: PolicyConfig, provider: Any, overrides: Mapping[str, Any], *, is_corrected: bool) -> None:
    """Refuses what the model's layers do not have, and what they would compute wrongly.

    Args:
        policy: the recipe's policy section.
        provider: as Megatron-Bridge made it from the model's config.
        overrides: the fields that the recipe sets on it.
        is_corrected: whether `architectures` gives the model the layers of its config.

    Raises:
        ValueError: the recipe offloads or captures a module that no layer has, tiles the MLPs of a model with experts,
            gathers packed rows of different lengths, has a cp_comm_type that attention cannot be computed with, or
            gives experts to other layers than the model's weights.
    """
    cfg = policy["megatron_cfg"]
    freq = overrides.get("moe_layer_freq", provider.moe_layer_freq)
    has_experts = _by_layer(freq if (provider.num_moe_experts or 0) > 1 else [0], provider.num_layers)
    _check_modules(cfg, has_experts)
    key = "moe_token_dispatcher_type"
    if overrides.get(key, getattr(provider, key)) == "allgather" and provider.num_moe_experts:
        _check_gathered_rows(cfg, packs=policy["sequence_packing"]["enabled"])
    if cfg["context_parallel_size"] > 1:
        _check_context_parallel(cfg, provider, overrides.get("cp_comm_type") or "p2p")
    if is_corrected and provider.num_moe_experts is not None:
        own = _by_layer(provider.moe_layer_freq, provider.num_layers)
        if _by_layer(freq, provider.num_layers) != own:
            shown = str(own) if len(own) <= 64 else f"{str(own[:64])[:-1]}, ...]"
            raise ValueError(
                f"policy.megatron_cfg.moe_layer_freq is {freq}, but mlp_only_layers and decoder_sparse_step of the "
                f"model give {shown} (1 for a layer with experts); leave it out, or change these two in "
                "policy.hf_config_overrides."
            )


def _by_layer(freq: int | list[int], num_layers: int | None) -> list[int]:
    """Returns 1 for each layer with experts and 0 for others, as `get_gpt_decoder_layer_specs` reads the field.

    A hybrid model's number of layers is not known yet; then these are the layers of one interval.
    """
    return list(freq) if isinstance(freq, list) else [int(layer % freq == 0) for layer in range(num_layers or freq)]


def _check_modules(cfg: MegatronConfig, has_experts: Sequence[int]) -> None:
    """Refuses to offload, capture or tile modules that no layer has.

    A tile that is routed on its own has other auxiliary losses and capacities than its micro-batch.
    """
    tile = cfg["mlp_tile_tokens"]
    if tile is not None and any(has_experts):
        raise ValueError(
            f"{MLP_TILES_KEY} is {tile}, but the model has layers with experts, whose router needs all tokens of a "
            "micro-batch at once; set it to null, and list moe in policy.megatron_cfg.recompute_modules to save memory."
        )
    offloaded = (cfg["offload_modules"] or []) if cfg["fine_grained_activation_offloading"] else []
    captured = cfg["cuda_graph_modules"] if cfg["cuda_graph_impl"] != "none" else []
    absent = [] if any(has_experts) else [repr(name) for name in offloaded if name in EXPERT_MODULES]
    if absent:
        dense = ", ".join(name for name in ACTIVATION_MODULES if name not in EXPERT_MODULES)
        raise ValueError(
            f"{OFFLOAD_MODULES_KEY}: names {' and '.join(absent)}, which only a mixture-of-experts model has, but the "
            f"policy's model is a dense model; a dense model has {dense}"
        )
    absent = [] if any(has_experts) else [repr(name) for name in captured if name.startswith("moe_")]
    if absent:
        raise ValueError(
            f"{GRAPH_MODULES_KEY}: names {' and '.join(absent)}, which only mixture-of-experts layers have, and the "
            "model is dense; use attn and mlp"
        )
    if "mlp" in captured and all(has_experts):
        raise ValueError(
            f"{GRAPH_MODULES_KEY}: names 'mlp', which is captured in dense layers, and every layer of the model is a "
            "mixture of experts; use moe_router"
        )


def _check_gathered_rows(cfg: MegatronConfig, *, packs: bool) -> None:
    """Refuses the allgather dispatcher, perhaps the bridge's or megatron-core's default, with rows that differ.

    Tensor-parallel ranks have the same rows; other ranks that share a layer's experts have not.
    """
    expert_ranks = cfg["expert_model_parallel_size"] * cfg["expert_tensor_parallel_size"]
    if packs and (cfg["pipeline_model_parallel_size"] > 1 or expert_ranks > cfg["tensor_model_parallel_size"]):
        raise ValueError(
            "policy.megatron_cfg.moe_token_dispatcher_type is allgather, which does not support packed rows on a "
            "pipeline or of different data-parallel ranks; set it to alltoall."
        )


def _check_context_parallel(cfg: MegatronConfig, provider: Any, comm_type: str) -> None:
    """Refuses what attention of Transformer Engine does not compute over context-parallel ranks."""
    kinds = {"p2p": True, "a2a": True, "all_gather": True}
    ranks = cfg["context_parallel_size"] * cfg["tensor_model_parallel_size"]
    why = []
    if (provider.num_query_groups or provider.num_attention_heads) % ranks:
        why.append(f"key and value heads that {ranks} ranks cannot divide")
        kinds["a2a"] = False
    if provider.softmax_type != "vanilla":
        why.append(f"a softmax_type of {provider.softmax_type}")
        kinds["p2p"] = kinds["all_gather"] = False
    if provider.window_size is not None:
        why.append("sliding windows")
        kinds["p2p"] = False
    if not kinds[comm_type]:
        other = " or ".join(kind for kind, computes in kinds.items() if computes)
        remedy = f"set it to {other}" if other else "set policy.megatron_cfg.context_parallel_size to 1"
        raise ValueError(
            f"policy.megatron_cfg.cp_comm_type is {comm_type}, but the model has {' and '.join(why)}, which "
            f"Transformer Engine does not compute with it; {remedy}."
        )
