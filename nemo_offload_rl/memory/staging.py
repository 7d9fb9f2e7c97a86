"""Copies to and from host memory that is not page-locked: through small pinned buffers, one copied while one fills."""

from collections import deque
from collections.abc import Iterator

import torch

from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.memory.units import MIB

NUM_BUFFERS = 4
BUFFER_BYTES = 32 * MIB  # the link reaches 97% of its rate with 16 MiB, 99% with 64 MiB


class StagingRing:
    """Copies between GPU and pageable host memory in pieces, the copy over the link beside the one on the CPU.

    Its buffers are one segment of the arena, plain memory where not even that can be page-locked. For one thread at a
    time; calls return when the last byte has arrived. Without CUDA, with CPU tensors on both sides and no stream, the
    same pieces go through the same buffers.

    Args:
        arena: gives the buffers, and takes them back at `close`.
        num_buffers: how many, at least 2 for copies to overlap.
        buffer_bytes: the size of one.
    """

    def __init__(self, arena: PinnedArena, *, num_buffers: int = NUM_BUFFERS, buffer_bytes: int = BUFFER_BYTES) -> None:
        assert num_buffers > 0 and buffer_bytes > 0
        self._arena = arena
        self._segment = arena.allocate("staging", num_buffers * buffer_bytes)
        self._num_buffers = num_buffers
        self._buffer_bytes = buffer_bytes

    @property
    def pinned(self) -> bool:
        """Whether its buffers are page-locked."""
        return self._segment.pinned

    def to_host(self, source: torch.Tensor, destination: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        """Copy from the GPU to the host.

        Args:
            source: uint8 [nbytes] on the GPU; contiguous.
            destination: uint8 [nbytes] on the CPU; contiguous.
            stream: where the copies over the link run, after what is queued there; None without CUDA.

        Raises:
            ValueError: if the tensors are not flat uint8 of one size.
        """
        arriving: deque[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event | None]] = deque()
        for buffer, piece, end in self._pieces(source, destination):
            if len(arriving) == self._num_buffers:
                _take_out(*arriving.popleft())
            arriving.append((buffer, end, _copy(piece, buffer, stream)))
        while arriving:
            _take_out(*arriving.popleft())

    def to_gpu(self, source: torch.Tensor, destination: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        """Copy from the host to the GPU.

        Args:
            source: uint8 [nbytes] on the CPU; contiguous.
            destination: uint8 [nbytes] on the GPU; contiguous.
            stream: where the copies over the link run, after what is queued there; None without CUDA.

        Raises:
            ValueError: if the tensors are not flat uint8 of one size.
        """
        leaving: deque[torch.cuda.Event | None] = deque()
        for buffer, piece, end in self._pieces(source, destination):
            if len(leaving) == self._num_buffers:
                _wait(leaving.popleft())
            buffer.copy_(piece)
            leaving.append(_copy(buffer, end, stream))
        while leaving:
            _wait(leaving.popleft())

    def close(self) -> None:
        """Give the buffers back."""
        self._arena.release(self._segment)

    def _pieces(
        self, source: torch.Tensor, destination: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yields the buffers in turn, each cut to its piece of the source and of the destination."""
        for tensor in (source, destination):
            if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise ValueError(
                    f"The staging ring copies contiguous uint8 [nbytes]; got {tensor.dtype} {list(tensor.shape)}."
                )
        if source.numel() != destination.numel():
            raise ValueError(f"The staging ring got {source.numel()} bytes to copy into {destination.numel()}.")
        buffers = self._segment.tensor.split(self._buffer_bytes)
        pieces = zip(source.split(self._buffer_bytes), destination.split(self._buffer_bytes), strict=True)
        for index, (piece, end) in enumerate(pieces):
            yield buffers[index % self._num_buffers][: piece.numel()], piece, end


def _copy(source: torch.Tensor, destination: torch.Tensor, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """Starts a copy on a stream, and returns what to wait for; without one, copies."""
    if stream is None:
        destination.copy_(source)
        return None
    with torch.cuda.stream(stream):
        destination.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
    return event


def _take_out(buffer: torch.Tensor, destination: torch.Tensor, arrived: torch.cuda.Event | None) -> None:
    _wait(arrived)
    destination.copy_(buffer)


def _wait(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.synchronize()
