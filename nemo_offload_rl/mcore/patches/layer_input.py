"""Recomputes layers from inputs that wait in host memory: `offload_modules: [layer_input]` with full recomputation.

megatron-core's uniform recomputation keeps the input of each segment of `recompute_num_layers` layers on the GPU, and
recomputes the segment with all of its layers' tensors at once. Here a segment's input goes to the host during the
forward pass, and is back before the segment's backward pass, while the segment behind it computes. The segment's other
layers get their inputs from a forward pass that saves nothing; then each layer, from the last to the first, is computed
again and differentiated, so that the tensors of one layer are there at a time.

With `core_attn` beside `layer_input`, attention is not computed again: its output and what its kernel keeps go to the
host, while queries, keys and values, which the kernel keeps too, are recomputed with the rest of the layer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from megatron.core.tensor_parallel.random import _fork_rng, _get_all_rng_states, _set_all_rng_states
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from nemo_offload_rl.activation_offload.groups import Saved
from nemo_offload_rl.activation_offload.manager import ActivationOffloader
from nemo_offload_rl.config.megatron import LAYER_INPUT

CORE_ATTN = "core_attn"


_differentiated: Any = None


def output_is_unused(layer: torch.nn.Module) -> bool:
    """Returns whether a layer is being computed only for its gradients: nothing reads the values of its output."""
    return _differentiated is layer


def checkpointed_forward(
    block: Any,
    hidden_states: torch.Tensor,
    *,
    use_inner_quantization_context: bool,
    extract_layer_indices: set[int] | None = None,
    layer_offset: int = 0,
    **inputs: Any,
) -> torch.Tensor:
    """Runs a block's layers, with the arguments of megatron-core's `checkpointed_forward`.

    Args:
        block: the TransformerBlock.
        hidden_states: [sequence, batch, hidden].
        use_inner_quantization_context: whether layers run in fp8 or fp4, which is not supported.
        extract_layer_indices: layers whose outputs are asked for as well, which is not supported.
        layer_offset: the number of layers before this block; not used.
        inputs: further arguments of each layer, the same for all.

    Returns:
        The last layer's output: [sequence, batch, hidden].
    """
    manager = PipelineOffloadManager.OFFLOAD_MGR
    assert isinstance(manager, ActivationOffloader)
    assert not use_inner_quantization_context and not extract_layer_indices and inputs["context"] is None
    for start in range(0, len(block.layers), block.config.recompute_num_layers):
        layers = block.layers[start : start + block.config.recompute_num_layers]
        if manager.cur_forward_chunk() is None:  # nothing is differentiated
            for layer in layers:
                hidden_states = _run(layer, hidden_states, inputs)
        else:
            hidden_states = _Segment.apply(SegmentPass(manager, layers, inputs, hidden_states), hidden_states)
    return hidden_states


def _run(layer: torch.nn.Module, hidden_states: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    hidden_states, _ = layer(hidden_states=hidden_states, inference_context=None, **inputs)
    return hidden_states


@contextmanager
def _differentiating(layer: torch.nn.Module) -> Iterator[None]:
    global _differentiated
    _differentiated = layer
    try:
        yield
    finally:
        _differentiated = None


class SegmentPass:
    """Takes a micro-batch through a segment of layers, forward and backward.

    Args:
        manager: moves the segment's input, and what attention keeps.
        layers: the segment's layers.
        inputs: arguments of each layer beside the hidden states.
        hidden_states: the segment's input, [sequence, batch, hidden].
    """

    def __init__(
        self,
        manager: ActivationOffloader,
        layers: Sequence[Any],
        inputs: dict[str, Any],
        hidden_states: torch.Tensor,
    ) -> None:
        self._manager, self._layers, self._inputs = manager, layers, inputs
        saved = hidden_states.detach()
        if hidden_states.is_leaf:  # received from another pipeline stage: the schedule holds it, for its gradient
            manager.mark_not_offload(saved)
        with manager.group(LAYER_INPUT) as self._group:
            self._input = manager.save(saved)
        keeps = CORE_ATTN in manager.options.modules
        self._attention = [KeptAttentionPass(manager) if keeps else None for _ in layers]
        self._rng_states: list[Any] = []

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the segment's output, [sequence, batch, hidden], with no autograd graph."""
        with torch.no_grad():
            for index in range(len(self._layers)):
                self._rng_states.append(_get_all_rng_states())
                hidden_states = self._run(index, hidden_states)
        return hidden_states

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Accumulates the gradients of the layers' weights.

        Args:
            gradient: of the segment's output.

        Returns:
            The gradient of its input.
        """
        self._manager.reach(self._group)
        inputs = [self._manager.unpack(self._input)]
        del self._input
        with _fork_rng():
            with torch.no_grad():
                for index in range(len(self._layers) - 1):
                    _set_all_rng_states(*self._rng_states[index])
                    inputs.append(self._run(index, inputs[-1]))
            for index in reversed(range(len(self._layers))):
                _set_all_rng_states(*self._rng_states[index])
                hidden_states = inputs.pop().detach().requires_grad_()
                with torch.enable_grad(), _differentiating(self._layers[index]):
                    # The output is freed: only its edge of the graph is needed.
                    edge = get_gradient_edge(self._run(index, hidden_states))
                torch.autograd.backward([edge], [gradient])
                assert hidden_states.grad is not None
                gradient = hidden_states.grad
                del edge, hidden_states
        return gradient

    def _run(self, index: int, hidden_states: torch.Tensor) -> torch.Tensor:
        layer, attention = self._layers[index], self._attention[index]
        # Linear attention has no such module; it is recomputed with the rest of its layer.
        module = getattr(layer.self_attention, "core_attention", None)
        with nullcontext() if attention is None or module is None else attention.of(module):
            return _run(layer, hidden_states, self._inputs)


class _Segment(torch.autograd.Function):
    """Puts a segment's pass into the autograd graph."""

    @staticmethod
    def forward(ctx: Any, segment: SegmentPass, hidden_states: torch.Tensor) -> torch.Tensor:
        ctx.segment = segment
        return segment.forward(hidden_states)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("a recomputed layer accumulates its weights' gradients: use backward(), not grad()")
        segment, ctx.segment = ctx.segment, None
        return None, segment.backward(*gradients)


