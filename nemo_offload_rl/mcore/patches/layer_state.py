"""Changes what layers compute and keep: routers' losses, the output layer, and state that a failed step leaves.

Makes routers count tokens without padding, and weighs their auxiliary losses by them, over the trained tokens.
megatron-core adds to the gradient that of `w * aux`, for each micro-batch of each data-parallel rank. Its default `w`
is 1 / (micro-batches x ranks). With `calculate_per_token_loss`, as NeMo-RL trains (`_compute_moe_grad_scale` in its
megatron_policy_worker.py), the router multiplies `aux` by the micro-batch's tokens N, gradients are summed over ranks,
and `moe_grad_scale_func` divides by the trained tokens G of the global batch, as the policy's loss is:

    w = N / G,    G = sum(token_mask[:, 1:] * sample_mask)

That is done here with losses that are not per token: the schedule divides the scale by the micro-batches and
DistributedDataParallel the gradients by the ranks, so that both are multiplied back. N counts no padding.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP, SharedExpertState
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


def weigh_by_tokens(model: Sequence[torch.nn.Module]) -> None:
    """Make the routers of model chunks multiply each auxiliary loss by the tokens of its micro-batch.

    And make those with an expert bias accept a padding mask.
    """
    for router in (module for chunk in model for module in chunk.modules()):
        if isinstance(router, TopKRouter):
            router.calculate_per_token_loss = True
            router._apply_expert_bias = functools.partial(_apply_expert_bias, router)
            router.attach_and_log_load_balancing_loss = functools.partial(_attach, router)


def _apply_expert_bias(router: TopKRouter, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
    """Count a micro-batch's tokens by expert; megatron-core combines [T, E] with a mask of [T], not of [T, 1]."""
    if padding_mask is not None:
        padding_mask = padding_mask[:, None]
    TopKRouter._apply_expert_bias(router, routing_map, padding_mask=padding_mask)


def _attach(
    router: TopKRouter,
    activation: Tensor,
    coefficient: float,
    loss: Tensor,
    name: str,
    group: torch.distributed.ProcessGroup,
    *,
    valid_token_count: Tensor | int,
    **kwargs: Any,
) -> Tensor:
    """Attach a loss, weighed by the mean of the tokens of the group's ranks, times the shards of a sequence.

    With a padding mask megatron-core's count of this rank is the group's, since its sum over the group is in place. The
    mean is also right where padding is not spread evenly over the shards; the last one may have nothing else.
    """
    if isinstance(valid_token_count, Tensor):
        valid_token_count = valid_token_count / group.size()
    attached: Tensor = TopKRouter.attach_and_log_load_balancing_loss(
        router, activation, coefficient, loss, name, group, valid_token_count=valid_token_count, **kwargs
    )
    return attached


@contextlib.contextmanager
def divided_by_trained_tokens(config: Any, num_tokens: Tensor, scale: float) -> Iterator[None]:
    """Run a training schedule inside whose auxiliary losses are divided by the trained tokens.

    Args:
        config: the chunks' TransformerConfig.
        num_tokens: trained tokens of the global batch, 0-dim.
        scale: by what losses are multiplied because the schedule and DistributedDataParallel divide by it.
    """
    if config.num_moe_experts is not None:
        per_token = (scale / num_tokens.clamp(min=1)).reshape(1)  # stays on the device, where the schedule wants it
        config.moe_grad_scale_func = lambda: per_token
    try:
        yield
    finally:
        config.moe_grad_scale_func = None


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


def call_with(layer: ColumnParallelLinear, forward: Callable[[Tensor], Tensor], hidden_states: Tensor) -> Tensor:
    """Run `forward` instead of an output layer's own forward pass, with the layer's hooks around it.

    The hooks wait for parameters that are still being gathered (overlap_param_gather) and for activations that are
    being offloaded.

    Args:
        layer: the output layer of a GPTModel.
        forward: the computation to run.
        hidden_states: its input.
    """
    layer.forward = forward
    try:
        result: Tensor = layer(hidden_states)
    finally:
        del layer.forward
    return result


def check_is_plain(chunks: list[torch.nn.Module]) -> None:
    """Refuse output layers that do more than multiply by their weight.

    Raises:
        ValueError: the model has such an output layer.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        if (
            isinstance(module, GPTModel)
            and module.post_process
            and type(module.output_layer) is not ColumnParallelLinear
        ):
            raise ValueError(
                f"The model's output layer ({type(module.output_layer).__name__}) does more than a product with its "
                "weight, so its logits cannot be computed in chunks; set policy.megatron_cfg.use_fused_linear_logprobs "
                "to false and policy.logprob_chunk_size to null."
            )
