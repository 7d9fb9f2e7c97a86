"""Puts our activation offloading in the place of megatron-core's."""

from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

from nemo_offload_rl.offload.activation_copies import CudaCopies
from nemo_offload_rl.offload.activations import ActivationOffloader, ActivationOptions

TESTED_VERSIONS = ("0.19.2",)
"""Of megatron-core: how its layers call the manager, and what they expect of it, is no public interface."""


def activation_options(config: Any) -> ActivationOptions:
    """What a model's TransformerConfig asks for, on this rank."""
    rank, stages = mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()
    virtual = mpu.get_virtual_pipeline_model_parallel_world_size() or 1
    return ActivationOptions(
        modules=tuple(config.offload_modules),
        fraction=config.activation_offload_fraction,
        min_elements=config.min_offloaded_tensor_size,
        resident_bytes=rank * config.delta_offload_bytes_across_pp_ranks,
        max_inflight=config.fine_grained_offloading_max_inflight_offloads,
        margin_stage=virtual - 1 if rank == stages - 1 else None,
    )


def require_tested_version() -> None:
    """Refuse a megatron-core whose layers might call something else.

    Raises:
        ValueError: it is of a version that this was not tested with.
    """
    found = version("megatron-core")  # its own __version__ ends in a commit of whatever folder it is run in
    if found not in TESTED_VERSIONS:
        raise ValueError(
            "policy.megatron_cfg.fine_grained_activation_offloading takes the place of a private part of megatron-core "
            f"and was tested with {', '.join(TESTED_VERSIONS)}, but {found} is installed; install a tested version, or "
            "set the key to false."
        )


def install(
    model: Sequence[torch.nn.Module], options: ActivationOptions, memory: torch.Tensor, device: torch.device
) -> ActivationOffloader:
    """Let megatron-core's layers call our manager from now on, one in a process.

    Args:
        model: the chunks; their parameters and buffers are never offloaded.
        options: what to offload.
        memory: page-locked host memory, uint8 [nbytes].
        device: the GPU.
    """
    keep = [tensor.untyped_storage() for tensor in _held(model)]
    offloader = ActivationOffloader(options, memory, CudaCopies(device), keep)
    PipelineOffloadManager.OFFLOAD_MGR = offloader
    for chunk in model:
        for gpt in chunk.modules():
            if isinstance(gpt, GPTModel) and gpt.post_process:
                gpt.output_layer.register_forward_pre_hook(lambda *_: offloader.drain())
    return offloader


def uninstall(offloader: ActivationOffloader) -> None:
    """Let megatron-core make a manager of its own if it wants one."""
    if PipelineOffloadManager.OFFLOAD_MGR is offloader:
        PipelineOffloadManager.OFFLOAD_MGR = None


def _held(model: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for chunk in model:
        yield from chunk.parameters()
        yield from torch.nn.Module.buffers(chunk)  # DistributedDataParallel has a list of that name
