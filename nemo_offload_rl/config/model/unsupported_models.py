"""Finds models that Megatron or vLLM would compute differently from transformers, by their Hugging Face config."""

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_offload_rl.config.model.families import Family, family_of
from nemo_offload_rl.config.model.model_kind import NUM_EXPERTS_KEYS, count_of
from nemo_offload_rl.config.problems import show, show_choices

FUSED_ACTIVATIONS = ("silu", "swish")
# Fields of a model that reads images or sound, in its own config or, for omni models, around it.
_TOWERS = ("vision_config", "audio_config", "sound_config", "thinker_config")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def check_model(fields: Mapping[str, Any], policy: Mapping[str, Any]) -> None:
    """Refuses a model, or a setting for it, with which Megatron or vLLM would compute something else than transformers.

    Args:
        fields: the fields of the model's Hugging Face config.
        policy: the recipe's section `policy`.

    Raises:
        ValueError: the model or the setting is not supported; the message gives the reason and the remedy.
    """
    if (found := why_unsupported(fields)) is not None:
        raise ValueError(f"The model {found}.")
    if (found := why_not_frozen(fields, policy["megatron_cfg"])) is not None:
        raise ValueError(f"policy.megatron_cfg.freeze_config {found}.")
    if (found := why_unfused(fields, policy["megatron_cfg"])) is not None:
        raise ValueError(f"policy.megatron_cfg.bias_activation_fusion {found}.")
    if (found := why_unchunked(fields, policy)) is not None:
        raise ValueError(f"{found}.")
    if (found := why_not_generated(fields, policy)) is not None:
        raise ValueError(f"policy.generation.backend {found}.")


def why_unsupported(fields: Mapping[str, Any]) -> str | None:
    """Returns why Megatron cannot compute a model correctly, with rule and remedy; None if no reason is known.

    Args:
        fields: the known fields of its Hugging Face config.
    """
    family = family_of(fields)
    if family.bridge is None:
        return family.refused
    return next((found for rope in _ropes(fields) if (found := _rope(rope))), None) or _experts(family, fields)


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
    has_bias = "attention_bias" in fields and fields["attention_bias"]
    if not family_of(fields).vllm_lacks_output_bias or not has_bias:
        return None
    return (
        f"is vllm, whose {fields['model_type']} models have no bias in attention's output projection, but the model "
        "has attention_bias true, and vLLM would ignore that bias; set the backend to transformers, or attention_bias "
        "to false in policy.hf_config_overrides"
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


def _ropes(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the settings of rotary embeddings, under transformers' present and former name."""
    for key in ("rope_parameters", "rope_scaling"):
        if key in fields and isinstance(fields[key], Mapping):
            yield fields[key]


def _rope(rope: Mapping[str, Any]) -> str | None:
    kind = next((rope[key] for key in ("rope_type", "type") if key in rope), "default")
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
