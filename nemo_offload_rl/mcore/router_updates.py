"""Undoes the updates of router biases by a step that fails or is skipped."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.transformer.moe.router import TopKRouter

from nemo_offload_rl.memory.errors import preserve_first_error


@contextlib.contextmanager
def router_updates(model: Sequence[torch.nn.Module], config: Any) -> Iterator[Callable[[], None]]:
    """Run a step inside; undo its updates of router biases if it fails or calls the yielded function.

    The schedule itself, in `finalize_model_grads`, updates the biases by the counts of tokens per expert before it is
    known whether the step's gradients are finite; and the next step would add to the counts of a failed schedule.

    Args:
        model: the chunks.
        config: their TransformerConfig.
    """
    has_routers = config.num_moe_experts is not None  # searching for them takes the CPU a millisecond
    modules = (module for chunk in model for module in chunk.modules()) if has_routers else ()
    routers = [module for module in modules if isinstance(module, TopKRouter)]
    biases = [bias for router in routers for bias in (router.expert_bias, router.qb_beta) if bias is not None]
    before = [bias.clone() for bias in biases]

    def undo() -> None:
        for bias, value in zip(biases, before, strict=True):
            bias.copy_(value)
        reset_model_temporary_tensors(config, list(model))  # the counts

    try:
        yield undo
    except BaseException:
        with preserve_first_error():  # a failed GPU raises again
            undo()
        raise
