"""Tests activations that are offloaded inside CUDA graphs: which streams each layer's capture may wait for."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from support.late_copies import LateCopies, assert_empty
from support.marked_layers import LAYERS, MODULES, Layer, Model, assert_equal, batches, no_memory, offloader, suspended
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_offload_rl.activation_offload.copies import Span
from nemo_offload_rl.activation_offload.graphs import CapturedCopies
from nemo_offload_rl.activation_offload.manager import ActivationOffloader


class CaptureRules(LateCopies):
    """Refuses what a capture refuses: waits for another capture's copies, and an end before its own are joined."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._mine: list = []
        self.num_foreign = 0
        """Waits for copies from outside of a capture: an error in a `__del__` is only printed."""

    def request(self, direction, spans, after):
        handle = super().request(direction, spans, self._checked(after))
        self._mine += [handle] if self.captures else []
        return handle

    def wait(self, handle):
        super().wait(*self._checked([handle]))

    def end(self) -> None:
        assert all(handle.reached() for handle in self._mine), "a stream that was forked is not joined"
        self._mine = []

    def _checked(self, handles):
        handles = list(handles)
        foreign = [handle for handle in handles if self.captures and handle not in self._mine]
        self.num_foreign += len(foreign)
        assert not foreign, "an event of another capture"
        return handles


@pytest.fixture
def made(model: Model) -> ActivationOffloader:
    return offloader(model, CaptureRules())


@contextmanager
def capturing(made: ActivationOffloader, *, forward: bool) -> Iterator[None]:
    made.copies.captures = True
    yield
    made.end_capture(forward=forward)
    made.copies.captures = False
    made.copies.end()


def capture(made: ActivationOffloader, model: Model, x: torch.Tensor, prepared=lambda: None) -> list[torch.Tensor]:
    """Runs forward passes layer by layer, then backward passes from the last one; returns output and all gradients."""
    inputs, outputs = [], []
    made.prepare_capture()
    prepared()
    for layer in model.layers:
        inputs.append(x.detach().clone().requires_grad_())
        made.exclude_graph_input(inputs[-1].untyped_storage())
        with capturing(made, forward=True):
            x = layer(inputs[-1])
        outputs.append(x)
    grad = torch.ones_like(x)
    last = x.detach()
    for layer_input in reversed(inputs):
        output = outputs.pop()
        with capturing(made, forward=False):
            output.backward(grad)
        grad = layer_input.grad
    del output
    made.reset()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return [last, grad, *grads]


def eager_step(model: Model, lengths: list[int]) -> None:
    for x in batches(lengths, 0):
        model(x).backward()
    PipelineOffloadManager.get_instance().reset()
    model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("seed", range(3))
def test_numbers_are_those_of_a_plain_capture(model, made, seed):
    (x,) = batches([12], seed)
    with suspended(made):
        want = capture(made, model, x)
    assert made.captures.regions.nbytes == 0
    made = offloader(model, CaptureRules(seed))
    eager_step(model, [12, 12])  # the warm-up shows how many groups there are
    assert_equal(capture(made, model, x), want)
    assert made.copies.num_out > 0


def test_host_memory_is_the_graphs_until_they_are_deleted(model, made):
    eager_step(model, [12])
    eager_step(model, [12])
    eager = made.report
    capture(made, model, *batches([12], 0))
    kept = made.captures.regions.nbytes
    assert kept == made.host_pool.used_bytes > 0
    eager_step(model, [12, 30])
    assert made.report.captured_host_bytes == kept
    assert made.report.host_peak_bytes > kept
    assert made.host_pool.used_bytes == kept
    made.forget_captures()
    eager_step(model, [12])
    assert made.report.captured_host_bytes == made.host_pool.used_bytes == 0
    assert made.report.host_peak_bytes == eager.host_peak_bytes


