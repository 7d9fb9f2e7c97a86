"""Shrinks a Hugging Face config to a model with the same flags that is built and run in a fraction of a second.

Settings that change a model's math stay: activations, biases, tied embeddings, caps, multipliers, the kind of rope and
its base. Sizes become small, in the same relations (query heads for each key and value head, experts in groups).
Thresholds become so small that rows of `ROW_LENGTH` tokens cross them: a window that no row exceeds has no effect.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

ROW_LENGTH = 48
"""Tokens of the longest row compared."""
WINDOW = 8
"""Sliding windows and chunks of attention, in tokens."""
ORIGINAL_LENGTH = 32
"""Training length that rope scaling assumes: rows exceed it, and so do some wavelengths."""
VOCAB_SIZE = 80

_MOST_LAYERS = 8
_NUM_HEADS = 4
_HEAD_DIM = 16

_WINDOW_KEYS = ("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size")
_NUM_EXPERTS_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOPK_KEYS = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
_PERIOD_KEYS = ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step")
_LAYER_COUNT_KEYS = ("first_k_dense_replace", "max_window_layers", "moe_layer_start_index")
"""Keys whose value is the number of first layers that are of another kind."""
_LAYER_INDEX_KEYS = ("mlp_only_layers",)

_SIZES: Mapping[str, int] = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 32,
    "global_head_dim": 2 * _HEAD_DIM,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_nextn_predict_layers": 0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# Sizes that Transformer Engine's and megatron-core's kernels for multi-latent attention support.
_LATENT_SIZES: Mapping[str, int] = {
    "hidden_size": 512,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_head_dim": 192,
    "head_dim": 64,
}
_TOKEN_KEYS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")

SIZE_KEYS = frozenset(
    {"num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"}
    | {"max_position_embeddings", "shared_expert_intermediate_size", "n_group", "topk_group"}
    | {*_SIZES, *_LATENT_SIZES, *_NUM_EXPERTS_KEYS, *_TOPK_KEYS, *_TOKEN_KEYS}
)
"""Keys that determine the size of a model, but not how it computes."""


class TwinlessError(ValueError):
    """Says that a config cannot be shrunk, since it is unlike those of the families that this module knows."""


def twin_config(whole: Any) -> Any:
    """Returns the twin's `PretrainedConfig`: a copy of the model's in which only the shrunk fields are set.

    Raises:
        TwinlessError: the config lacks a field that tells the model's size, or a shrunk field is refused.
    """
    from huggingface_hub.errors import StrictDataclassError

    config = copy.deepcopy(whole)
    before = config.to_dict()
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        if key in before and not _is_count(before, key):
            raise TwinlessError(f"The model's config has {key} {before[key]!r}; give a whole number of at least 1.")
    try:
        for key, value in twin_of(before).items():
            if value != before[key]:
                setattr(config, key, value)
    except (StrictDataclassError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise TwinlessError(
            f"The model check cannot make a small model of this {config.model_type} config ({type(error).__name__}: "
            f"{error}); choose a model of another family, or set policy.skip_model_check to true to train it unchecked."
        ) from error
    return config


def twin_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of a small model with the flags of a large one.

    Args:
        config: a Hugging Face config as a mapping, complete (`to_dict()`).

    Returns:
        A config with the same keys; only keys that it has are changed.
    """
    twin = dict(config)
    twin |= {key: size for key, size in _SIZES.items() if _is_count(config, key)}
    twin |= {key: WINDOW for key in _WINDOW_KEYS if _is_count(config, key)}
    twin |= dict.fromkeys((key for key in _TOKEN_KEYS if key in config), None)  # padding_idx gets no gradient
    twin |= _heads(config)
    twin |= _experts(config)
    twin |= _layers(config)
    twin |= _positions(config, twin)
    return twin


def _is_count(config: Mapping[str, Any], key: str) -> bool:
    """Returns whether the config has a number above 0 at this key; null and 0 are flags, which stay."""
    value = config.get(key)
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _heads(config: Mapping[str, Any]) -> dict[str, Any]:
    if _is_count(config, "kv_lora_rank"):
        latent = {key: size for key, size in _LATENT_SIZES.items() if _is_count(config, key)}
        return latent | {key: _NUM_HEADS for key in ("num_attention_heads", "num_key_value_heads") if key in config}
    out: dict[str, Any] = {"num_attention_heads": _NUM_HEADS, "hidden_size": _NUM_HEADS * _HEAD_DIM}
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads")
    if groups is not None:
        out["num_key_value_heads"] = _NUM_HEADS if groups == heads else 1 if groups == 1 else _NUM_HEADS // 2
    if _is_count(config, "head_dim"):
        out["head_dim"] = _HEAD_DIM
        width = config["head_dim"] * heads
        if width != config["hidden_size"]:  # keep the two sizes different
            out["hidden_size"] = out["hidden_size"] // 2 if width > config["hidden_size"] else out["hidden_size"] * 2
    if _is_count(config, "query_pre_attn_scalar"):
        head_dim = config["head_dim"] if _is_count(config, "head_dim") else config["hidden_size"] // heads
        out["query_pre_attn_scalar"] = max(1, round(config["query_pre_attn_scalar"] * _HEAD_DIM / head_dim))
    return out


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    keys = [key for key in _NUM_EXPERTS_KEYS if _is_count(config, key)]
    if not keys:
        return out
    num_experts = config[keys[0]]
    groups = config["n_group"] if _is_count(config, "n_group") else 1
    twin_experts = min(num_experts, 8 if groups > 1 else 4)
    out |= dict.fromkeys(keys, twin_experts)
    if groups > 1:
        out["n_group"] = 2
        if _is_count(config, "topk_group"):
            out["topk_group"] = 1 if config["topk_group"] < groups else 2
    for key in _TOPK_KEYS:
        if _is_count(config, key):
            out[key] = twin_experts if config[key] == num_experts else min(config[key], 2)
    if _is_count(config, "shared_expert_intermediate_size"):
        out["shared_expert_intermediate_size"] = 64
    return out


