"""Completes the parameter gather (overlap_param_gather) for code other than forward passes."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from nemo_offload_rl.mcore.distributed.parallel import mpu


class ParamGather:
    """Lets forward passes gather parameters while a `train` runs, and in no other pass.

    Args:
        model: the chunks, in megatron-core's DistributedDataParallel, with parameters that are whole.
    """

    def __init__(self, model: Sequence[Any]) -> None:
        self._overlapping = [chunk for chunk in model if chunk.ddp_config.overlap_param_gather]
        for chunk in self._overlapping:
            chunk.disable_forward_pre_hook()
        self._are_whole = True

    @contextlib.contextmanager
    def by_forward_passes(self) -> Iterator[None]:
        """Behind it parameters are whole, unless it fails: see `complete`.

        Never on a single data-parallel rank, where there is nothing to gather and the hooks cost some 5% of a step.
        """
        chunks = [] if mpu.get_data_parallel_world_size() == 1 else self._overlapping
        for chunk in chunks:
            chunk.enable_forward_pre_hook()
        self._are_whole = not chunks
        try:
            yield
        finally:
            for chunk in chunks:
                chunk.disable_forward_pre_hook(param_sync=False)
        self.complete()  # not behind an error, which perhaps no other rank has: they would not join

    def complete(self) -> None:
        """Gather what steps have left to the next forward pass; nothing where parameters are whole; collective."""
        if self._are_whole:
            return
        for chunk in self._overlapping:
            chunk.free_overlap_buffers()  # behind an error: waits for a gather under way
            with torch.no_grad():
                chunk.start_param_sync(force_sync=True)
        self._are_whole = True
