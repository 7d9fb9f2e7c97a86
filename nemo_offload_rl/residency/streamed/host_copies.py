"""Copies between the window and host memory on separate streams, through staging buffers if that is pageable."""

import contextlib
from collections.abc import Iterator

import torch

from nemo_offload_rl.memory.pinned import HostSegment, PinnedArena, cut_at_locks
from nemo_offload_rl.memory.streams import CopyStream, StagingRing

Part = tuple[slice, torch.Tensor]
"""Bytes of a host segment, and the uint8 GPU tensor of the same size that they are copied to or from."""


class HostCopies:
    """Copies between the window and host memory, on a stream for each direction.

    Without a GPU the calling thread makes the copies. Those of a segment that is not page-locked go through the staging
    ring, and are done when the call returns.

    Args:
        device: the GPU.
        arena: provides the staging buffers.

    Attributes:
        out: the stream to the host.
        back: the stream to the GPU.
    """

    def __init__(self, device: torch.device, arena: PinnedArena) -> None:
        self.out, self.back = CopyStream(device), CopyStream(device)
        self._device = device
        self._arena = arena
        self._staging: StagingRing | None = None

    def to_gpu(self, segment: HostSegment, parts: list[Part]) -> None:
        """Queue copies of a segment's bytes into GPU memory, after the work queued on `back`."""
        if self._is_staged(segment):
            with self._ring(self.back) as ring:
                for where, gpu in parts:
                    ring.to_gpu(segment.tensor[where], gpu, self.back.stream)
        else:
            self.back.copy_all((gpu, host) for host, gpu in _cut(segment, parts))

    def to_host(self, segment: HostSegment, parts: list[Part]) -> None:
        """Queue copies of GPU memory into a segment's bytes, after the work queued on `out`."""
        if self._is_staged(segment):
            with self._ring(self.out) as ring:
                for where, gpu in parts:
                    ring.to_host(gpu, segment.tensor[where], self.out.stream)
        else:
            self.out.copy_all(_cut(segment, parts))

    def close(self) -> None:
        """Free the staging buffers; a second call does nothing."""
        staging, self._staging = self._staging, None
        if staging is not None:
            staging.close()

    @contextlib.contextmanager
    def _ring(self, stream: CopyStream) -> Iterator[StagingRing]:
        """Yields the staging ring; after a failure, waits for copies through its buffers."""
        if self._staging is None:
            self._staging = StagingRing(self._arena)
        try:
            yield self._staging
        except BaseException:
            stream.mark().wait()
            raise

    def _is_staged(self, segment: HostSegment) -> bool:
        return self._device.type == "cuda" and not segment.pinned


def _cut(segment: HostSegment, parts: list[Part]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Cuts parts into pairs of host and GPU memory that do not span two page-locked ranges."""
    pairs = []
    for where, gpu in parts:
        for begin, end in cut_at_locks(where.start, where.stop - where.start):
            pairs.append((segment.tensor[begin:end], gpu[begin - where.start : end - where.start]))
    return pairs
