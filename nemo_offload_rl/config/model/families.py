"""Tells models apart by family, kinds of layers, and what Megatron or vLLM would compute differently."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_offload_rl.config.problems import show, show_choices


@dataclass(frozen=True)
class Family:
    """Describes a family; None where its config decides, or where nothing is known.

    Attributes:
        bridge: module and class of Megatron-Bridge that `mcore.architectures` corrects, so that the model computes what
            transformers does whatever the config says; None where only the model check compares the two.
        has_known_sizes: whether the plan computes its sizes before it is built.
        refused: why Megatron cannot compute it; continues "The model".
        experts: whether layers are mixtures of experts; with True, in every layer unless the config says otherwise.
        qkv_bias: whether the query, key and value projections have biases; None for `attention_bias`.
        output_bias: whether attention's output projection has a bias; None for `attention_bias`.
        mlp_bias: whether dense MLPs have biases; None for `mlp_bias`.
        qk_norm: whether queries and keys are normalised.
        tied_embeddings: whether the output layer has the embedding's weight; None for `tie_word_embeddings`.
        windows_by_layer: whether `layer_types` names the layers with a sliding window; otherwise all layers have it.
        tanh_gelu: whether Megatron-Bridge always uses the tanh approximation of GELU, whatever the config says.
        vllm_lacks_output_bias: whether vLLM ignores a bias of attention's output projection.
    """

    bridge: str | None = None
    has_known_sizes: bool = False
    refused: str | None = None
    experts: bool | None = None
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = None
    qk_norm: bool = False
    tied_embeddings: bool | None = None
    windows_by_layer: bool = False
    tanh_gelu: bool = False
    vllm_lacks_output_bias: bool = False


def _corrected(bridge: str, **values: Any) -> Family:
    return Family(bridge=bridge, has_known_sizes=True, **{"experts": False, **values})


FAMILIES: Mapping[str, Family] = {
    "llama": _corrected("llama.llama_bridge:LlamaBridge"),
    "mistral": _corrected("mistral.mistral_bridge:MistralBridge", qkv_bias=False, output_bias=False, mlp_bias=False),
    "qwen2": _corrected(
        "qwen.qwen2_bridge:Qwen2Bridge", qkv_bias=True, output_bias=False, mlp_bias=False, windows_by_layer=True
    ),
    "qwen3": _corrected(
        "qwen.qwen3_bridge:Qwen3Bridge",
        mlp_bias=False,
        qk_norm=True,
        windows_by_layer=True,
        vllm_lacks_output_bias=True,
    ),
    "qwen3_moe": _corrected(
        "qwen.qwen3_moe_bridge:Qwen3MoEBridge",
        experts=True,
        mlp_bias=False,
        qk_norm=True,
        vllm_lacks_output_bias=True,
    ),
    "mixtral": Family(experts=True),
    # Megatron-Bridge has no names for the biases of gemma's attention_bias, so a model with them cannot be built.
    "gemma": Family(
        has_known_sizes=True,
        experts=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        tied_embeddings=True,
        tanh_gelu=True,
    ),
    "gemma2": Family(
        experts=False,
        refused=(
            "is of the family gemma2, whose capped scores, norms behind layers and alternating windows Megatron-Bridge "
            "0.6.2 does not compute as transformers does; choose a model of another family, such as qwen3 or llama"
        ),
    ),
    "gemma3_text": Family(experts=False, tanh_gelu=True),
    "gemma4_text": Family(tanh_gelu=True),
}

CORRECTED_FAMILIES = tuple(name for name, family in FAMILIES.items() if family.bridge is not None)


def family_of(fields: Mapping[str, Any]) -> Family:
    """Returns the family of a model; one of which nothing is known, if it is not listed.

    Args:
        fields: the known fields of its Hugging Face config.
    """
    return FAMILIES.get(str(fields.get("model_type")), Family())


# Names of the number of experts in Hugging Face configs.
NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")

NUM_LAYERS_KEYS = ("num_hidden_layers",)
NUM_HEADS_KEYS = ("num_attention_heads",)


def model_fields(
    model_name: str, hf_config: Mapping[str, Any] | None, overrides: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns the fields of the model's Hugging Face config that can be read without transformers.

    Args:
        model_name: `policy.model_name`.
        hf_config: `policy.hf_config`.
        overrides: `policy.hf_config_overrides`.

    Returns:
        The fields of `hf_config` or, without it, of a folder's config.json, with the overrides applied.
    """
    return {**(hf_config or _config_of(Path(model_name)) or {}), **(overrides or {})}


