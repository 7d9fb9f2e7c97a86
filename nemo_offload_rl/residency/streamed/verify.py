"""Compares checksums of chunks that come into the window with those of the same chunks when they left it."""

import torch

from nemo_offload_rl.residency.flat_buffer import CorruptedTransferError
from nemo_offload_rl.residency.streamed.layout import Chunk
from nemo_offload_rl.residency.streamed.window import HostArrays, Slot


class ChunkSums:
    """Keeps the checksums of chunks that are on the host."""

    def __init__(self) -> None:
        self._sums: dict[tuple[HostArrays, int], torch.Tensor] = {}

    def remember(self, arrays: HostArrays, chunk: Chunk, slot: Slot) -> None:
        """Record the checksum of a chunk that is about to leave the window."""
        self._sums[arrays, chunk.begin] = _checksum(arrays, chunk, slot)

    def compare(self, arrays: HostArrays, chunk: Chunk, slot: Slot) -> None:
        """Compare the checksum of a chunk that has come in with that of its last leaving, if any; waits for the GPU.

        Raises:
            CorruptedTransferError: they differ.
        """
        if (arrays, chunk.begin) in self._sums and not torch.equal(
            self._sums[arrays, chunk.begin], _checksum(arrays, chunk, slot)
        ):
            raise CorruptedTransferError(
                "The checksums of optimizer_state differ after it was copied to the host and back, in elements "
                f"{chunk.begin} to {chunk.end} of its arrays; training cannot continue: restart from the last "
                "checkpoint."
            )

    def clear(self) -> None:
        """Forget all checksums: the host memory is about to be written."""
        self._sums.clear()


def _checksum(arrays: HostArrays, chunk: Chunk, slot: Slot) -> torch.Tensor:
    """Sums the 8-byte words of each field of a chunk, int64 [fields] modulo 2**64, on the device."""
    layout, length = arrays.layout, chunk.end - chunk.begin
    fields = range(len(layout.fields))
    return torch.stack([slot.memory[layout.in_slot(field, 0, length)].view(torch.int64).sum() for field in fields])
