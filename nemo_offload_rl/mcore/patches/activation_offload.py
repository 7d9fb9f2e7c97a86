"""Replaces megatron-core's activation offloading by ours."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import fine_grained_activation_offload
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface,
    PipelineOffloadManager,
)
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer import transformer_block
from megatron.core.transformer.transformer_layer import TransformerLayer

from nemo_offload_rl.activation_offload.copies import CudaCopies
from nemo_offload_rl.activation_offload.manager import ActivationOffloader
from nemo_offload_rl.activation_offload.schedule import ActivationOptions
from nemo_offload_rl.config.installed.declared_fields import untested_megatron_core
from nemo_offload_rl.config.megatron import LAYER_INPUT
from nemo_offload_rl.mcore.patches.layer_input import checkpointed_forward


def options_of_rank(options: ActivationOptions, config: Any) -> ActivationOptions:
    """Return a recipe's options, completed with values that depend on this rank and the model's TransformerConfig."""
    rank, stages = mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()
    virtual = mpu.get_virtual_pipeline_model_parallel_world_size() or 1
    return dataclasses.replace(
        options,
        resident_bytes=rank * config.delta_offload_bytes_across_pp_ranks,
        max_inflight=config.fine_grained_offloading_max_inflight_offloads,
        margin_stage=virtual - 1 if rank == stages - 1 else None,
    )


def require_tested_version() -> None:
    """Refuse a version of megatron-core that was not tested, whose layers might call other functions.

    Raises:
        ValueError: the installed version was not tested.
    """
    refusal = untested_megatron_core()
    if refusal is not None:
        raise ValueError(f"policy.megatron_cfg.fine_grained_activation_offloading {refusal}.")


_ORIGINAL_GROUP_OFFLOAD = fine_grained_activation_offload.fine_grained_offloading_group_offload


def _group_offload(
    output: Any, name: str, forced_released_tensors: Sequence[torch.Tensor] | None = None, delay_offload: bool = False
) -> Any:
    """End a group; takes the arguments of megatron-core's `fine_grained_offloading_group_offload`, which it replaces.

    megatron-core's function adds an identity node behind the output, whose backward pass notifies its manager. Our
    manager is notified when the first of the tensors that the module saved is unpacked: the graph gets no node.

    Args:
        output: the module's output; of several tensors the first is used.
        name: name of the module.
        forced_released_tensors: ignored; their memory is freed with the last reference, and never too early.
        delay_offload: whether a commit within a graph's replay waits for its end.

    Returns:
        `output`.
    """
    if isinstance(output, (tuple, list)):
        if output:
            _group_offload(output[0], name, forced_released_tensors, delay_offload)
        return output
    manager = PipelineOffloadManager.OFFLOAD_MGR
    assert isinstance(manager, ActivationOffloader)
    chunk = manager.cur_forward_chunk()
    if chunk is None:
        return output
    manager.end_group(chunk, name, delay=delay_offload)
    return output


_ORIGINAL_CHECKPOINT = CheckpointWithoutOutput.checkpoint
_ORIGINAL_CHECKPOINTED_FORWARD = transformer_block.checkpointed_forward


def _checkpoint(checkpoint: CheckpointWithoutOutput, run_function: Callable[..., Any], *args: Any) -> Any:
    """Runs selective recomputation, with the arguments of megatron-core's `CheckpointWithoutOutput.checkpoint`.

    megatron-core saves the detached inputs. It empties the outputs' storages once the modules that read them have run,
    and fills them in the backward pass; where a separate module computes a layer's first norm, as in multi-latent
    attention, `qkv_linear` saves what `layernorm` discards in this way.
    """
    manager = PipelineOffloadManager.OFFLOAD_MGR
    if not isinstance(manager, ActivationOffloader):  # another manager has replaced ours
        return _ORIGINAL_CHECKPOINT(checkpoint, run_function, *args)
    with manager.saving_to_recompute():
        outputs = _ORIGINAL_CHECKPOINT(checkpoint, run_function, *args)
    for output in checkpoint.outputs or ():
        manager.exclude_recomputed(output.untyped_storage())
    return outputs


class _EndOfCapturedBackward(torch.autograd.Function):
    """Ends the capture of a backward pass as its last node; leaves tensor and gradients unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _end_capture(forward=False)
        return grads