class KeptAttentionPass:
    """Computes a layer's attention once, and hands its output to the layer's recomputation.

    It is any attention with queries, keys and values as its first arguments: what autograd saves of these is replaced
    by their place in memory, and found there again in those that were recomputed.

    Args:
        manager: moves the output, and what else autograd saves.
    """

    def __init__(self, manager: ActivationOffloader) -> None:
        self._manager = manager
        self._inputs = _Inputs()
        self._output: Saved | None = None
        self._edge: Any = None
        self._rng_states: Any = None

    @contextmanager
    def of(self, module: torch.nn.Module) -> Iterator[None]:
        """Takes the place of a layer's attention inside."""
        own, forward = vars(module).get("forward"), module.forward
        module.forward = partial(self._run, forward)
        try:
            yield
        finally:
            del module.forward
            if own is not None:
                module.forward = own

    def _run(self, forward: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        # As Transformer Engine makes them: of values, a view of their projection's output, it would save a copy.
        inputs = [tensor.contiguous() for tensor in args[:3]]
        if self._output is None:
            output = self._compute(forward, inputs, *args[3:], **kwargs)
            self._rng_states = _get_all_rng_states()
            return output
        _set_all_rng_states(*self._rng_states)  # attention's dropout has drawn from them
        if torch.is_grad_enabled():
            kept: torch.Tensor = _KeptAttention.apply(self, *inputs)
            return kept
        return self.output()

    def _compute(
        self, forward: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        manager, known = self._manager, self._inputs
        known.describe(inputs)

        def pack(tensor: torch.Tensor) -> Any:
            return known.place_of(tensor) or manager.save(tensor)

        def unpack(saved: Any) -> torch.Tensor:
            return known.at(saved) if isinstance(saved, _Place) else manager.unpack(saved)

        with torch.enable_grad(), manager.group(CORE_ATTN), saved_tensors_hooks(pack, unpack):
            output = forward(*_Enter.apply(known, torch.zeros((), requires_grad=True), *inputs), *args, **kwargs)
            self._output = manager.save(output.detach())
        self._edge = get_gradient_edge(output)
        known.addresses = {}  # the memory is about to be reused
        return output.detach()

    def output(self) -> torch.Tensor:
        """Returns attention's output."""
        assert self._output is not None
        return self._manager.unpack(self._output).detach()

    def backward(self, inputs: Sequence[torch.Tensor], gradient: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """Accumulates the gradients of attention's own weights, if it has any.

        Args:
            inputs: queries, keys and values, recomputed.
            gradient: of the output.

        Returns:
            The gradients of queries, keys and values.
        """
        edge, self._edge, self._output = self._edge, None, None
        self._inputs.tensors = inputs
        torch.autograd.backward([edge], [gradient])
        gradients, self._inputs.gradients, self._inputs.tensors = self._inputs.gradients, (), ()  # not kept longer
        return gradients


class _Place(NamedTuple):
    """Describes a tensor in the storage of attention's input of this number."""

    number: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class _Inputs:
    """Knows attention's inputs by their place in memory, forgets their values, and has those recomputed later."""

    def __init__(self) -> None:
        self.addresses: dict[int, int] = {}
        self.tensors: Sequence[torch.Tensor] = ()
        self.gradients: Sequence[torch.Tensor | None] = ()
        self._views: list[tuple[int, int, tuple[int, ...]]] = []

    def describe(self, tensors: Sequence[torch.Tensor]) -> None:
        """Takes down where queries, keys and values are."""
        self.addresses = {tensor.untyped_storage()._cdata: index for index, tensor in enumerate(tensors)}
        self._views = [_view_of(tensor) for tensor in tensors]

    def place_of(self, tensor: torch.Tensor) -> _Place | None:
        """Returns a tensor's place in an input's storage; None if it has another storage."""
        index = self.addresses.get(tensor.untyped_storage()._cdata)
        if index is None:
            return None
        return _Place(index, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def at(self, place: _Place) -> torch.Tensor:
        """Returns the tensor at this place in the recomputed inputs."""
        tensor = self.tensors[place.number]
        assert _view_of(tensor) == self._views[place.number], "a recomputed input of attention has another layout"
        storage = tensor.untyped_storage()
        return torch.empty(0, dtype=place.dtype, device=tensor.device).set_(storage, *place[2:])


def _view_of(tensor: torch.Tensor) -> tuple[int, int, tuple[int, ...]]:
    return tensor.untyped_storage().nbytes(), int(tensor.storage_offset()), tensor.stride()


class _Enter(torch.autograd.Function):
    """Begins the autograd graph of a kept attention, and takes the gradients of its inputs there."""

    @staticmethod
    def forward(ctx: Any, inputs: _Inputs, _: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.inputs = inputs
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.inputs.gradients = gradients
        return None, None, *(None for _ in gradients)


class _KeptAttention(torch.autograd.Function):
    """Takes the place of attention in a layer's recomputation."""

    @staticmethod
    def forward(ctx: Any, attention: KeptAttentionPass, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.attention = attention
        ctx.save_for_backward(*inputs)
        return attention.output()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, *ctx.attention.backward(ctx.saved_tensors, *gradients)
