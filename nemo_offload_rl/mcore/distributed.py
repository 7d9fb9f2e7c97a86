"""Creates and destroys a rank's process groups, completes the parameter gather, and raises one rank's error on all."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from nemo_offload_rl.mcore.patches.torch_distributed import clear_globals, shut_down_groups_at_once
from nemo_offload_rl.memory.errors import preserve_first_error
from nemo_offload_rl.placement.network import choose_interface, rendezvous_store
from nemo_offload_rl.storage.disk import disk_full, is_disk_full

_attention_environment: dict[str, str | None] = {}
"""Values before `initialize` of the variables in which megatron-core tells Transformer Engine the attention backend.

It refuses a model of another backend than they say; the next model of this process may have one.
"""
_ATTENTION_VARIABLES = (
    "NVTE_FLASH_ATTN",
    "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN",
    *(f"NVTE_FLASH_ATTN_V{version}" for version in (2, 3, 4)),
)


@dataclass(frozen=True)
class ParallelSizes:
    """Holds the parallel sizes of a model; the data-parallel size follows from the world size."""

    tensor: int
    pipeline: int
    virtual_pipeline: int | None
    expert: int
    expert_tensor: int
    context: int = 1


def initialize(
    sizes: ParallelSizes,
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    master_addr: str,
    master_port: int,
    seed: int,
    te_rng_tracker: bool,
    timeout_s: float = 1800.0,
) -> torch.device:
    """Join the process group and build megatron's groups.

    Args:
        sizes: the parallel sizes; megatron-core refuses them if their product does not divide `world_size`.
        rank: this process's rank.
        world_size: number of ranks.
        local_rank: index of this process's GPU on its host, as the process sees it.
        master_addr: an address or name of rank 0's host that all ranks reach; rank 0 listens there and nowhere else.
        master_port: free port on that host.
        seed: seed of the model-parallel random states.
        te_rng_tracker: use Transformer Engine's RNG tracker, which captured CUDA graphs need.
        timeout_s: after how many seconds a collective that waits for a rank fails.

    Returns:
        The device that this process computes on.
    """
    data = world_size // (sizes.tensor * sizes.pipeline * sizes.context)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    _attention_environment.update({name: os.environ.get(name) for name in _ATTENTION_VARIABLES})
    os.environ.update(MASTER_ADDR=master_addr, MASTER_PORT=str(master_port), RANK=str(rank), WORLD_SIZE=str(world_size))
    timeout = timedelta(seconds=timeout_s)
    try:
        choose_interface(master_addr)
        torch.distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=rendezvous_store(master_addr, master_port, rank=rank, world_size=world_size, timeout=timeout),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            # Without device_id: with it NCCL makes a communicator for each of megatron's groups at once, used or not.
        )
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            virtual_pipeline_model_parallel_size=sizes.virtual_pipeline,
            context_parallel_size=sizes.context,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=sizes.expert_tensor,
        )
        # Without force_reset_rng the RNG tracker of an earlier policy of this process stays, whatever its kind.
        model_parallel_cuda_manual_seed(seed, te_rng_tracker=te_rng_tracker, force_reset_rng=True)
        # megatron-core's TECudaGraphHelper reads the number of micro-batches from this global.
        init_num_microbatches_calculator(rank, None, data, 1, data)
    except BaseException:
        with preserve_first_error():  # a GPU without memory for groups, for instance; the process may try again
            destroy()
        raise
    return device


def destroy() -> None:
    """Leave every process group, and restore the variables that building a model has set; safe to call twice."""
    for name, value in _attention_environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    _attention_environment.clear()
    unset_num_microbatches_calculator()
    if mpu.is_initialized():
        mpu.destroy_model_parallel()
        clear_globals()
    if torch.distributed.is_initialized():
        if torch.distributed.get_backend() == "nccl" and torch.distributed.get_world_size() == 1:
            shut_down_groups_at_once()
        torch.distributed.destroy_process_group()


def coordinates() -> dict[str, int]:
    """Returns this rank's index in each group: dp_rank, dp_size, tp_rank, tp_size, pp_rank, pp_size."""
    return {
        "dp_rank": mpu.get_data_parallel_rank(),
        "dp_size": mpu.get_data_parallel_world_size(),
        "tp_rank": mpu.get_tensor_model_parallel_rank(),
        "tp_size": mpu.get_tensor_model_parallel_world_size(),
        "pp_rank": mpu.get_pipeline_model_parallel_rank(),
        "pp_size": mpu.get_pipeline_model_parallel_world_size(),
    }


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


def gather(value: Any) -> list[Any]:
    """Return every rank's value, in rank order, on every rank; collective."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def raise_together(errors: Sequence[OSError | None], path: Path, needed_bytes: int | None = None) -> None:
    """Raise the disk error of the first rank that has one; every rank with the same arguments raises the same.

    Args:
        errors: the error of each rank, in rank order; None for a rank without one.
        path: what the ranks wrote.
        needed_bytes: bytes of all that they wrote, if known.

    Raises:
        DiskFullError: that rank had no space.
        OSError: that rank had another error.
    """
    for rank, error in enumerate(errors):
        if error is None:
            continue
        if is_disk_full(error):
            raise disk_full(path, error, needed_bytes)
        raise OSError(error.errno, f"rank {rank} cannot write its part of {path}: {error.strerror}")
