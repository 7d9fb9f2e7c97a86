"""Computes dense MLPs one tile of tokens at a time, of which only the MLP's input is saved.

The backward pass runs each tile's forward pass again and differentiates it. `torch.autograd.grad` returns the gradients
of the weights without running their accumulation nodes; their sums over tiles are the gradients of one call. So
DistributedDataParallel's hook on such a node runs once, after the last tile, also where a recomputed layer calls the
MLP. Sums are float32: rounding each tile's to bfloat16 would lose what the product over all tokens keeps.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from nemo_offload_rl.config.megatron import MLP_TILES_KEY
from nemo_offload_rl.mcore.patches import layer_input


def tile_mlps(chunks: Iterable[torch.nn.Module], tile_tokens: int | None) -> None:
    """Make the MLPs of model chunks compute this many tokens of a micro-batch at a time.

    Names of modules and parameters stay as they are. None changes nothing.

    Raises:
        ValueError: a layer has another MLP than megatron-core's dense one.
    """
    if tile_tokens is None:
        return
    for layer in (module for chunk in chunks for module in chunk.modules()):
        if not isinstance(layer, TransformerLayer) or isinstance(layer.mlp, IdentityOp):
            continue
        if type(layer.mlp) is not MLP:
            raise ValueError(
                f"{MLP_TILES_KEY} is set, but layer {layer.layer_number} has a {type(layer.mlp).__name__}, and only "
                "megatron-core's dense MLP is computed in tiles; set it to null."
            )
        layer.mlp.forward = _TiledForward(layer, tile_tokens)


class _TiledForward:
    """Takes the place of an MLP's `forward`."""

    def __init__(self, layer: TransformerLayer, tile_tokens: int) -> None:
        self._layer = layer
        self._mlp = mlp = layer.mlp
        self._whole: Callable[[Tensor], tuple[Tensor, Tensor | None]] = mlp.forward
        self.dtype = mlp.config.params_dtype
        # With sequence parallelism the MLP gathers a tile's rows from all ranks.
        self._tokens = tile_tokens // (mlp.tp_group.size() if mlp.config.sequence_parallel else 1)

    def __call__(
        self, hidden_states: Tensor, per_token_scale: None = None, **_: Any
    ) -> tuple[Tensor, torch.nn.Parameter | None]:
        """Returns the MLP's output [S, B, H] and the bias that the layer adds to it, if there is one.

        Args:
            hidden_states: [S, B, H]; with sequence parallelism this rank's shard of S.
            per_token_scale: must be None: only experts scale tokens.
        """
        assert per_token_scale is None
        trained = [parameter for parameter in self._mlp.parameters() if parameter.requires_grad]
        output: Tensor = _Tiles.apply(hidden_states, self, *trained)
        bias = self._mlp.linear_fc2.bias
        return output, bias if bias is not None and bias.numel() else None  # Transformer Engine's is empty without one

    def tiles(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Returns views of [S, B, H], each of a tile's rows; on each rank the same number, since S is the same."""
        return tensor.split(max(1, self._tokens // tensor.shape[1]))

    @property
    def output_is_unused(self) -> bool:
        """Whether nothing reads the output's values: the layer only adds them to its residual, and is thrown away."""
        return type(self._layer) is TransformerLayer and layer_input.output_is_unused(self._layer)

    def output_of(self, tile: Tensor) -> Tensor:
        """Returns the MLP's output without its bias, which is not part of the tile: the layer adds it to all rows."""
        output, bias = self._whole(tile)
        assert bias is None or bias is self._mlp.linear_fc2.bias
        return output


class _Tiles(torch.autograd.Function):
    """Computes the output of an MLP; saves its input."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, of: _TiledForward, *trained: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.of, ctx.trained = of, trained  # not saved: hooks that offload saved tensors would move weights
        output = torch.empty_like(hidden, dtype=of.dtype)
        if of.output_is_unused:  # the backward pass computes each tile in any case
            return output
        for rows, tile in zip(of.tiles(output), of.tiles(hidden), strict=True):
            rows.copy_(of.output_of(tile))
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        of: _TiledForward = ctx.of
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        sums: list[Tensor | None] = [None] * len(ctx.trained)
        grad_tiles = [None] * len(of.tiles(hidden)) if grad_hidden is None else of.tiles(grad_hidden)
        for tile, grad_output, grad_tile in zip(of.tiles(hidden), of.tiles(grad_outputs[0]), grad_tiles, strict=True):
            _differentiate(of, tile.detach(), grad_output, ctx.trained, grad_tile=grad_tile, sums=sums)
        return grad_hidden, None, *(_rounded(total, weight) for total, weight in zip(sums, ctx.trained, strict=True))


def _differentiate(
    of: _TiledForward,
    tile: Tensor,
    grad_output: Tensor,
    trained: Sequence[Tensor],
    *,
    grad_tile: Tensor | None,
    sums: list[Tensor | None],
) -> None:
    """Run a tile again; write its gradient to `grad_tile` and add those of the trained parameters to `sums`."""
    inputs = [*trained]
    if grad_tile is not None:
        inputs.append(tile.requires_grad_())
    with torch.enable_grad():
        output = of.output_of(tile)
    grads = torch.autograd.grad(output, inputs, grad_output, allow_unused=True)
    if grad_tile is not None:
        grad_tile.copy_(grads[-1])
    for index, (parameter, grad) in enumerate(zip(trained, grads, strict=False)):
        if grad is None:  # the bias that the layer adds
            continue
        # With gradient_accumulation_fusion the product has been added to main_grad, and this is a placeholder.
        if getattr(parameter, "grad_added_to_main_grad", False):
            sums[index] = grad
        elif (total := sums[index]) is None:
            sums[index] = grad.to(torch.float32, copy=True)
        else:
            total.add_(grad)


def _rounded(total: Tensor | None, parameter: Tensor) -> Tensor | None:
    return None if total is None else total.to(parameter.dtype)
