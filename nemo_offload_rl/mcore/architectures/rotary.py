"""Scales rotary embeddings with the frequencies and the attention factor that transformers computes.

Without this Megatron-Bridge 0.6.2 supports llama3 scaling only of Llama, with an original length of 8192 and default
factors; leaves out linear scaling of every family but Llama; and fails to build YaRN unless the config writes out six
optional values.

A model is built with plain rotary embeddings, whose frequencies are then replaced. transformers multiplies the cosine
and sine of queries and of keys by the attention factor; here the softmax scale is multiplied by its square, which also
works where Transformer Engine's fused kernels take no factor.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor

from nemo_offload_rl.mcore.patches.rotary_frequencies import build_with_frequencies

# Types of `rope_parameters` whose frequencies do not depend on the sequence.
SCALED = ("linear", "llama3", "yarn")
PLAIN = "default"


def rope_type(config: Any) -> str:
    """Returns the type of rotary embedding of a Hugging Face config."""
    parameters = config.rope_parameters
    return str(parameters["rope_type"]) if "rope_type" in parameters else PLAIN


def without_scaling(config: Any) -> Any:
    """Returns a copy of a Hugging Face config whose rotary embeddings are plain, with the same base."""
    plain = copy.deepcopy(config)
    plain.rope_parameters = {"rope_type": PLAIN, "rope_theta": config.rope_parameters["rope_theta"]}
    return plain


def frequencies(config: Any) -> tuple[Tensor, float]:
    """Returns the inverse frequencies float32 [head_dim / 2] and the attention factor of a config with scaling.

    The config's type must be in `SCALED`. In the families of `bridges` rotary embeddings rotate whole heads.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inverse, factor = ROPE_INIT_FUNCTIONS[rope_type(config)](config, device=torch.device("cpu"))
    return inverse, float(factor)


def scale(config: Any, provider: Any) -> None:
    """Make a provider build models with the rotary scaling of a Hugging Face config; without scaling do nothing.

    Args:
        config: Hugging Face config of a family that `bridges` corrects.
        provider: made from the config's copy `without_scaling`.
    """
    if rope_type(config) == PLAIN:
        return
    assert rope_type(config) in SCALED, "other RoPE types are refused before"
    inverse, factor = frequencies(config)
    assert provider.position_embedding_type == "rope" and not provider.rope_scaling
    assert provider.seq_len_interpolation_factor is None and provider.softmax_scale is None
    if factor != 1.0:
        provider.softmax_scale = factor**2 / math.sqrt(2 * len(inverse))
    build_with_frequencies(provider, inverse)
