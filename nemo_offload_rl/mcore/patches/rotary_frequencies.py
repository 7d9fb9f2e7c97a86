"""Replaces the inverse frequencies of megatron-core's rotary embeddings in the models that a provider builds."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor


def build_with_frequencies(provider: Any, inverse: Tensor) -> None:
    """Make a Megatron-Bridge provider build models with these inverse frequencies, float32 [head_dim / 2].

    A provider of a subclass could not be sent to other pipeline stages, as exports do.
    """
    provider.provide = functools.partial(_provide, provider.provide, inverse)


def _provide(provide: Callable[..., Any], inverse: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Build a model chunk as `provide` does, with these frequencies."""
    model = provide(*args, **kwargs)
    replace_frequencies(model, inverse)
    return model


def replace_frequencies(model: Any, inverse: Tensor) -> None:
    """Replace the frequencies of a newly built model chunk, of any pipeline stage, which has not used its own yet."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    rotary = model.rotary_pos_emb
    assert type(rotary) is RotaryEmbedding, f"{type(rotary)} is not the class that this patch was written for"
    assert rotary.inv_freq.shape == inverse.shape and rotary.inv_freq.dtype == inverse.dtype
    rotary.inv_freq = inverse.to(rotary.inv_freq.device)
