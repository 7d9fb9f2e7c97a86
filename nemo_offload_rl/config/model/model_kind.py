"""Determines the kinds of layers of a recipe's model before anything is built: dense MLPs, experts, or both."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_offload_rl.config.model.families import family_of
from nemo_offload_rl.config.problems import show

# Names of the number of experts in Hugging Face configs.
NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")

NUM_LAYERS_KEYS = ("num_hidden_layers",)
NUM_HEADS_KEYS = ("num_attention_heads",)


@dataclass(frozen=True)
class ModelKind:
    """Says which kinds of layers a model has; None if only the built model can tell.

    Attributes:
        name: the model's name in messages.
        has_experts: whether some layer is a mixture of experts.
        has_dense_mlps: whether some layer has a dense MLP.
    """

    name: str
    has_experts: bool | None
    has_dense_mlps: bool | None


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


def model_kind(
    model_name: str,
    hf_config: Mapping[str, Any] | None,
    overrides: Mapping[str, Any] | None,
    moe_layer_freq: int | list[int] | None,
) -> ModelKind:
    """Returns the kinds of the model's layers.

    Args:
        model_name: as for `model_fields`.
        hf_config: likewise.
        overrides: likewise.
        moe_layer_freq: Megatron's field: the interval of layers with experts, or for each layer whether it has experts.
    """
    name = "policy.hf_config" if hf_config else f"the model {show(model_name)}"
    fields = model_fields(model_name, hf_config, overrides)
    family = family_of(fields)
    num_experts = count_of(fields, NUM_EXPERTS_KEYS)
    if num_experts is None or num_experts <= 1:
        is_dense = num_experts is not None or family.experts is False
        return ModelKind(name, has_experts=False, has_dense_mlps=True) if is_dense else ModelKind(name, None, None)
    if moe_layer_freq is not None:
        return ModelKind(
            name, has_experts=has_expert_layers(moe_layer_freq), has_dense_mlps=has_dense_layers(moe_layer_freq)
        )
    if family.experts and family.bridge is not None:
        by_layer = expert_layers(fields)
        if by_layer is not None:
            return ModelKind(name, has_experts=any(by_layer), has_dense_mlps=not all(by_layer))
    return ModelKind(name, has_experts=True, has_dense_mlps=False if family.experts else None)


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


def has_expert_layers(moe_layer_freq: int | list[int]) -> bool:
    """Returns whether a model that has experts has a layer with experts.

    Args:
        moe_layer_freq: Megatron's field: the interval of layers with experts, or for each layer whether it has experts.
    """
    return 1 in moe_layer_freq if isinstance(moe_layer_freq, list) else True


def has_dense_layers(moe_layer_freq: int | list[int]) -> bool:
    """Returns whether a mixture of experts also has dense layers.

    Args:
        moe_layer_freq: Megatron's field: the interval of layers with experts, or for each layer whether it has experts.
    """
    return 0 in moe_layer_freq if isinstance(moe_layer_freq, list) else moe_layer_freq > 1


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
