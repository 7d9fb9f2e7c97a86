"""Changes the inputs of megatron-core's layers in CUDA graphs: no attention mask, but routers get the padding mask."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.module import GraphableMegatronModule
from torch import Tensor


@contextlib.contextmanager
def captured_inputs(
    layers: Sequence[Any], seen: Callable[[torch.UntypedStorage], None]
) -> Iterator[Mapping[Any, Tensor]]:
    """Capture layers inside as our forward passes call them, and yield the padding masks that their graphs will read.

    By default each layer's static inputs have a causal mask of [n, 1, S, S] bools, which causal kernels do not read: at
    16 layers and 32,768 tokens 16 GiB. And megatron-core captures routers without a padding mask.

    Args:
        layers: the layers to capture.
        seen: called with the storage of each of their static inputs.

    Yields:
        By layer with experts a bool tensor [n, S], or a shard of it, all False; filled during the capture.
    """
    padding: dict[Any, Tensor] = {}
    for layer in layers:
        layer.get_layer_static_inputs = functools.partial(_static_inputs, layer, seen, padding)
    try:
        yield padding
    finally:
        for layer in layers:
            del layer.get_layer_static_inputs
            if layer in padding:
                del layer._forward_mlp


def _static_inputs(
    layer: Any, seen: Callable[[torch.UntypedStorage], None], padding: dict[Any, Tensor], *args: Any
) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = GraphableMegatronModule.get_layer_static_inputs(layer, *args)
    if layer.is_moe_layer and layer not in padding:
        hidden = inputs["hidden_states"]
        # One for all micro-batches: a graph reads it in its forward pass only, since routers are not recomputed in it.
        padding[layer] = torch.zeros(hidden.shape[1], hidden.shape[0], dtype=torch.bool, device=hidden.device)
        layer._forward_mlp = functools.partial(type(layer)._forward_mlp, layer, padding_mask=padding[layer])
        seen(padding[layer].untyped_storage())
    for tensor in inputs.values():
        seen(tensor.untyped_storage())
    return inputs


def replay_with_inputs(layers: Sequence[Any], padding: Mapping[Any, Tensor]) -> None:
    """Make layers replay with the inputs that they were captured with, until `replay_as_before`.

    Args:
        layers: the layers, captured within `captured_inputs`.
        padding: what that yielded.
    """
    for layer in layers:
        layer._get_te_cuda_graph_replay_args = functools.partial(_replay_args, layer)
        layer._te_cuda_graph_replay = functools.partial(_replay, layer, padding.get(layer))


def replay_as_before(layers: Sequence[Any]) -> None:
    """Undo `replay_with_inputs`."""
    for layer in layers:
        del layer._get_te_cuda_graph_replay_args, layer._te_cuda_graph_replay


def _replay(layer: Any, captured: Tensor | None, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any) -> Any:
    """Replay a layer whose graph reads the padding mask from `captured`; what follows the graph gets the mask itself.

    megatron-core would pass the mask to the graph, which has no such input, and drop it behind the graph.
    """
    if padding_mask is None:
        return type(layer)._te_cuda_graph_replay(layer, *args, **kwargs)
    if captured is not None:
        captured.copy_(padding_mask)
    layer._forward_mlp = functools.partial(type(layer)._forward_mlp, layer, padding_mask=padding_mask)
    try:
        return type(layer)._te_cuda_graph_replay(layer, *args, **kwargs)
    finally:
        del layer._forward_mlp


def _replay_args(layer: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Returns a replay's arguments with an empty mask; for None megatron-core would make zeros of [n, 1, S, S]."""
    if "attention_mask" in kwargs:
        assert kwargs["attention_mask"] is None, "graphs are captured without an attention mask"
        kwargs["attention_mask"] = torch.empty(0)  # no input of the graph, which does not read it
    return type(layer)._get_te_cuda_graph_replay_args(layer, *args, **kwargs)
