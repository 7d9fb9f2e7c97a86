"""Clears megatron-core's globals that outlive its process groups."""

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding


def clear_globals() -> None:
    """Clear what `destroy_model_parallel` forgets; it would keep process groups, the store and its port."""
    for name, value in vars(mpu).items():  # two of them
        if isinstance(value, torch.distributed.ProcessGroup):
            setattr(mpu, name, None)
    for rope in (RotaryEmbedding, YarnRotaryEmbedding):  # caches, which hold the instances
        rope.forward.cache_clear()
