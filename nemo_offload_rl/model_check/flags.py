"""Finds the keys of a Hugging Face config that differ from its family's defaults, which may explain a wrong result."""

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_offload_rl.config.problems import show
from nemo_offload_rl.model_check.twin import SIZE_KEYS

# Keys that do not change what a model computes.
_BESIDE = frozenset(
    (
        "transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path", "name_or_path", "id2label",
        "label2id", "problem_type", "use_cache", "initializer_range", "output_hidden_states", "output_attentions",
        "output_router_logits", "return_dict", "model_type", "pretraining_tp", "quantization_config", "auto_map",
        "attention_dropout", "router_aux_loss_coef", "is_encoder_decoder", "chunk_size_feed_forward"
    )
)  # fmt: skip


def changed_flags(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the flags of a config that differ from the family's.

    Args:
        config: the model's config, complete (`to_dict()`).
        defaults: a config of the same class without arguments, complete.

    Returns:
        Dotted keys with their values, in the config's order; sizes are left out.
    """
    usual = dict(_flat(defaults))
    absent = object()
    return {
        key: value
        for key, value in _flat(config)
        if (key not in usual or usual[key] != value) and not _same_kinds(value, usual.get(key, absent))
    }


def show_flags(flags: Mapping[str, Any]) -> list[str]:
    """Returns each flag as `key value`."""
    return [f"{key} {show(value)}" for key, value in flags.items()]


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if not prefix and (key in SIZE_KEYS or key in _BESIDE):
            continue
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _same_kinds(value: Any, other: Any) -> bool:
    """Returns whether two lists of unequal length, from models of unequal depth, name the same kinds of layers."""
    if not (isinstance(value, list) and isinstance(other, list) and value and other):
        return False
    return len(value) != len(other) and {repr(item) for item in value} == {repr(item) for item in other}
