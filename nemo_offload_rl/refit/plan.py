"""The export plan: the tensors that a refit sends, their order and sizes, known before the first refit."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from nemo_offload_rl.memory.units import round_up

NamedTensor = tuple[str, torch.Tensor]

# Tensors start at multiples of this in a bucket, so that every dtype's view of it is aligned.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class TensorSpec:
    """Describes a tensor of an export, by its Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Self:
        """Makes the spec of a tensor."""
        return cls(name, tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's elements in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name!r} as {self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class BucketLayout:
    """Gives the positions of a bucket's tensors in its buffer.

    Attributes:
        tensors: The bucket's tensors, in the order of the export.
        offsets: Offset of each tensor in the buffer, in bytes.
        num_bytes: The size of the buffer.
    """

    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, tensors: Iterable[TensorSpec]) -> Self:
        """Lays out tensors one after the other."""
        tensors = tuple(tensors)
        sizes = (round_up(spec.num_bytes, _ALIGNMENT_BYTES) for spec in tensors)
        *offsets, num_bytes = itertools.accumulate(sizes, initial=0)
        return cls(tensors, tuple(offsets), num_bytes)

    def views(self, buffer: torch.Tensor) -> list[NamedTensor]:
        """Returns the tensors as views of a buffer (uint8, at least `num_bytes` long, on any device)."""
        return [
            (spec.name, buffer[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape))
            for spec, start in zip(self.tensors, self.offsets, strict=True)
        ]

    def slots(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors of `views` without their names."""
        return [slot for _, slot in self.views(buffer)]


def buffer_sizes(layouts: Sequence[BucketLayout], num_buffers: int) -> list[int]:
    """Returns the bytes of each buffer, at least 1, if bucket i is in buffer i modulo `num_buffers`.

    Fewer buckets than buffers need only as many buffers.
    """
    return [
        max(1, *(layout.num_bytes for layout in layouts[first::num_buffers]))
        for first in range(min(num_buffers, len(layouts)))
    ]


@dataclass(frozen=True)
class ExportPlan:
    """Lists every tensor that a refit sends, in the order in which each rank exports them."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, weights: Iterable[NamedTensor]) -> Self:
        """Makes the plan of an export, and exhausts the export."""
        return cls(tuple(TensorSpec.of(name, tensor) for name, tensor in weights))

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(spec.num_bytes for spec in self.tensors)

    def buckets(self, max_bytes: int) -> list[BucketLayout]:
        """Groups the tensors, in order, into buckets; a tensor larger than a bucket gets one of its own.

        Args:
            max_bytes: Largest number of bytes of tensors in a bucket; positive.

        Raises:
            ValueError: If `max_bytes` is not positive.
        """
        if max_bytes <= 0:
            raise ValueError(f"The refit bucket size is {max_bytes} bytes; it must be positive.")
        groups: list[list[TensorSpec]] = []
        room = 0
        for spec in self.tensors:
            if not groups or spec.num_bytes > room:
                groups.append([])
                room = max_bytes
            groups[-1].append(spec)
            room -= spec.num_bytes
        return [BucketLayout.of(group) for group in groups]

    def checked(self, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Yields the tensors of an export, and checks each against the plan.

        Raises:
            ValueError: If a tensor differs from the plan's tensor at its position.
        """
        for spec, named in itertools.zip_longest(self.tensors, weights):
            found = None if named is None else TensorSpec.of(*named)
            if found != spec:
                raise ValueError(
                    f"The export of weights yields {found or 'no further tensor'} where the first one yielded "
                    f"{spec or 'no further tensor'}; it must yield the same tensors in the same order each time."
                )
            yield named
