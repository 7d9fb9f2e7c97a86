"""Checks the ranges of values in a Hugging Face config, which transformers does not."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.config.problems import show


@dataclass(frozen=True)
class _Range:
    """Defines the range of the fields whose names match a pattern.

    Attributes:
        names: a pattern that matches whole names.
        rule: the rule in words.
        least: the smallest value.
        most: the largest value.
        excludes_least: whether values must be above `least`.
    """

    names: re.Pattern[str]
    rule: str
    least: float
    most: float = math.inf
    excludes_least: bool = False

    def has(self, value: float) -> bool:
        above = value > self.least if self.excludes_least else value >= self.least
        return above and value <= self.most


# The first range that matches a name counts; the first two are for sizes. Layers have an upper limit because the checks
# and transformers visit each of them; the deepest models have some hundred.
_RANGES = (
    _Range(re.compile(r"num_hidden_layers"), "at least 1 and at most 10000", 1, 10_000),
    _Range(
        re.compile(
            r"num_attention_heads|num_key_value_heads|hidden_size|head_dim|vocab_size"
            r"|max_position_embeddings|num_experts_per_tok|decoder_sparse_step|kv_lora_rank|q_lora_rank"
            r"|qk_nope_head_dim|qk_rope_head_dim|v_head_dim|moe_intermediate_size|n_group|topk_group"
            r"|original_max_position_embeddings"
        ),
        "at least 1",
        1,
    ),
    _Range(re.compile(r".*(dropout|pdrop|layerdrop|dropout_p|dropout_prob|drop_rate|drop_prob)"), "from 0 to 1", 0, 1),
    _Range(re.compile(r".*_(eps|epsilon)"), "above 0", 0, excludes_least=True),
    _Range(re.compile(r"(.*_)?rope_theta|rotary_emb_base|rope_local_base_freq"), "above 0", 0, excludes_least=True),
    _Range(re.compile(r"rotary_pct|partial_rotary_factor"), "above 0 and at most 1", 0, 1, excludes_least=True),
    _Range(re.compile(r"(final|attn)_logit_softcapping"), "above 0, or null for none", 0, excludes_least=True),
    _Range(re.compile(r"initializer_range|initializer_factor|init_std"), "at least 0", 0),
    _Range(re.compile(r".*_token_ids?"), "at least 0, or null for none", 0),
    _Range(
        re.compile(
            # In models that are not causal, these fields count images, or layers from the end.
            r"(?!vision_|max_image_|num_images|chunk_size)"
            r"((num|n)_.*|.*_(size|dim|layers|heads|window|rank|length|embeddings|experts|step))"
        ),
        "at least 0",
        0,
    ),
)


def is_size(name: str) -> bool:
    """Returns whether a field of this name is a size without which no model can be built."""
    return any(one.names.fullmatch(name) for one in _RANGES[:2])


def out_of_range(name: str, value: Any) -> str | None:
    """Returns what is wrong with a number, or a number in a list, of a Hugging Face config; None if it is valid."""
    numbers = list(_numbers(value))
    if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
        return f"must be a finite number; found {show(value)}"
    fits = next((one for one in _RANGES if one.names.fullmatch(name)), None)
    if fits is None or all(fits.has(number) for number in numbers):
        return None
    return f"must be {fits.rule}; found {show(value)}"


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value
