"""Reimplements how NeMo-RL's Megatron worker moves state.

The names are those of NeMo-RL's nemo_rl/models/policy/workers/megatron_policy_worker.py: `move_model` moves the buffers
of megatron-core's DistributedDataParallel by their own methods, `move_optimizer` moves an optimizer's moments one by
one. fp32 masters that are not in the optimizer's state stay where they are, as in NeMo-RL.
"""

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import torch


def move_model(model: Sequence[Any], device: str, *, move_params: bool, move_grads: bool) -> None:
    """Moves buffers to "cpu", which drops gradients, or to "cuda", where gradients come back as zeros.

    Without a GPU parameters stay: megatron-core would ask for page-locked memory.
    """
    for buffer in _buffers(model):
        move = buffer.offload_to_cpu if device == "cpu" else buffer.reload_from_cpu
        move(move_params=move_params and torch.cuda.is_available(), move_grads=move_grads)


def _buffers(model: Sequence[Any]) -> Iterator[Any]:
    for chunk in model:
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def move_optimizer(optimizer: Any, device: str) -> None:
    """Moves moments to "cpu" or "cuda", synchronously and through pageable memory."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for state in part.optimizer.state.values():
            for name, value in state.items():
                if torch.is_tensor(value) and value.ndim:
                    state[name] = value.to(device)


def release() -> None:
    """Empties the cache of torch's allocator."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
