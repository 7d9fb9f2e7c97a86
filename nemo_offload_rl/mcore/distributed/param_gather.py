"""Completes the parameter gather (overlap_param_gather) for code other than forward passes."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from nemo_offload_rl.mcore.distributed.parallel import mpu


class ParamGather:
    """Makes forward passes gather parameters (overlap_param_gather) during `train` only.

    Args:
        model: the chunks, in megatron-core's DistributedDataParallel, with all parameters gathered.
    """

    def __init__(self, model: Sequence[Any]) -> None:
        self._overlapping = [chunk for chunk in model if chunk.ddp_config.overlap_param_gather]
        for chunk in self._overlapping:
            chunk.disable_forward_pre_hook()
        self._are_whole = True

    @contextlib.contextmanager
    def by_forward_passes(self) -> Iterator[None]:
        """Let forward passes inside gather parameters; gather the rest at the end, unless it fails (see `complete`).

        On a single data-parallel rank the hooks stay off: there is nothing to gather, and they cost some 5% of a step.
        """
        chunks = [] if mpu.get_data_parallel_world_size(with_context_parallel=True) == 1 else self._overlapping
        for chunk in chunks:
            chunk.enable_forward_pre_hook()
        self._are_whole = not chunks
        try:
            yield
        finally:
            for chunk in chunks:
                chunk.disable_forward_pre_hook(param_sync=False)
        self.complete()  # not after an error, which other ranks may not have: they would not join the collective

    def complete(self) -> None:
        """Gather the parameters that steps have left to the next forward pass, if there are any; collective."""
        if self._are_whole:
            return
        for chunk in self._overlapping:
            chunk.free_overlap_buffers()  # after an error this waits for a gather under way
            with torch.no_grad():
                chunk.start_param_sync(force_sync=True)
        self._are_whole = True
