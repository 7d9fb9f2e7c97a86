"""Makes routers count tokens without padding, and weighs their auxiliary losses by them, over the trained tokens.

megatron-core adds to the gradient that of `w * aux`, for each micro-batch of each data-parallel rank. Its default
`w` is 1 / (micro-batches x ranks). With `calculate_per_token_loss`, as NeMo-RL trains (`_compute_moe_grad_scale` in its
megatron_policy_worker.py), the router multiplies `aux` by the micro-batch's tokens N, gradients are summed over ranks,
and `moe_grad_scale_func` divides by the trained tokens G of the global batch, as the policy's loss is:

    w = N / G,    G = sum(token_mask[:, 1:] * sample_mask)

That is done here with losses that are not per token: the schedule divides the scale by the micro-batches and
DistributedDataParallel the gradients by the ranks, so that both are multiplied back. N counts no padding.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
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