def test_replays_are_in_the_report_and_a_graphs_input_stays(model, made):
    eager_step(model, [12])
    eager_step(model, [12])
    eager = made.report.total()
    capture(made, model, *batches([12], 0))
    model_forward = PipelineOffloadManager.get_instance().init_model_chunk_offload_handler
    for _ in range(3):  # micro-batches in which every layer is replayed
        model_forward(0, None, 0)
        for _ in range(LAYERS):
            made.count_replay()
    made.reset()
    replayed = made.report.total()
    assert made.report.num_micro_batches == 3
    assert replayed.moved_bytes == replayed.freed_bytes
    assert 0 < replayed.moved_bytes < 3 * eager.moved_bytes  # qkv_linear's input is the graph's own
    assert set(made.report.modules) == set(MODULES)
    made.init_model_chunk_offload_handler(0, None, 0)
    made.reset()
    assert made.report.total().moved_bytes == 0  # this step replayed nothing


def test_a_pass_that_only_warms_up_moves_nothing_and_switches_nothing_off_if_it_fails(model, made):
    made.disable_offload()
    capture(made, model, *batches([12], 0))
    assert made.copies.num_out == made.captures.regions.nbytes == 0
    made.forget_captures()  # in place of `enable_offload`, which Transformer Engine's warm-up would have called
    eager_step(model, [12, 12])
    assert made.report.num_micro_batches == 2 and made.report.total().moved_bytes > 0


def test_a_failed_capture_leaves_no_chunk_behind(model, made):
    def saved_before_it_fails(layer: Layer, x: torch.Tensor) -> list[StorageWeakRef]:
        group = layer.group("qkv_linear", x)
        with group as x:
            y = (x * 2).exp()  # saves its output
        y = group.group_offload(y)
        with layer.group("core_attn", y) as y:
            z = (y * 2).exp()
        return [StorageWeakRef(tensor.untyped_storage()) for tensor in (y, z)]

    made.prepare_capture()
    made.copies.captures = True
    saved = saved_before_it_fails(model.layers[0], batches([12], 0)[0])
    made.copies.captures = False
    made.forget_captures()
    assert made.captures.chunk is None
    gc.collect()
    assert saved and all(storage.expired() for storage in saved)
    made.host_pool.forget_reached()
    assert_empty(made.host_pool)


def test_what_was_asked_back_and_not_used_is_collected_beside_a_capture(model, made):
    """Covers the loss of a failed step, whose last reference is dropped when captures have begun."""
    eager_step(model, [12])
    failed = [model(*batches([12], 1))]
    broken = model.layers[2].qkv.weight.register_hook(no_memory)
    with pytest.raises(MemoryError):
        failed[0].backward()
    broken.remove()
    made.reset()
    model.zero_grad(set_to_none=True)
    with suspended(made):
        want = capture(made, model, *batches([12], 0))
    dropping = model.layers[1].register_forward_pre_hook(lambda *_: failed.clear())
    found = capture(made, model, *batches([12], 0))
    dropping.remove()
    assert made.copies.num_foreign == 0
    assert_equal(found, want)


def test_what_a_capture_has_asked_back_and_not_used_is_waited_for_in_it(model, made):
    """The graph's next allocations reuse its memory."""
    copies = CapturedCopies(made.copies)
    storage = torch.ones(16).untyped_storage()
    span = Span(storage, made.host_pool.memory, 0, storage.nbytes())
    made.copies.captures = True
    handle = copies.back([span], [copies.out([span], [])])
    copies.wait_to_free(handle)
    assert handle.handle.reached()
    made.copies.captures = False


def test_host_memory_that_comes_back_late_from_an_eager_pass_is_captured_over(model, made):
    """Covers a failed step that the garbage collector finds when captures have begun."""
    with suspended(made):
        want = capture(made, model, *batches([12], 0))
    eager_step(model, [12])
    failed = [model(*batches([12], 1))]
    made.reset()
    used = made.host_pool.used_bytes
    found = capture(made, model, *batches([12], 0), prepared=failed.clear)
    assert used > 0 and made.captures.regions.nbytes > 0
    assert_equal(found, want)
