"""Runs another computation in place of a model's output layer, with the layer's hooks around it."""

from collections.abc import Callable

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor


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
