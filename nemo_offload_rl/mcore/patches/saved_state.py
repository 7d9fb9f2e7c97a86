"""Clears state that a failed step leaves in attributes of megatron-core's layers and gradient buckets."""

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
    """Run a schedule inside; if it fails, clear the tensors in the model's attributes that hold saved activations.

    Layers pass tensors from one of their parts to the next as attributes, and each keeps all that autograd has saved up
    to it. The next pass overwrites them; until then, through all phases in between, the failed pass's would stay alive.

    Args:
        model: the chunks.
    """
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(_clear, model)
        yield
        on_failure.pop_all()


def _clear(model: Sequence[torch.nn.Module]) -> None:
    for group in _bucket_groups(model):
        group.per_param_grad_ready_counts = {}  # megatron-core asserts that a first backward pass's are complete
    for module in _modules(model):
        for name, value in list(vars(module).items()):
            if isinstance(value, CheckpointWithoutOutput):  # selective recomputation, which holds its inputs
                setattr(module, name, None)
        if isinstance(module, TransformerLayer):
            module.mlp_norm_manager = None  # set from the norm before an MLP to the end of its layer
        elif isinstance(module, MoELayer):
            _clear_tensors(module.token_dispatcher)
            if isinstance(module.token_dispatcher, MoEFlexTokenDispatcher):
                _clear_tensors(module.token_dispatcher._comm_manager)
        elif isinstance(module, SharedExpertMLP) and module.config.moe_shared_expert_overlap:
            _clear_tensors(module)
            module._overlap_state = SharedExpertState.IDLE  # the next pass would raise in another state


def _clear_tensors(holder: Any) -> None:
    """Clear a pass's tensors, which have a grad_fn; those built with the model, such as expert orders, do not."""
    for name, value in list(vars(holder).items()):
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            setattr(holder, name, None)


def wait_for_reductions(model: Sequence[torch.nn.Module]) -> None:
    """Wait for the gradient reductions (overlap_grad_reduce) that a failed step has started.

    Not right after the failure, since other ranks may never join them, but before the gradients' memory is used again.

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