class CapturedLayerInterface(FineGrainedActivationOffloadingInterface):
    """Passes a layer's calls to our manager while its graphs are captured.

    megatron-core's own interface joins its manager's copy streams, which fails in a capture that has copied nothing.
    """

    @staticmethod
    def forward_record() -> None:
        """End a captured forward pass."""
        _end_capture(forward=True)

    @staticmethod
    def backward_record(tensor: torch.Tensor) -> torch.Tensor:
        """Mark the start of a captured forward pass, where the backward pass will end."""
        recorded: torch.Tensor = _EndOfCapturedBackward.apply(tensor)
        return recorded


def _end_capture(*, forward: bool) -> None:
    if not torch.cuda.is_current_stream_capturing():  # in Transformer Engine's warm-up before a capture
        return
    manager = PipelineOffloadManager.OFFLOAD_MGR
    assert isinstance(manager, ActivationOffloader)
    # The main stream goes on from here, beside the copies that the graph itself still waits for.
    torch.cuda.current_stream().record_event(manager.cuda_graph_event)
    manager.end_capture(forward=forward)


def install(
    model: Sequence[torch.nn.Module],
    options: ActivationOptions,
    memory: torch.Tensor,
    device: torch.device,
    *,
    graphs: bool = False,
) -> ActivationOffloader:
    """Make megatron-core's layers call a manager of ours from now on; a process has one at a time.

    Args:
        model: the chunks; their parameters and buffers are never offloaded.
        options: what to offload.
        memory: page-locked host memory, uint8 [nbytes].
        device: the GPU.
        graphs: whether layers are captured in CUDA graphs.
    """
    excluded = [tensor.untyped_storage() for tensor in _held(model)]
    offloader = ActivationOffloader(options, memory, CudaCopies(device, graphs=graphs), excluded)
    if graphs:
        offloader.cuda_graph_stream = torch.cuda.Stream(device)
        offloader.cuda_graph_event = torch.cuda.Event(external=True)
    for module in (module for chunk in model for module in chunk.modules()):
        if isinstance(module, GPTModel) and module.post_process:
            module.output_layer.register_forward_pre_hook(lambda *_: offloader.drain())
        if isinstance(module, TransformerLayer):
            module.off_interface = CapturedLayerInterface
    take_place(offloader)
    return offloader


def take_place(offloader: ActivationOffloader) -> None:
    """Make megatron-core's functions call this offloader, until `uninstall`."""
    PipelineOffloadManager.OFFLOAD_MGR = offloader
    fine_grained_activation_offload.fine_grained_offloading_group_offload = _group_offload
    CheckpointWithoutOutput.checkpoint = _checkpoint
    transformer_block.checkpointed_forward = (
        checkpointed_forward if LAYER_INPUT in offloader.options.modules else _ORIGINAL_CHECKPOINTED_FORWARD
    )


def uninstall(offloader: ActivationOffloader) -> None:
    """Restore megatron-core's functions and manager, unless another offloader of ours has been installed since."""
    manager = PipelineOffloadManager.OFFLOAD_MGR
    if manager is offloader:
        PipelineOffloadManager.OFFLOAD_MGR = None
    elif isinstance(manager, ActivationOffloader):
        return  # another one of ours has replaced it
    fine_grained_activation_offload.fine_grained_offloading_group_offload = _ORIGINAL_GROUP_OFFLOAD
    CheckpointWithoutOutput.checkpoint = _ORIGINAL_CHECKPOINT
    transformer_block.checkpointed_forward = _ORIGINAL_CHECKPOINTED_FORWARD


def _held(model: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for chunk in model:
        yield from chunk.parameters()
        yield from torch.nn.Module.buffers(chunk)  # DistributedDataParallel has a list of that name
