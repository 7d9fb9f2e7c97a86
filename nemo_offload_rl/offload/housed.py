"""Targets that live in ranges and have a copy of their own on the host."""

from collections.abc import Sequence

import torch

from nemo_offload_rl.offload.housing import Housing
from nemo_offload_rl.offload.residency import Move, ResidencyError
from nemo_offload_rl.offload.transfer import ChunkError, Home, Mover
from nemo_offload_rl.offload.types import Cell


class CorruptedTransferError(ResidencyError):
    """What came back is not what left."""


class Housed:
    """A target whose ranges move as they are.

    Args:
        housing: where its tensors live.
        mover: copies.
        verify: compare checksums of every chunk before it leaves and after it is back; waits for the GPU.
    """

    waits_itself = False

    def __init__(self, housing: Housing, mover: Mover, *, verify: bool = False) -> None:
        self.housing = housing
        self._mover = mover
        self._verify = verify
        self._checksums: list[torch.Tensor] = []

    @property
    def cells(self) -> frozenset[Cell]:
        """Without host memory it stays."""
        return frozenset({Cell.GPU, Cell.HOST} if self.housing.has_host_side else {Cell.GPU})

    @property
    def nbytes(self) -> int:
        """What it takes of the GPU while it is there."""
        return self.housing.nbytes

    @property
    def mapped_bytes(self) -> int:
        """What its ranges take of the GPU now."""
        return self.housing.mapped_bytes

    @property
    def is_computed_when_read(self) -> bool:
        """It is read as it is."""
        return False

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See `residency.Movable`."""
        return self.housing.host_view(tensor)

    def close(self) -> None:
        """Give all memory back."""
        self.housing.close()

    def start(self, cell: Cell) -> Move:
        """See `residency.Movable`."""
        return self._leave() if cell is Cell.HOST else self._come_back()

    def first_name(self, error: Exception) -> str:
        """The tensor that an error of a move is about."""
        return self.housing.name_at(error) if isinstance(error, ChunkError) else f"new tensors of {self.housing.owner}"

    def _leave(self) -> Move:
        if self._verify:
            self._checksums = chunk_checksums(self.housing.homes)
        return self._mover.out(self.housing.homes)

    def _come_back(self) -> Move:
        transfer = self._mover.back(self.housing.homes)
        if self._verify:
            transfer.on_arrival = self._compare
        return transfer

    def _compare(self) -> None:
        """Compare what has come back with what left.

        Raises:
            CorruptedTransferError: they differ.
        """
        chunks = [(home, chunk) for home in self.housing.homes for chunk in home.range.chunks]
        found = chunk_checksums(self.housing.homes)
        for (home, chunk), before, after in zip(chunks, self._checksums, found, strict=True):
            if not torch.equal(before, after):
                name = self.housing.name_at(ChunkError(home, chunk.start, ""))
                raise CorruptedTransferError(
                    f"{self.housing.owner} came back from the host changed, at {name} (bytes {chunk.start} to "
                    f"{chunk.stop} of its range): training cannot go on; restart from the last checkpoint."
                )


def chunk_checksums(homes: Sequence[Home]) -> list[torch.Tensor]:
    """0-dim int64 sums, modulo 2**64, of the 8-byte words of every chunk, on the device; ranges have to be mapped."""
    return [home.range.tensor[chunk].view(torch.int64).sum() for home in homes for chunk in home.range.chunks]
