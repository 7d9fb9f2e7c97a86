"""Provides host-memory ranges that map late or fail to."""

import time

import torch

from nemo_offload_rl.memory.gpu_range import MIB, GpuRange, HostRange, OutOfGpuMemoryError

CHUNK_BYTES = 2 * MIB


def small_chunks(nbytes: int, device: torch.device, chunk_bytes: int) -> GpuRange:
    """Makes ranges with chunks so small that a test's tensors span several."""
    return HostRange(nbytes, CHUNK_BYTES)


class Trouble:
    """Makes ranges whose `map` is slow or fails."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.chunks_left: int | None = None

    def __call__(self, nbytes: int, device: torch.device, chunk_bytes: int) -> GpuRange:
        return _TroubledRange(nbytes, self)


class _TroubledRange(HostRange):
    def __init__(self, nbytes: int, trouble: Trouble) -> None:
        super().__init__(nbytes, CHUNK_BYTES)
        self._trouble = trouble

    def map(self, index: int) -> None:
        time.sleep(self._trouble.delay_s)
        if self._trouble.chunks_left is not None:
            if self._trouble.chunks_left == 0:
                raise OutOfGpuMemoryError("no memory for a chunk, as the test has it")
            self._trouble.chunks_left -= 1
        super().map(index)
