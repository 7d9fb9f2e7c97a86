"""Drives Transformer Engine's per-layer CUDA graphs in the training step: warm-up, capture, replay, deletion.

Tested with megatron-core 0.19.2; docs/decisions/cuda-graphs.md says which parts of it this relies on.
"""

import contextlib
import functools
import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.transformer.transformer_layer import TransformerLayer

from nemo_offload_rl.config.megatron import check_graph_environment
from nemo_offload_rl.mcore.batches import MicroBatch
from nemo_offload_rl.mcore.graphs.graph_capture import (
    CaptureObserver,
    FrozenShapes,
    GraphSpeedCheck,
    NoObserver,
    addresses,
    forget_replayed_routing,
    num_microbatches_told,
    param_gather_hooks_off,
    reserved_bytes,
    undone_on_failure,
)
from nemo_offload_rl.mcore.patches.graph_inputs import captured_inputs, replay_as_before, replay_with_inputs
from nemo_offload_rl.memory.streams import record_current_stream

logger = logging.getLogger(__name__)

_KEY = "policy.megatron_cfg.cuda_graph_impl"


class StepGraphs(Protocol):
    """Replays graphs in training steps, or does nothing."""

    num_replays: int
    """Forward graphs replayed in the last training step, on this rank."""
    fixed_shapes: bool
    """Whether the micro-batches of all training steps, also of those before a capture, must have one shape."""

    def step(self, batches: Sequence[MicroBatch]) -> contextlib.AbstractContextManager[None]:
        """Run the schedule of one training step over `batches` inside."""
        ...

    def delete(self) -> None:
        """Delete captured graphs and free their memory; the next step captures again."""
        ...


class NoCudaGraphs:
    """Runs every step eagerly, without CUDA graphs."""

    num_replays = 0
    fixed_shapes = False

    def step(self, batches: Sequence[MicroBatch]) -> contextlib.AbstractContextManager[None]:
        """Runs the step eagerly."""
        return contextlib.nullcontext()

    def delete(self) -> None:
        """Does nothing: there are no graphs."""


@dataclass(frozen=True)
class StepShape:
    """Describes the shape of a training step that a set of graphs was captured for.

    Attributes:
        num_microbatches: micro-batches of a step.
        micro_batch_size: rows of a micro-batch.
        seq_length: tokens of a row.
    """

    num_microbatches: int
    micro_batch_size: int
    seq_length: int

    def can_replay(self, other: "StepShape", *, stages: int, virtual_stages: int) -> bool:
        """Returns whether graphs captured for this shape can run a step of another shape.

        A single pipeline stage runs a micro-batch's backward pass before the next one's forward pass, so that one graph
        of each layer serves any number of micro-batches. On several stages each micro-batch needs graphs of its own. A
        step with fewer micro-batches then runs forward and backward passes in the captured order with the last ones
        left out, so that nothing live can be overwritten; not so with virtual stages.
        """
        if (self.micro_batch_size, self.seq_length) != (other.micro_batch_size, other.seq_length):
            return False
        if stages == 1 or self.num_microbatches == other.num_microbatches:
            return True
        return virtual_stages == 1 and other.num_microbatches < self.num_microbatches


@dataclass
class _Captured:
    helper: TECudaGraphHelper
    shape: StepShape
    layers: list[Any]
    graphs: list[list[Any]]  # for each layer, one per captured micro-batch
    addresses: list[int]
    shapes: FrozenShapes