def count_of(fields: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    """Returns the count that one of these fields gives; None if none does, which leaves the check to the worker."""
    found = next((fields[key] for key in keys if key in fields and fields[key] is not None), None)
    return found if isinstance(found, int) else None


def has_experts(
    model_name: str,
    hf_config: Mapping[str, Any] | None,
    overrides: Mapping[str, Any] | None,
    moe_layer_freq: int | list[int] | None,
) -> bool | None:
    """Returns whether some layer of the model is a mixture of experts; None if only the built model can tell.

    Args:
        model_name: as for `model_fields`.
        hf_config: likewise.
        overrides: likewise.
        moe_layer_freq: Megatron's field: the interval of layers with experts, or for each layer whether it has experts.
    """
    fields = model_fields(model_name, hf_config, overrides)
    family = family_of(fields)
    num_experts = count_of(fields, NUM_EXPERTS_KEYS)
    if num_experts is None or num_experts <= 1:
        return False if num_experts is not None or family.experts is False else None
    if moe_layer_freq is not None:
        return 1 in moe_layer_freq if isinstance(moe_layer_freq, list) else True
    by_layer = expert_layers(fields) if family.experts and family.bridge is not None else None
    return by_layer is None or any(by_layer)


def expert_layers(fields: Mapping[str, Any]) -> list[bool] | None:
    """Returns for each layer of a Qwen3-MoE whether it has experts; None if the number of layers is unknown.

    Args:
        fields: the fields of its Hugging Face config, interpreted as transformers does.
    """
    num_layers = count_of(fields, NUM_LAYERS_KEYS)
    if num_layers is None:
        return None
    dense = fields["mlp_only_layers"] if "mlp_only_layers" in fields else None
    step = count_of(fields, ("decoder_sparse_step",)) or 1
    return [layer not in (dense or []) and (layer + 1) % step == 0 for layer in range(num_layers)]


def _config_of(folder: Path) -> dict[str, Any] | None:
    """Returns the folder's config.json; None if there is none that can be read, which the worker then reports."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError):
        return None
    return fields if isinstance(fields, dict) else None


FUSED_ACTIVATIONS = ("silu", "swish")
# Fields of a model that reads images or sound, in its own config or, for omni models, around it.
_TOWERS = ("vision_config", "audio_config", "sound_config", "thinker_config")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_UNSCALED = (None, "default", "llama3")  # their max_position_embeddings counts what scaling has added
_ALLOW_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def check_model(fields: Mapping[str, Any], policy: Mapping[str, Any]) -> None:
    """Refuses a model, or a setting for it, with which Megatron or vLLM would compute something else than transformers.

    Args:
        fields: the fields of the model's Hugging Face config.
        policy: the recipe's section `policy`.

    Raises:
        ValueError: the model or the setting is not supported; the message gives the reason and the remedy.
    """
    megatron_cfg = policy["megatron_cfg"]
    for key, found in (
        ("The model ", why_unsupported(fields)),
        ("policy.megatron_cfg.freeze_config ", why_not_frozen(fields, megatron_cfg)),
        ("policy.megatron_cfg.bias_activation_fusion ", why_unfused(fields, megatron_cfg)),
        ("", why_unchunked(fields, policy)),
        ("policy.generation.backend ", why_not_generated(fields, policy)),
        ("policy.generation.vllm_cfg.max_model_len ", why_too_long(fields, policy)),
    ):
        if found is not None:
            raise ValueError(f"{key}{found}.")


def why_unsupported(fields: Mapping[str, Any]) -> str | None:
    """Returns why Megatron cannot compute a model correctly, with rule and remedy; None if no reason is known.

    Args:
        fields: the known fields of its Hugging Face config.
    """
    family = family_of(fields)
    if family.bridge is None:
        return family.refused
    return next((found for rope in _ropes(fields) if (found := _rope(rope))), None) or _experts(family, fields)


def _ropes(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns what a config says of rotary embeddings, under transformers' present and former name."""
    return [fields[key] for key in ("rope_parameters", "rope_scaling") if isinstance(fields.get(key), Mapping)]


def why_not_frozen(fields: Mapping[str, Any], megatron_cfg: Mapping[str, Any]) -> str | None:
    """Returns why parts of a model cannot be frozen; None if they can, or if the model has none, as in NeMo-RL.

    Args:
        fields: the known fields of the model's Hugging Face config.
        megatron_cfg: the recipe's section `policy.megatron_cfg`.
    """
    towers = [name for name in _TOWERS if name in fields and fields[name] is not None]
    if not towers or not megatron_cfg["freeze_config"]:
        return None
    return (
        f"is {show(megatron_cfg['freeze_config'])}, but the model has a {towers[0]}, and parts of such a model cannot "
        "be frozen here; choose a text-only model, or delete the key"
    )


def why_unfused(fields: Mapping[str, Any], megatron_cfg: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with `policy.megatron_cfg.bias_activation_fusion` for a model; None if nothing is.

    megatron-core has fused kernels for SiLU and for an approximation of GELU (log-probs off by 1e-4). It uses the
    latter only for exact GELU, and refuses an activation function that is the approximation itself.

    Args:
        fields: the fields of the model's Hugging Face config.
        megatron_cfg: the recipe's section `policy.megatron_cfg`.
    """
    fused = "bias_activation_fusion" in megatron_cfg and megatron_cfg["bias_activation_fusion"]
    family = family_of(fields)
    if fused and family.tanh_gelu:
        return (
            f"is true, but models of the family {fields['model_type']} compute GELU approximated by tanh, for which "
            "megatron-core has no fused kernel; set it to false"
        )
    if not fused or family.bridge is None:
        return None
    activation = fields["hidden_act"] if "hidden_act" in fields else "silu"
    if activation in FUSED_ACTIVATIONS:
        return None
    return (
        f"is true, but the model's hidden_act is {show(activation)}, which megatron-core's fused kernel does not "
        "compute exactly; set it to false"
    )


def why_not_generated(fields: Mapping[str, Any], policy: Mapping[str, Any]) -> str | None:
    """Returns why the recipe's engine would generate with another model than is trained; None if it would not.

    Args:
        fields: the fields of the model's Hugging Face config.
        policy: the recipe's section `policy`.
    """
    if "generation" not in policy or policy["generation"]["backend"] != "vllm":
        return None
    family = family_of(fields)
    kinds = fields.get("layer_types") or []
    windows, window = kinds.count("sliding_attention"), fields.get("sliding_window")
    longest = (policy["generation"].get("vllm_cfg") or {"max_model_len": math.inf})["max_model_len"]
    # A window in all layers instead of none changes nothing for rows within it; one in some vLLM refuses itself.
    if family.windows_by_layer and window is not None and windows < len(kinds) and (windows or longest > window):
        return (
            f"is vllm, whose {fields['model_type']} models have sliding windows in all layers or in none, whatever "
            f"layer_types says, but the model has them in {windows} of {len(kinds)} layers; set the backend to "
            "transformers, or in policy.hf_config_overrides sliding_window to null and all of layer_types to "
            "full_attention"
        )
    rope: Mapping[str, Any] = next(iter(_ropes(fields)), {})
    has = {key for key in ("attention_factor", "mscale", "mscale_all_dim") if rope.get(key)}
    if family.bridge is not None and _rope_type(rope) == "yarn" and not _has_usual_scale(rope):
        keys = " and ".join(sorted(has))
        return (
            "is vllm, which computes yarn's attention factor from its factor alone, but the model's rope_parameters "
            f"have {keys}; set the backend to transformers, or give rope_parameters without {keys} in "
            "policy.hf_config_overrides"
        )
    has_bias = "attention_bias" in fields and fields["attention_bias"]
    if not family.vllm_lacks_output_bias or not has_bias:
        return None
    return (
        f"is vllm, whose {fields['model_type']} models have no bias in attention's output projection, but the model "
        "has attention_bias true, and vLLM would ignore that bias; set the backend to transformers, or attention_bias "
        "to false in policy.hf_config_overrides"
    )


def why_too_long(fields: Mapping[str, Any], policy: Mapping[str, Any]) -> str | None:
    """Returns why vLLM refuses sequences of the recipe's length when an engine starts; None if it does not.

    This is vLLM's `_get_and_verify_max_len`.

    Args:
        fields: the fields of the model's Hugging Face config.
        policy: the recipe's section `policy`.
    """
    if "generation" not in policy or policy["generation"]["backend"] != "vllm":
        return None
    section = policy["generation"].get("vllm_cfg")  # a worker of one's own needs none
    if section is None or fields.get("model_max_length"):
        return None
    if _ALLOW_LONG in os.environ or _ALLOW_LONG in (section["env_vars"] or {}):
        return None
    rope: Mapping[str, Any] = next(iter(_ropes(fields)), {})
    kind = _rope_type(rope)
    longest = fields.get("max_position_embeddings")
    if kind == "yarn":
        longest = rope.get("original_max_position_embeddings") or longest
    if longest and kind not in _UNSCALED and "gemma3" not in fields["model_type"]:
        longest *= rope.get("factor") or 1
    if not longest or section["max_model_len"] <= longest:
        return None
    return (
        f"is {section['max_model_len']}, but vLLM takes at most the model's {longest:g} positions; lower it and "
        "policy.max_total_sequence_length, or change max_position_embeddings or rope_parameters in "
        "policy.hf_config_overrides"
    )


def why_unchunked(fields: Mapping[str, Any], policy: Mapping[str, Any]) -> str | None:
    """Returns why a model's logits cannot be computed in chunks of tokens; None if they can, or if they are not.

    Args:
        fields: the fields of the model's Hugging Face config.
        policy: the recipe's section `policy`.
    """
    capped = fields["final_logit_softcapping"] if "final_logit_softcapping" in fields else None
    on = [
        f"policy.{key} {value}"
        for key, value in (
            ("megatron_cfg.use_fused_linear_logprobs", policy["megatron_cfg"]["use_fused_linear_logprobs"] and "true"),
            ("logprob_chunk_size", policy["logprob_chunk_size"]),
        )
        if value
    ]
    if capped is None or not on:
        return None
    return (
        f"{' and '.join(on)} would compute logits in chunks, but the model caps its logits (final_logit_softcapping "
        f"{show(capped)}), which the chunked computation does not support; set "
        "policy.megatron_cfg.use_fused_linear_logprobs to false and policy.logprob_chunk_size to null"
    )


def _has_usual_scale(yarn: Mapping[str, Any]) -> bool:
    """Returns whether YaRN's attention factor is the one that follows from its factor, as transformers computes it."""

    def scale(mscale: float = 1) -> float:
        return 0.1 * mscale * math.log(max(yarn.get("factor") or 1, 1)) + 1

    one, other = yarn.get("mscale"), yarn.get("mscale_all_dim")
    own = yarn.get("attention_factor") or (scale(one) / scale(other) if one and other else scale())
    return math.isclose(own, scale(), rel_tol=1e-6)


def _rope_type(rope: Mapping[str, Any]) -> Any:
    """Returns the kind of rotary embeddings, which older configs call `type`."""
    return next((rope[key] for key in ("rope_type", "type") if key in rope), "default")


def _rope(rope: Mapping[str, Any]) -> str | None:
    kind = _rope_type(rope)
    if kind not in ROPE_TYPES:
        return (
            f"has rotary embeddings of rope_type {show(kind)}, which Megatron cannot follow; it can with "
            f"{show_choices(ROPE_TYPES)}: give one of these as rope_parameters in policy.hf_config_overrides"
        )
    part = rope["partial_rotary_factor"] if "partial_rotary_factor" in rope else None
    if kind != "default" and part not in (None, 1, 1.0):
        return (
            f"has rope_parameters with rope_type {kind} and partial_rotary_factor {show(part)}, but its attention "
            "rotates whole heads; take partial_rotary_factor out"
        )
    return None


def _experts(family: Family, fields: Mapping[str, Any]) -> str | None:
    if not family.experts:
        return None
    if count_of(fields, NUM_EXPERTS_KEYS) == 0:
        return "is of the family qwen3_moe and has num_experts 0; give experts, or a dense model of the family qwen3"
    top_k = count_of(fields, ("num_experts_per_tok",))
    if top_k == 1 and "norm_topk_prob" in fields and fields["norm_topk_prob"] is True:
        return (
            "has num_experts_per_tok 1 with norm_topk_prob true, with which a router has no gradient and megatron-core "
            "refuses to train; set norm_topk_prob to false in policy.hf_config_overrides, or num_experts_per_tok to 2 "
            "or more"
        )
    return None
