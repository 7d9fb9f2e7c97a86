"""Replaces the inputs that megatron-core's layers are captured with in CUDA graphs, and those of their replays."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.module import GraphableMegatronModule


@contextlib.contextmanager
def without_attention_mask(layers: Sequence[Any], seen: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Capture layers with no attention mask, as our forward passes call them; `seen` is told of their inputs.

    A layer's own static inputs have a causal one of [n, 1, S, S] bools, for every layer, which causal kernels do not
    read: at 16 layers and 32,768 tokens 16 GiB.
    """
    for layer in layers:
        layer.get_layer_static_inputs = functools.partial(_static_inputs, layer, seen)
    try:
        yield
    finally:
        for layer in layers:
            del layer.get_layer_static_inputs


def _static_inputs(layer: Any, seen: Callable[[torch.UntypedStorage], None], *args: Any) -> dict[str, torch.Tensor]:
    inputs: dict[str, torch.Tensor] = GraphableMegatronModule.get_layer_static_inputs(layer, *args)
    for tensor in inputs.values():
        seen(tensor.untyped_storage())
    return inputs


def replay_without_attention_mask(layers: Sequence[Any]) -> None:
    """Replay layers as they were captured, until `replay_as_before`."""
    for layer in layers:
        layer._get_te_cuda_graph_replay_args = functools.partial(_replay_args, layer)


def replay_as_before(layers: Sequence[Any]) -> None:
    """Undo `replay_without_attention_mask`."""
    for layer in layers:
        del layer._get_te_cuda_graph_replay_args


def _replay_args(layer: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Returns a replay's arguments; megatron-core would make a zero mask of [n, 1, S, S] where it finds None."""
    if "attention_mask" in kwargs:
        assert kwargs["attention_mask"] is None, "graphs are captured without an attention mask"
        kwargs["attention_mask"] = torch.empty(0)  # no input of the graph, which does not look at it
    return type(layer)._get_te_cuda_graph_replay_args(layer, *args, **kwargs)
