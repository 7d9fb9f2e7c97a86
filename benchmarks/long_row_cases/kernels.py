"""Times the kernels of a step alone: attention of one layer by the model's own module, and matrix products."""

import statistics
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_layer import TransformerLayer

from long_row_cases.ways import Way
from nemo_offload_rl.config.megatron import tokens_of_tile
from nemo_offload_rl.worker.worker import MegatronPolicyWorker


def kernel_seconds(worker: MegatronPolicyWorker, policy: Any, tokens: int, way: Way) -> float | None:
    """Returns the seconds that a step's attention and matrix products take by themselves; None without a GPU.

    Left out: norms, activations, rotary embeddings, the loss, the optimizer, and all copies.
    """
    if worker.device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    cfg = policy["megatron_cfg"]
    layers = [module for module in worker.state.model[0].modules() if isinstance(module, TransformerLayer)]
    attention, mlp = layers[0].self_attention, layers[0].mlp
    forward_s, backward_s = _attention_seconds(attention, tokens)
    of_layer = way.attention_passes * forward_s + backward_s
    tile = tokens_of_tile(cfg["mlp_tile_tokens"], worker.state.config.hidden_size) or tokens
    linear = [(module, tokens) for module in (attention.linear_qkv, attention.linear_proj)]
    for module, rows in (*linear, *((module, min(tile, tokens)) for module in (mlp.linear_fc1, mlp.linear_fc2))):
        forward_s, backward_s = _product_seconds(module.weight.shape, rows)
        of_layer += tokens / rows * (way.layer_passes * forward_s + backward_s)
    rows = min(cfg["fused_linear_logprobs_chunk_size"], tokens)
    forward_s, backward_s = _product_seconds((worker.state.vocab_size, worker.state.config.hidden_size), rows)
    return len(layers) * of_layer + tokens / rows * (2 * forward_s + backward_s)


def _attention_seconds(attention: Any, tokens: int) -> tuple[float, float]:
    config = attention.config
    heads, groups, size = config.num_attention_heads, config.num_query_groups, config.kv_channels
    query, key, value = (_random(tokens, 1, number, size).requires_grad_() for number in (heads, groups, groups))
    gradient = _random(tokens, 1, heads * size)
    made: list[torch.Tensor] = []

    def forward() -> None:
        made.clear()
        made.append(attention.core_attention(query, key, value, None, attn_mask_type=AttnMaskType.causal))

    def backward() -> None:
        torch.autograd.grad(made.pop(), (query, key, value), gradient)

    forward_s, backward_s = _seconds(forward, backward)
    return forward_s, backward_s


def _product_seconds(shape: Any, rows: int) -> tuple[float, float]:
    """Returns the seconds of x W^T, and of both of its gradients.

    Args:
        shape: of W, [output, input].
        rows: of x.
    """
    weight, x, gradient = _random(*shape), _random(rows, shape[1]), _random(rows, shape[0])

    def backward() -> None:
        torch.mm(gradient, weight)
        torch.mm(gradient.t(), x)

    forward_s, backward_s = _seconds(lambda: torch.mm(x, weight.t()), backward)
    return forward_s, backward_s


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def _seconds(*parts: Callable[[], object], budget_s: float = 2.0) -> list[float]:
    """Returns the median seconds of each of the parts, which run in turn.

    The first round is left out, unless it takes the whole budget: steps have run the same kernels before.
    """
    taken: list[list[float]] = []
    while not taken or (len(taken) < 20 and sum(map(sum, taken)) < budget_s):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
        marks[0].record()
        for part, mark in zip(parts, marks[1:], strict=True):
            part()
            mark.record()
        marks[-1].synchronize()
        taken.append([before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)])
    return [statistics.median(of_part) for of_part in zip(*(taken[1:] or taken), strict=True)]
