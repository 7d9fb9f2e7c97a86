"""Imports Megatron-Bridge's AutoBridge, with or without Transformer Engine."""

import functools
import importlib.util
from typing import Any

import torch

from nemo_offload_rl.mcore import log_filters
from nemo_offload_rl.mcore.patches.bridge import placeholder_where_absent


@functools.cache
def have_transformer_engine() -> bool:
    """Returns whether Transformer Engine is installed (extra `te`) and there is a CUDA device to run it on."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


@functools.cache
def auto_bridge() -> Any:
    """Returns Megatron-Bridge's `AutoBridge` class, with the corrected bridges of `architectures` registered."""
    with placeholder_where_absent(), log_filters.while_importing():
        from megatron.bridge import AutoBridge
    from nemo_offload_rl.mcore import architectures  # its imports must come after the one above

    architectures.register()
    return AutoBridge
