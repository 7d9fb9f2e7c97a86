"""Replaces megatron-core's own offloading methods of a model and an optimizer by moves of the residency offloader."""

from collections.abc import Sequence
from typing import Any

import torch

from nemo_offload_rl.adapters.adopt import AdoptedState, adopt
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.params_and_grads import ddp_buffers
from nemo_offload_rl.residency.table import Target


def adopt_own_methods(
    model: Sequence[torch.nn.Module], optimizer: Any | None, arena: PinnedArena | None = None
) -> AdoptedState:
    """Adopt a model and its optimizer, and replace the offloading methods of these objects.

    They are the optimizer's `offload_to_cpu` and `restore_from_cpu`, DistributedDataParallel's `offload_grad_buffers`
    and `restore_grad_buffers`, and the buffers' `offload_to_cpu` and `reload_from_cpu`. A call on one of several parts
    (a chunk, a buffer, an optimizer of a chain) moves all parts; the same call on the others is then a no-op.

    Args:
        model: the chunks, in megatron-core's DistributedDataParallel.
        optimizer: megatron-core's optimizer.
        arena: see `adopt`, which also lists the errors that are raised.
    """
    state = adopt(model, optimizer, arena)
    for part in [] if optimizer is None else [optimizer, *getattr(optimizer, "chained_optimizers", [])]:
        part.offload_to_cpu = lambda: state.move_optimizer("cpu")
        part.restore_from_cpu = lambda: state.move_optimizer("cuda")

    def offload_grads(synchronize: bool = True, empty_cache: bool = True) -> None:
        # Dropping waits for the GPU's queued work and empties torch's cache, whatever the arguments say: this
        # process's allocator cannot reuse memory of a range, so skipping either would only hold that memory longer.
        state.move_grads("cpu")

    def restore_grads(synchronize: bool = True) -> None:
        state.move_grads("cuda")
        if synchronize:
            torch.cuda.synchronize()

    def offload_buffer(move_params: bool = True, move_grads: bool = True) -> None:
        state.move("cpu", _targets(move_params, move_grads))

    def reload_buffer(move_params: bool = True, move_grads: bool = True) -> None:
        state.move("cuda", _targets(move_params, move_grads))

    chunks: Sequence[Any] = model
    for chunk in chunks:
        chunk.offload_grad_buffers, chunk.restore_grad_buffers = offload_grads, restore_grads
    for buffer in ddp_buffers(model):
        buffer.offload_to_cpu, buffer.reload_from_cpu = offload_buffer, reload_buffer
    return state


def _targets(params: bool, grads: bool) -> list[Target]:
    return [target for target, wanted in ((Target.PARAMS, params), (Target.GRADS, grads)) if wanted]
