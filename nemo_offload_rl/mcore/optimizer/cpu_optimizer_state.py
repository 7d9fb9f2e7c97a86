"""Describes the CPU optimizer's state: float32 vectors in host memory, and masters on the GPU."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_offload_rl.memory.pinned import cut_at_locks
from nemo_offload_rl.memory.units import MIB

FLOAT = 4
PIECE = 16 * MIB
"""Elements of one copy: 64 MiB in float32, the GPU memory that converting them from or to bf16 takes meanwhile."""


@dataclass(frozen=True)
class HostVector:
    """Holds a float32 vector [n] in host memory, and its offset in its segment, in bytes."""

    tensor: Tensor
    offset: int

    def pieces(self, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields parts of this vector, each with the same part of another [n] tensor, that one copy can handle."""
        for begin, end in cut_at_locks(self.offset, self.tensor.nbytes):
            first, last = (begin - self.offset) // FLOAT, (end - self.offset) // FLOAT
            for start in range(first, last, PIECE):
                stop = min(start + PIECE, last)
                yield self.tensor[start:stop], other[start:stop]


@dataclass(frozen=True)
class OnCpu:
    """Holds a megatron-core parameter [n] that the CPU steps, and its gradient, master and moments in host memory."""

    param: Tensor
    grad: HostVector
    master: HostVector
    moments: Mapping[str, Tensor]


@dataclass(frozen=True)
class Part:
    """Groups parameters whose gradients arrive together, and that are stepped and copied to the GPU together."""

    optimizer: torch.optim.Optimizer
    params: Sequence[OnCpu]


class State(dict[str, Tensor]):
    """Maps names to a parameter's state; an assignment copies into the tensor that the optimizers work on."""

    def __setitem__(self, key: str, value: Tensor) -> None:
        if key != "step":  # megatron-core assigns it, too, but also passes it in the groups
            self[key].copy_(value)


def largest_within(sizes: Sequence[int], fraction: float) -> set[int]:
    """Choose sizes that together fit into a fraction of the sum of all: from the largest on, each that still fits.

    Returns:
        The indices of the chosen sizes.
    """
    room = fraction * sum(sizes)
    chosen = set()
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if sizes[index] <= room:
            chosen.add(index)
            room -= sizes[index]
    return chosen


def gradient_of(param: Tensor) -> Tensor | None:
    """Returns the gradient where megatron-core's distributed optimizer leaves it."""
    decoupled: Tensor | None = getattr(param, "decoupled_grad", None)
    return param.grad if decoupled is None else decoupled


def gpu_master(param: Tensor) -> Tensor:
    """Returns a parameter's float32 master: a copy, or for a float32 parameter itself or a view that torch can step."""
    if param.dtype is not torch.float32:
        return param.detach().float()
    return param if param.is_leaf else param.detach()
