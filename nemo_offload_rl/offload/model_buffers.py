"""Params and grads as targets, by megatron-core's own buffer helpers.

Both live in flat buffers of DistributedDataParallel; the helpers resize the buffers' storages, so that every view of
them stays valid. Frozen parameters, and parameters outside DDP's buffers, stay where they are.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from nemo_offload_rl.offload.types import Cell

logger = logging.getLogger(__name__)


class _Buffers:
    """The DDP buffers of a model's chunks."""

    cells: frozenset[Cell] = frozenset()

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = list(chunks)
        self._where = Cell.GPU

    def _buffers(self) -> Iterator[Any]:
        for chunk in self._chunks:
            yield from chunk.buffers
            yield from chunk.expert_parallel_buffers

    def _settle(self) -> None:
        # The memory is given back to the driver, for a generator in another process on the same GPU.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class ParamBuffers(_Buffers):
    """The parameters: on the GPU, or in one pinned host copy that is made at the first move and kept."""

    cells = frozenset({Cell.GPU, Cell.HOST})

    def move(self, cell: Cell) -> int:
        """Copy the parameter buffers over the link; returns their bytes."""
        moved = 0
        for buffer in self._buffers():
            if buffer.param_data is None:  # without the distributed optimizer the parameters own their memory
                continue
            if cell is Cell.HOST:
                moved += buffer.param_data.nbytes
                buffer.offload_to_cpu(move_params=True, move_grads=False)
            else:
                buffer.reload_from_cpu(move_params=True, move_grads=False)
                moved += buffer.param_data.nbytes
        self._settle()
        return moved


class GradBuffers(_Buffers):
    """The gradients: on the GPU, or dropped; they come back zeroed at the same views."""

    cells = frozenset({Cell.GPU, Cell.DROPPED})

    def move(self, cell: Cell) -> int:
        """Give the gradient buffers back or take them again; nothing crosses the link."""
        for buffer in self._buffers():
            if cell is Cell.DROPPED:
                buffer.offload_to_cpu(move_params=False, move_grads=True)
            else:
                buffer.reload_from_cpu(move_params=False, move_grads=True)
        self._settle()
        return 0


class Stays:
    """A target of a machine without CUDA: there is no other memory to move to."""

    cells = frozenset(Cell)

    def move(self, cell: Cell) -> int:
        """Moves nothing."""
        return 0
