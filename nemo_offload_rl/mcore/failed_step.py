"""Clears what megatron-core's layers keep of a step that fails or is skipped."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP, SharedExpertState
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer

from nemo_offload_rl.memory.errors import preserve_first_error


@contextlib.contextmanager
def clear_saved_state_on_failure(model: Sequence[torch.nn.Module]) -> Iterator[None]:
    """A schedule runs inside; of one that fails the model keeps nothing alive that autograd has saved, wherever it is.

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
    """Those of a pass have a history; what was built with the model, such as orders of experts, has none."""
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


@contextlib.contextmanager
def router_updates(model: Sequence[torch.nn.Module], config: Any) -> Iterator[Callable[[], None]]:
    """A step runs inside; if it fails, or calls what this yields, its tokens have not moved the routers' biases.

    The schedule itself, in `finalize_model_grads`, moves them by the counts of tokens per expert, before it is
    known whether the step's gradients are finite; and counts of a schedule that fails would be part of the next step's.

    Args:
        model: the chunks.
        config: their TransformerConfig.
    """
    has_routers = config.num_moe_experts is not None  # to look for them takes the CPU a millisecond
    routers = [module for module in _modules(model) if isinstance(module, TopKRouter)] if has_routers else []
    biases = [bias for router in routers for bias in (router.expert_bias, router.qb_beta) if bias is not None]
    before = [bias.clone() for bias in biases]

    def undo() -> None:
        for bias, value in zip(biases, before, strict=True):
            bias.copy_(value)
        reset_model_temporary_tensors(config, list(model))  # the counts

    try:
        yield undo
    except BaseException:
        with preserve_first_error():  # a GPU that has failed says so again
            undo()
        raise
