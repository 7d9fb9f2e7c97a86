"""Scaled rotary embeddings: the frequencies and the attention factor that transformers computes.

Without this Megatron-Bridge 0.6.2 knows llama3 scaling of Llama alone, with an original length of 8192 and default
factors; leaves out linear scaling of every family but Llama; and fails to build YaRN unless the config writes out six
optional values.

A model is built with plain rotary embeddings, whose frequencies are then replaced. The attention factor, by which
transformers multiplies cosine and sine of queries and of keys, is squared in the softmax scale, which also holds where
Transformer Engine's fused kernels take no factor.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor

# Types of `rope_parameters` whose frequencies do not depend on the sequence at hand.
SCALED = ("linear", "llama3", "yarn")
PLAIN = "default"


def rope_type(config: Any) -> str:
    """The type of rotary embedding of a Hugging Face config."""
    parameters = config.rope_parameters
    return str(parameters["rope_type"]) if "rope_type" in parameters else PLAIN


def without_scaling(config: Any) -> Any:
    """A copy of a Hugging Face config whose rotary embeddings are plain, with the same base."""
    plain = copy.deepcopy(config)
    plain.rope_parameters = {"rope_type": PLAIN, "rope_theta": config.rope_parameters["rope_theta"]}
    return plain


def frequencies(config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies float32 [head_dim / 2] and the attention factor of a config of a type in `SCALED`.

    In the families of `bridges` rotary embeddings turn whole heads.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inverse, factor = ROPE_INIT_FUNCTIONS[rope_type(config)](config, device=torch.device("cpu"))
    return inverse, float(factor)


def softmax_scale(config: Any) -> float | None:
    """What scores are multiplied by; None for the usual one over the root of the head's size."""
    inverse, factor = frequencies(config)
    return None if factor == 1.0 else factor**2 / math.sqrt(2 * len(inverse))


def replace_frequencies(config: Any, chunks: list[Any]) -> list[Any]:
    """Give a built model the frequencies of its Hugging Face config; one without scaling keeps its own.

    Args:
        config: a Hugging Face config of a family that `bridges` corrects.
        chunks: this rank's model chunks (`GPTModel`), of which every one has rotary embeddings, and none has used them.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    if rope_type(config) not in SCALED:
        return chunks
    inverse, _ = frequencies(config)
    for chunk in chunks:
        rotary = chunk.rotary_pos_emb
        assert type(rotary) is RotaryEmbedding and rotary.seq_len_interpolation_factor is None, "built without scaling"
        assert rotary.inv_freq.shape == inverse.shape and rotary.inv_freq.dtype == inverse.dtype
        rotary.inv_freq = inverse.to(rotary.inv_freq.device)
    # Of the class, by instance: models that are gone, and this one if it was asked for anything.
    RotaryEmbedding.forward.cache_clear()
    return chunks