class _CountedGraph:
    """Wraps a graphed forward pass to count its replays."""

    def __init__(self, graph: Any, count: Callable[[], None]) -> None:
        self._graph = graph
        self._count = count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._count()
        return self._graph(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # reset, backward_dw
        return getattr(self._graph, name)


class CudaGraphs:
    """Captures each layer's graphs once training has warmed up, and replays them in training steps only.

    Outside of `step` the layers have no graphs, so that log-probs and validation run eagerly.

    Attributes:
        num_replays: forward graphs replayed in the last training step, on this rank.
        num_captures: how often graphs have been captured.

    Args:
        model: the chunks in DistributedDataParallel, in training mode.
        config: their TransformerConfig.
        optimizer: megatron-core's optimizer; a capture drops its gradients.
        warmup_steps: eager steps before the first capture.
        settle: called before a capture; brings parameters and gradients to the GPU and returns when no other thread
            and no other stream moves data, since any allocation during a capture makes it fail.
        observer: notified of captures and replays.
        make_helper: makes megatron-core's helper.

    Raises:
        ValueError: the environment or the model's dtypes do not allow graphs.
    """

    fixed_shapes = True

    def __init__(
        self,
        model: Sequence[Any],
        config: Any,
        optimizer: Any,
        *,
        warmup_steps: int,
        settle: Callable[[], None],
        observer: CaptureObserver | None = None,
        make_helper: Callable[..., TECudaGraphHelper] = TECudaGraphHelper,
    ) -> None:
        check_graph_environment(os.environ)
        check_dtypes(config)
        self._model = list(model)
        self._config = config
        self._optimizer = optimizer
        self._warmup_steps_left = warmup_steps
        self._settle = settle
        self._observer = NoObserver() if observer is None else observer
        self._make_helper = make_helper
        self._captured: _Captured | None = None
        self._speed_check = GraphSpeedCheck(
            _names(config.cuda_graph_modules),
            copies_inside=any(layer.offload_module_in_cuda_graph for layer in _layers(self._model)),
            mark=functools.partial(record_current_stream, next(self._model[0].parameters()).device),
        )
        self.num_replays = self.num_captures = 0

    @contextlib.contextmanager
    def step(self, batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Run the schedule of one training step inside: eagerly while warming up, then from graphs.

        Args:
            batches: the step's micro-batches, of one shape.

        Raises:
            ValueError: the micro-batches differ in shape.
            RuntimeError: no layer of the model can be captured, graphs were not replayed, or a tensor whose address
                they captured has moved.
        """
        self.num_replays = 0
        shape = step_shape(batches)
        if self._warmup_steps_left > 0:
            self._warmup_steps_left -= 1
            with self._speed_check.step(shape, self.num_captures):
                yield
            return
        captured = self._captured_for(shape)
        _check_addresses(captured)
        with _attached(captured), self._speed_check.step(shape, self.num_captures):
            yield
        if captured.layers and self.num_replays == 0:
            raise RuntimeError(
                f"{_KEY} is transformer_engine and the graphs of {len(captured.layers)} layers are captured, but a "
                "training step replayed none of them; train in training mode (model.train()), or set it to none."
            )

    def delete(self) -> None:
        """Delete captured graphs and free their memory; the next step captures again."""
        if self._captured is None:
            return
        captured, self._captured = self._captured, None
        replay_as_before(captured.layers)
        if captured.helper.graphs_created():
            with _attached(captured):
                captured.helper.delete_cuda_graphs()
        del captured
        self._observer.forget_captures()
        gc.collect()  # autograd nodes and closures of graphs refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _captured_for(self, shape: StepShape) -> _Captured:
        stages = self._config.pipeline_model_parallel_size
        virtual = self._config.virtual_pipeline_model_parallel_size or 1
        if self._captured and not self._captured.shape.can_replay(shape, stages=stages, virtual_stages=virtual):
            logger.warning("CUDA graphs of %s are captured again for %s", self._captured.shape, shape)
            self.delete()
        if self._captured is None:
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(self._observer.forget_captures)
                self._captured = self._capture(shape)
                on_failure.pop_all()
        return self._captured

    def _capture(self, shape: StepShape) -> _Captured:
        self._settle()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._observer.prepare_capture()
        start, before = time.perf_counter(), reserved_bytes()
        with param_gather_hooks_off(self._model) as were_on, num_microbatches_told(shape.num_microbatches):
            helper = self._make_helper(
                model=self._model,
                config=self._config,
                seq_length=shape.seq_length,
                micro_batch_size=shape.micro_batch_size,
                optimizers=[self._optimizer],
            )
            layers = list(helper.flattened_callables)
            self._check_some_layer(layers)
            with captured_inputs(layers, self._observer.exclude_graph_input) as padding, undone_on_failure():
                helper.create_cudagraphs()
        if were_on:
            helper.cuda_graph_set_manual_hooks()
        graphs = [
            [_CountedGraph(graph, functools.partial(self._count, layer)) for graph in layer.cuda_graphs]
            for layer in layers
        ]
        for layer in layers:
            layer.cuda_graphs = []
        replay_with_inputs(layers, padding)
        self.num_captures += 1
        logger.info(
            "captured CUDA graphs of %d layers for %s in %.1f s; they hold %.2f GiB",
            len(layers),
            shape,
            time.perf_counter() - start,
            (reserved_bytes() - before) / 2**30,
        )
        return _Captured(helper, shape, layers, graphs, addresses(layers), FrozenShapes(layers))

    def _count(self, layer: Any) -> None:
        self.num_replays += 1
        if layer.offload_module_in_cuda_graph:
            self._observer.count_replay()

    def _check_some_layer(self, layers: Sequence[Any]) -> None:
        """Warn if this pipeline stage has no layer to capture; raise if no stage of the pipeline has one."""
        found = torch.tensor([len(layers)], device=next(self._model[0].parameters()).device)
        torch.distributed.all_reduce(found, group=mpu.get_pipeline_model_parallel_group())
        if layers:
            return
        why = _why_no_layer(self._model, _names(self._config.cuda_graph_modules))
        if int(found.item()) == 0:
            raise RuntimeError(
                f"{_KEY} is transformer_engine, but {why}; choose other policy.megatron_cfg.cuda_graph_modules, or set "
                f"{_KEY} to none."
            )
        logger.warning("no CUDA graphs on this pipeline stage: %s", why)


def check_dtypes(config: Any) -> None:
    """Refuse hidden states that are not bfloat16: megatron-core's static inputs are, and would round them silently.

    Raises:
        ValueError: the parameters have another dtype, or the residual stream is fp32.
    """
    if config.params_dtype is not torch.bfloat16:
        raise ValueError(
            f"{_KEY} is transformer_engine, whose graphs take bfloat16, but the parameters are "
            f"{config.params_dtype}; set policy.precision to bfloat16, or {_KEY} to none."
        )
    if config.fp32_residual_connection:
        raise ValueError(
            f"{_KEY} is transformer_engine, whose graphs take bfloat16, but fp32_residual_connection is true; turn "
            "one of them off."
        )


def step_shape(batches: Sequence[MicroBatch]) -> StepShape:
    """Return the one shape that a step's micro-batches have.

    Raises:
        ValueError: they differ.
    """
    shapes = {tuple(batch.tokens.shape) for batch in batches}
    if len(shapes) > 1:
        raise ValueError(
            f"A training step has micro-batches of shapes {sorted(shapes)}, but captured CUDA graphs take one shape; "
            f"pad all of them alike, or set {_KEY} to none."
        )
    micro_batch_size, seq_length = shapes.pop()
    return StepShape(len(batches), micro_batch_size, seq_length)


def _layers(model: Sequence[Any]) -> list[Any]:
    return [module for chunk in model for module in chunk.modules() if isinstance(module, TransformerLayer)]


def _names(modules: Sequence[Any]) -> list[str]:
    return [str(module.name) for module in modules]


def _why_no_layer(model: Sequence[Any], modules: Sequence[str]) -> str:
    layers = _layers(model)
    num_moe = sum(layer.is_moe_layer for layer in layers)
    return (
        f"none of the {len(layers)} layers here ({num_moe} of them MoE) has a part that cuda_graph_modules {modules} "
        "names"
    )


def _check_addresses(captured: _Captured) -> None:
    if addresses(captured.layers) != captured.addresses:
        raise RuntimeError(
            "Parameters or gradients have moved since CUDA graphs captured their addresses; keep both on the GPU in "
            "every phase (policy.residency.table; their ranges, where the driver supports them, keep addresses), "
            f"call delete() before anything moves them, or set {_KEY} to none."
        )


@contextlib.contextmanager
def _attached(captured: _Captured) -> Iterator[None]:
    """Make the layers replay their graphs inside; a layer without graphs runs eagerly."""
    captured.shapes.restore()
    # megatron-core switches it off for the end of a replayed layer, and a failure there would leave it off.
    norms = [layer.recompute_pre_mlp_layernorm for layer in captured.layers]
    for layer, graphs in zip(captured.layers, captured.graphs, strict=True):
        layer.cuda_graphs = graphs
    try:
        yield
    finally:
        forget_replayed_routing(captured.layers)
        for layer, recomputes_norm in zip(captured.layers, norms, strict=True):
            layer.cuda_graphs = []
            layer.recompute_pre_mlp_layernorm = recomputes_norm
