"""Lays out optimizer state in flat arrays of host memory, and cuts these into chunks that each fill a window's slot.

There is one array for each kind of state (masters, exp_avg, ...), with all parameters one after another. A chunk is the
same range of elements of every array, and so takes a few large copies, wherever it cuts a parameter.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nemo_offload_rl.memory.units import round_up

ALIGNMENT = 256
"""In elements. Parameters begin, and are cut, at multiples of it, so that kernels process each element as in the whole
parameter: in vectors on a CPU, and with aligned loads on a GPU."""


@dataclass(frozen=True)
class Field:
    """Describes a kind of state that every parameter of a layout has."""

    key: str
    """The key in `optimizer.state[parameter]`; `MASTER` for the parameter itself."""
    dtype: torch.dtype


MASTER = "master"


@dataclass(frozen=True)
class Piece:
    """Describes the part of a parameter that is in a chunk."""

    index: int
    """The parameter's index in the layout."""
    start: int
    stop: int
    """The piece is elements `start` up to `stop` of the parameter."""
    offset: int
    """Where the piece begins in the chunk, in elements."""

    @property
    def length(self) -> int:
        """Returns the number of its elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Chunk:
    """Describes a range of elements of the arrays, and the pieces of parameters in it."""

    begin: int
    end: int
    pieces: tuple[Piece, ...]


class FlatLayout:
    """Locates the state of each parameter in host memory, and in a slot of the window.

    Args:
        fields: the kinds of state that each parameter has.
        numels: number of elements of each parameter, none of them 0.
        slot_bytes: the most bytes that a chunk may take in the window.

    Raises:
        ValueError: a slot cannot hold `ALIGNMENT` elements.
    """

    def __init__(self, fields: Sequence[Field], numels: Sequence[int], slot_bytes: int) -> None:
        self.fields = tuple(fields)
        self._numels = tuple(numels)
        *starts, total = itertools.accumulate((round_up(numel, ALIGNMENT) for numel in numels), initial=0)
        self._starts = starts
        self._length = total
        *offsets, self.nbytes = itertools.accumulate((field.dtype.itemsize * total for field in fields), initial=0)
        self._offsets = offsets
        element_bytes = sum(field.dtype.itemsize for field in fields)
        self._chunk_length = slot_bytes // element_bytes // ALIGNMENT * ALIGNMENT
        if not self._chunk_length:
            raise ValueError(
                f"A slot of {slot_bytes} bytes is too small for {ALIGNMENT} elements of {element_bytes} bytes each."
            )
        self.chunks = tuple(self._cut())

    def in_host(self, field: int, begin: int, length: int) -> slice:
        """Returns the byte range of host memory with `length` elements of a field's array."""
        size = self.fields[field].dtype.itemsize
        start = self._offsets[field] + begin * size
        return slice(start, start + length * size)

    def of_parameter(self, field: int, index: int) -> slice:
        """Returns the byte range of host memory with a field of a parameter."""
        return self.in_host(field, self._starts[index], self._numels[index])

    def in_slot(self, field: int, begin: int, length: int) -> slice:
        """Returns the byte range of a slot with `length` elements of a chunk's field."""
        size = self.fields[field].dtype.itemsize
        start = sum(other.dtype.itemsize for other in self.fields[:field]) * self._chunk_length + begin * size
        return slice(start, start + length * size)

    def _cut(self) -> Iterator[Chunk]:
        first = 0
        for begin in range(0, self._length, self._chunk_length):
            end = min(begin + self._chunk_length, self._length)
            pieces = []
            while first < len(self._numels) and self._starts[first] + self._numels[first] <= begin:
                first += 1
            for index in range(first, len(self._numels)):
                start, stop = self._starts[index], self._starts[index] + self._numels[index]
                if start >= end:
                    break
                low, high = max(start, begin), min(stop, end)
                if low < high:
                    pieces.append(Piece(index, low - start, high - start, low - begin))
            yield Chunk(begin, end, tuple(pieces))
