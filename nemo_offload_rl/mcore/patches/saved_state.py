"""Clears what megatron-core's layers and gradient buckets keep as attributes of a step that has failed."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP, SharedExpertState
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer


@contextlib.contextmanager
def clear_saved_state_on_failure(model: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Run a schedule inside; if it fails, clear all that the model holds of what autograd has saved.

    Layers hand tensors from one of their parts to the next as attributes, each with all that autograd has saved up to
    it. The next pass overwrites them; until then, through all phases in between, the failed one would live on.

    Args:
        model: the chunks.
    """
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(_forget, model)
        yield
        on_failure.pop_all()


def _forget(model: Sequence[torch.nn.Module]) -> None:
    for group in _bucket_groups(model):
        group.per_param_grad_ready_counts = {}  # after the first backward pass these have to be whole
    for module in _modules(model):
        for name, value in list(vars(module).items()):
            if isinstance(value, CheckpointWithoutOutput):  # of selective recomputation, with its inputs
                setattr(module, name, None)
        if isinstance(module, TransformerLayer):
            module.mlp_norm_manager = None  # from the norm before an MLP to the end of its layer
        elif isinstance(module, MoELayer):
            _forget_tensors(module.token_dispatcher)
            if isinstance(module.token_dispatcher, MoEFlexTokenDispatcher):
                _forget_tensors(module.token_dispatcher._comm_manager)
        elif isinstance(module, SharedExpertMLP) and module.config.moe_shared_expert_overlap:
            _forget_tensors(module)
            module._overlap_state = SharedExpertState.IDLE  # the next pass would begin with an error


def _forget_tensors(holder: Any) -> None:
    """Clear a pass's tensors, which have a history; those built with the model, as orders of experts, do not."""
    for name, value in list(vars(holder).items()):
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            setattr(holder, name, None)


def wait_for_reductions(model: Sequence[torch.nn.Module]) -> None:
    """End the reductions of gradients that a failed step has begun, of overlap_grad_reduce.

    Not where it failed, since other ranks may never join them; but before the gradients' memory is used again.

    Args:
        model: the chunks.
    """
    for group in _bucket_groups(model):
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle.wait()
            group.grad_reduce_handle = None


def _bucket_groups(model: Sequence[torch.nn.Module]) -> Iterator[Any]:
    for chunk in model:
        if isinstance(chunk, DistributedDataParallel):
            yield from (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)


def _modules(model: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    for chunk in model:
        yield from chunk.modules()
