"""Lists what is known of each family of models: one row for each `model_type` of transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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

_UNKNOWN = Family()


def family_of(fields: Mapping[str, Any]) -> Family:
    """Returns the family of a model; one of which nothing is known, if it is not listed.

    Args:
        fields: the known fields of its Hugging Face config.
    """
    return FAMILIES.get(str(fields.get("model_type")), _UNKNOWN)
