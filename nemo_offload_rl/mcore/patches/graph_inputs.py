"""Takes the attention mask out of the inputs of megatron-core's layers in CUDA graph captures and replays."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.module import GraphableMegatronModule


@contextlib.contextmanager
def without_attention_mask(layers: Sequence[Any], seen: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Capture layers inside without an attention mask, as our forward passes call them.

    By default each layer's static inputs have a causal mask of [n, 1, S, S] bools, which causal kernels do not read: at
    16 layers and 32,768 tokens 16 GiB.

    Args:
        layers: the layers to capture.
        seen: called with the storage of each of their static inputs.
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
    """Make layers replay without an attention mask, as they were captured, until `replay_as_before`."""
    for layer in layers:
        layer._get_te_cuda_graph_replay_args = functools.partial(_replay_args, layer)


def replay_as_before(layers: Sequence[Any]) -> None:
    """Undo `replay_without_attention_mask`."""
    for layer in layers:
        del layer._get_te_cuda_graph_replay_args


def _replay_args(layer: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Returns a replay's arguments with an empty mask; for None megatron-core would make zeros of [n, 1, S, S]."""
    if "attention_mask" in kwargs:
        assert kwargs["attention_mask"] is None, "graphs are captured without an attention mask"
        kwargs["attention_mask"] = torch.empty(0)  # no input of the graph, which does not read it
    return type(layer)._get_te_cuda_graph_replay_args(layer, *args, **kwargs)
