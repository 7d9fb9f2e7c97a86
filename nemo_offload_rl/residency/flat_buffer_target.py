"""Targets that live in ranges and have a copy of their own on the host."""

from collections.abc import Sequence

import torch

from nemo_offload_rl.residency.flat_buffer import FlatBuffer
from nemo_offload_rl.residency.residency import Move, ResidencyError
from nemo_offload_rl.residency.table import Placement
from nemo_offload_rl.residency.transfer import BackedRange, ChunkError, Mover


class CorruptedTransferError(ResidencyError):
    """What came back is not what left."""


class FlatBufferTarget:
    """A target whose ranges move as they are.

    Args:
        flat_buffer: where its tensors live.
        mover: copies.
        verify: compare checksums of every chunk before it leaves and after it is back; waits for the GPU.
    """

    lazy_wait = False

    def __init__(self, flat_buffer: FlatBuffer, mover: Mover, *, verify: bool = False) -> None:
        self.flat_buffer = flat_buffer
        self._mover = mover
        self._verify = verify
        self._checksums: list[torch.Tensor] = []

    @property
    def placements(self) -> frozenset[Placement]:
        """Without host memory it stays."""
        return frozenset({Placement.GPU, Placement.HOST} if self.flat_buffer.has_host_side else {Placement.GPU})

    @property
    def nbytes(self) -> int:
        """What it takes of the GPU while it is there."""
        return self.flat_buffer.nbytes

    @property
    def mapped_bytes(self) -> int:
        """What its ranges take of the GPU now."""
        return self.flat_buffer.mapped_bytes

    @property
    def needs_gpu_to_save(self) -> bool:
        """It is read as it is."""
        return False

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See `residency.OffloadTarget`."""
        return self.flat_buffer.host_view(tensor)

    def close(self) -> None:
        """Give all memory back."""
        self.flat_buffer.close()

    def start(self, placement: Placement) -> Move:
        """See `residency.OffloadTarget`."""
        return self._leave() if placement is Placement.HOST else self._come_back()

    def name_for_error(self, error: Exception) -> str:
        """The tensor that an error of a move is about."""
        return (
            self.flat_buffer.name_at(error)
            if isinstance(error, ChunkError)
            else f"new tensors of {self.flat_buffer.owner}"
        )

    def _leave(self) -> Move:
        if self._verify:
            self._checksums = chunk_checksums(self.flat_buffer.backed_ranges)
        return self._mover.out(self.flat_buffer.backed_ranges)

    def _come_back(self) -> Move:
        transfer = self._mover.back(self.flat_buffer.backed_ranges)
        if self._verify:
            transfer.on_arrival = self._compare
        return transfer

    def _compare(self) -> None:
        """Compare what has come back with what left.

        Raises:
            CorruptedTransferError: they differ.
        """
        chunks = [(backed, chunk) for backed in self.flat_buffer.backed_ranges for chunk in backed.range.chunks]
        found = chunk_checksums(self.flat_buffer.backed_ranges)
        for (backed, chunk), before, after in zip(chunks, self._checksums, found, strict=True):
            if not torch.equal(before, after):
                name = self.flat_buffer.name_at(ChunkError(backed, chunk.start, ""))
                raise CorruptedTransferError(
                    f"{self.flat_buffer.owner} came back from the host changed, at {name} (bytes {chunk.start} to "
                    f"{chunk.stop} of its range): training cannot go on; restart from the last checkpoint."
                )


def chunk_checksums(backed_ranges: Sequence[BackedRange]) -> list[torch.Tensor]:
    """0-dim int64 sums, modulo 2**64, of the 8-byte words of every chunk, on the device; ranges have to be mapped."""
    return [
        backed.range.tensor[chunk].view(torch.int64).sum() for backed in backed_ranges for chunk in backed.range.chunks
    ]
