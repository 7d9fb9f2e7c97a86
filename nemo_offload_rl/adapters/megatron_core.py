"""Has megatron-core's own offloading methods of a model and an optimizer move their state by the engine."""

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
    and `restore_grad_buffers`, and the buffers' `offload_to_cpu` and `reload_from_cpu`. Whichever of several parts is
    called first (a chunk, a buffer, an optimizer of a chain), all parts move; for the others nothing is left to do.

    Args:
        model: the chunks, in megatron-core's DistributedDataParallel.
        optimizer: megatron-core's.
        arena: see `adopt`, as for what is raised.
    """
    state = adopt(model, optimizer, arena)
    for part in [] if optimizer is None else [optimizer, *getattr(optimizer, "chained_optimizers", [])]:
        part.offload_to_cpu = lambda: state.move_optimizer("cpu")
        part.restore_from_cpu = lambda: state.move_optimizer("cuda")

    def offload_grads(synchronize: bool = True, empty_cache: bool = True) -> None:
        # Dropping waits for the GPU's queued work and gives back torch's cache, whatever the arguments say: memory of
        # a range cannot be reused by this process's allocator, so leaving either out would only keep it longer.
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