def _layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a few layers, one of each kind at least, in the model's order."""
    count = config["num_hidden_layers"]
    out: dict[str, Any] = {key: min(config[key], 4) for key in _PERIOD_KEYS if _is_count(config, key)}
    per_layer = [key for key, value in config.items() if isinstance(value, list | tuple) and len(value) == count > 2]
    per_layer = [key for key in per_layer if key not in _LAYER_INDEX_KEYS]
    kinds = [_kind({**config, **out}, per_layer, index) for index in range(count)]
    chosen = _chosen_layers(kinds)
    out["num_hidden_layers"] = len(chosen)
    out |= {key: [config[key][index] for index in chosen] for key in per_layer}
    for key in _LAYER_COUNT_KEYS:
        if _is_count(config, key):
            out[key] = sum(index < config[key] for index in chosen)
    for key in _LAYER_INDEX_KEYS:
        if config.get(key):
            out[key] = [place for place, index in enumerate(chosen) if index in config[key]]
    return out


def _kind(config: Mapping[str, Any], per_layer: Sequence[str], index: int) -> tuple[Any, ...]:
    """Returns the properties that distinguish a layer from the model's others, as far as the config's keys show."""
    return (
        *(repr(config[key][index]) for key in per_layer),
        *(index < config[key] for key in _LAYER_COUNT_KEYS if _is_count(config, key)),
        *(index in config[key] for key in _LAYER_INDEX_KEYS if config.get(key)),
        *((index + 1) % config[key] == 0 for key in _PERIOD_KEYS if _is_count(config, key)),
    )


def _chosen_layers(kinds: Sequence[tuple[Any, ...]]) -> list[int]:
    """Returns the indices of the layers to keep: the first ones if they include every kind, as in periodic patterns."""
    first_of = {kind: kinds.index(kind) for kind in kinds}
    prefix = max(first_of.values()) + 2  # one more, so that the repetition of a pattern is included
    if prefix <= _MOST_LAYERS:
        return list(range(min(max(prefix, 2), len(kinds))))
    starts = [next(group)[0] for _, group in itertools.groupby(enumerate(kinds), key=lambda item: item[1])]
    return starts if len(starts) <= _MOST_LAYERS else sorted(first_of.values())


def _positions(config: Mapping[str, Any], twin: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    ropes = [rope for key in ("rope_parameters", "rope_scaling") for rope in _ropes(config.get(key))]
    lengths = [rope["original_max_position_embeddings"] for rope in ropes if _has_original_length(rope)]
    if _is_count(config, "original_max_position_embeddings"):
        lengths.append(config["original_max_position_embeddings"])
        out["original_max_position_embeddings"] = ORIGINAL_LENGTH
    if _is_count(config, "max_position_embeddings"):
        longest = config["max_position_embeddings"]
        scaled = any(rope.get("rope_type", rope.get("type", "default")) not in ("default", "linear") for rope in ropes)
        if lengths:
            out["max_position_embeddings"] = max(1, round(ORIGINAL_LENGTH * longest / lengths[0]))
        else:
            out["max_position_embeddings"] = ORIGINAL_LENGTH if scaled else ROW_LENGTH
    head_dim = twin.get("qk_rope_head_dim") or _HEAD_DIM
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key):
            out[key] = _shrunk_rope(config[key], head_dim)
    return out


def _ropes(value: Any) -> list[Mapping[str, Any]]:
    """Returns the parameters of each kind of rope; some families have one kind for each kind of layer."""
    if not isinstance(value, Mapping):
        return []
    nested = [inner for inner in value.values() if isinstance(inner, Mapping)]
    return nested or [value]


def _has_original_length(rope: Mapping[str, Any]) -> bool:
    return _is_count(rope, "original_max_position_embeddings")


def _shrunk_rope(rope: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    out: dict[str, Any] = {
        key: _shrunk_rope(value, head_dim) if isinstance(value, Mapping) else value for key, value in rope.items()
    }
    if _has_original_length(out):
        out["original_max_position_embeddings"] = ORIGINAL_LENGTH
    for key in ("short_factor", "long_factor"):
        if isinstance(out.get(key), list):
            out[key] = out[key][: head_dim // 2]
    if isinstance(out.get("mrope_section"), list):
        whole = sum(out["mrope_section"])
        ends = [round(head_dim // 2 * part / whole) for part in itertools.accumulate(out["mrope_section"])]
        out["mrope_section"] = [end - start for start, end in itertools.pairwise([0, *ends])]
    return out
