"""Tests how CUDA graphs are captured and replayed, with megatron-core's real helper and layers.

Only Transformer Engine's capture, which needs a GPU, is replaced by calls of the same layers.
"""

import gc
import logging
import sys
import types
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import FineGrainedActivationOffloadingInterface
from megatron.core.transformer import cuda_graphs as mcore_graphs
from megatron.core.transformer import transformer_layer
from megatron.core.transformer.cuda_graph_config import normalize_cuda_graph_modules
from megatron.core.transformer.module import GraphableMegatronModule
from support.eager_graph import EagerGraph
from support.events import At
from support.tiny import TINY_QWEN3_MOE, random_batch, tiny_policy

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.config.megatron import check_graph_environment
from nemo_offload_rl.mcore import step
from nemo_offload_rl.mcore.graphs.cuda_graphs import CudaGraphs, NoCudaGraphs, StepShape, step_shape
from nemo_offload_rl.mcore.graphs.graph_capture import FrozenShapes, GraphSpeedCheck, NoObserver, slower_than_eager
from nemo_offload_rl.memory.streams import Event

LAYERS = 4
WARMUP_STEPS = 2


@pytest.fixture
def captures() -> list[dict[str, Any]]:
    """Holds the requested captures, one entry each: {'order': ..., 'kwargs': ..., 'options': ...}."""
    return []


@pytest.fixture
def install(monkeypatch, captures):
    def make_graphed_callables(layers, sample_args, *, sample_kwargs, _order, **options):
        assert mcore_graphs.is_graph_capturing()
        assert not any(layer._forward_pre_hooks for layer in layers)
        captures.append({"order": _order, "kwargs": sample_kwargs, "options": options})
        pairs = zip(sample_args, sample_kwargs, strict=True)
        return tuple(EagerGraph(layers[i % len(layers)], *pair) for i, pair in enumerate(pairs))

    def install() -> None:
        package = types.ModuleType("transformer_engine")
        package.pytorch = types.ModuleType("transformer_engine.pytorch")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "transformer_engine", package)
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", package.pytorch)
        monkeypatch.setattr(mcore_graphs, "HAVE_TE_GRAPHS", True)
        monkeypatch.setattr(mcore_graphs, "make_graphed_callables", make_graphed_callables, raising=False)
        monkeypatch.setattr(mcore_graphs, "te_set_capture_end", lambda: None, raising=False)
        for module in (mcore_graphs, transformer_layer):
            monkeypatch.setattr(module, "is_te_min_version", lambda *_: True)

    return install


@pytest.fixture
def graphed(make_worker, install):
    def make(modules=("attn", "mlp"), *, hf_config=None, **megatron):
        worker = make_worker(tiny_policy(hf_config, precision="bfloat16", **megatron))
        install()
        config = worker.state.config
        config.cuda_graph_impl = "transformer_engine"
        config.cuda_graph_modules = normalize_cuda_graph_modules(list(modules))[0]
        for module in worker.state.model[0].modules():
            if isinstance(module, GraphableMegatronModule):  # as the layer does when it is built with graphs
                module.cuda_graphs, module.cuda_graph_manual_hooks = [], []
        options = {"warmup_steps": WARMUP_STEPS, "settle": worker.offloader.load_all_to_gpu}
        return worker, CudaGraphs(worker.state.model, config, worker.state.optimizer, **options)

    return make


def train(worker, graphs, rows, *, seed=0, mbs=2):
    worker.prepare_for_training()
    data = random_batch(rows, seed=seed)
    counts = step.global_counts(data, worker.device)
    batches, _ = worker.batcher.cut(data, mbs, "train_mb_tokens", fixed_shapes=True)
    of = {"of": worker._passes.train, "device": worker.device}
    with graphs.step(batches):
        return step.train_step(worker.state, batches, counts, NLLLoss(), **of), len(batches)


def run_steps(worker, graphs, num_steps=WARMUP_STEPS + 1, rows=4):
    """Trains until the graphs are captured and replayed once."""
    for seed in range(num_steps):
        train(worker, graphs, rows, seed=seed)


def replaying(graphed, *arguments, **options):
    worker, graphs = graphed(*arguments, **options)
    run_steps(worker, graphs)
    return worker, graphs


def test_changing_micro_batches_replay_one_capture_and_change_no_number(make_worker, graphed, captures):
    rows = [4, 6, 2, 8, 4, 2]
    plain = make_worker(tiny_policy(precision="bfloat16"))
    want = [train(plain, NoCudaGraphs(), n, seed=seed)[0] for seed, n in enumerate(rows)]
    want_logprobs = plain.get_logprobs(random_batch(4, longest=7), mbs=2)["logprobs"]
    worker, graphs = graphed()
    replays = []
    for seed, n in enumerate(rows):
        result, num_microbatches = train(worker, graphs, n, seed=seed)
        assert result == want[seed]
        replays.append(graphs.num_replays)
        assert graphs.num_replays == (LAYERS * num_microbatches if seed >= WARMUP_STEPS else 0)
        worker.offload_before_refit()
        worker.offload_after_refit()
        logprobs = worker.get_logprobs(random_batch(4, longest=7), mbs=2)["logprobs"]
        assert graphs.num_replays == replays[-1]  # another shape runs eagerly
    assert torch.equal(logprobs, want_logprobs)
    assert graphs.num_captures == len(captures) == 1
    assert captures[0]["order"] == [1, -1]
    assert [sorted(kwargs) for kwargs in captures[0]["kwargs"]] == [["rotary_pos_emb"]] * LAYERS  # no attention mask


def test_the_helper_learns_the_number_of_micro_batches_for_the_time_of_the_capture(graphed, captures):
    worker, graphs = graphed()
    worker.state.config.cuda_graph_warmup_steps = WARMUP_STEPS
    run_steps(worker, graphs, rows=6)
    # A layer has ten warm-up passes; two steps of three micro-batches have made six of them.
    assert captures[0]["options"]["num_warmup_iters"] == 4
    assert mcore_graphs.get_num_microbatches() == 1


def test_a_dispatcher_gets_the_captured_shapes_back():
    """Of the results of a captured preparation, replays set only the tensors."""
    names = ["hidden_shape", "num_out_tokens", "probs", "shared_experts.gate_score"]
    dispatcher = types.SimpleNamespace(cudagraph_attrs=names, valid_cudagraph_attrs=["probs"])
    dispatcher.hidden_shape, dispatcher.num_out_tokens = torch.Size([128, 2, 64]), 512
    dispatcher.hidden_shape_before_permute = torch.Size([256, 64])  # not in the list
    eager = types.SimpleNamespace(cudagraph_attrs=["hidden_shape"], valid_cudagraph_attrs=None, hidden_shape=1)
    layers = [types.SimpleNamespace(mlp=types.SimpleNamespace(token_dispatcher=one)) for one in (dispatcher, eager)]
    frozen = FrozenShapes([*layers, types.SimpleNamespace(mlp=types.SimpleNamespace())])
    dispatcher.hidden_shape, dispatcher.num_out_tokens, dispatcher.probs = torch.Size([8, 3, 64]), 48, "newer"
    dispatcher.hidden_shape_before_permute = torch.Size([24, 64])
    eager.hidden_shape = 2
    frozen.restore()
    assert (dispatcher.hidden_shape, dispatcher.num_out_tokens) == (torch.Size([128, 2, 64]), 512)
    assert dispatcher.hidden_shape_before_permute == torch.Size([256, 64])
    assert (dispatcher.probs, eager.hidden_shape) == ("newer", 2)


def test_another_shape_is_captured_again_and_said(graphed, captures, caplog):
    worker, graphs = replaying(graphed)
    first = [graph for graphs_of_layer in graphs._captured.graphs for graph in graphs_of_layer]
    with caplog.at_level(logging.WARNING):
        train(worker, graphs, 4, mbs=4)
    assert "captured again for StepShape(num_microbatches=1, micro_batch_size=4" in caplog.text
    assert graphs.num_replays == LAYERS
    assert len(captures) == 2
    assert all(graph.was_reset for graph in first)


def test_slower_replays_than_eager_steps_are_said_once(graphed, caplog):
    worker, graphs = graphed()
    # The second eager step and the second to fifth replays are timed from begin to end; other steps are not timed.
    graphs._speed_check._mark = iter([At(seconds) for seconds in (0, 1.0, 2, 4.0, 5, 6.5, 7, 9.0, 10, 12.0)]).__next__
    run_steps(worker, graphs, WARMUP_STEPS + 1 + 4 + 2)
    assert caplog.messages.count(slower_than_eager(1.5, 1.0, ["attn", "mlp"], copies_inside=False)) == 1


def witness() -> tuple[NoObserver, list[str]]:
    observer, told = NoObserver(), []
    names = {"prepare_capture": "prepare", "exclude_graph_input": "input", "count_replay": "replay"}
    for name, word in (names | {"forget_captures": "forget"}).items():
        setattr(observer, name, lambda *_, word=word: told.append(word))
    return observer, told


def test_who_copies_inside_of_graphs_is_told_of_captures_replays_and_deletion(graphed):
    worker, graphs = graphed()
    graphs._observer, told = witness()
    for module in worker.state.model[0].modules():
        if isinstance(module, transformer_layer.TransformerLayer):
            module.offload_module_in_cuda_graph = module.layer_number == 1
            module.off_interface = NoRecords
    run_steps(worker, graphs)
    assert told == ["prepare", *["input"] * LAYERS, "replay", "replay"]  # one such layer, two micro-batches
    graphs.delete()
    assert told[-1] == "forget"


class NoRecords(FineGrainedActivationOffloadingInterface):
    """Does nothing when the layer records, since there are no streams."""

    @staticmethod
    def forward_record():
        pass

    @staticmethod
    def backward_record(tensor):
        return tensor


def test_a_capture_that_fails_half_way_leaves_no_capture_under_way(graphed, monkeypatch):
    worker, graphs = graphed()
    graphs._observer, told = witness()

    def fail(*_, **__):
        gc.disable()  # as torch.cuda.graph does
        assert mcore_graphs.is_graph_capturing()
        raise RuntimeError("out of memory")

    with monkeypatch.context() as failing:
        failing.setattr(mcore_graphs, "make_graphed_callables", fail)
        run_steps(worker, graphs, WARMUP_STEPS)
        frozen = gc.get_freeze_count()
        with pytest.raises(RuntimeError, match="out of memory"):
            train(worker, graphs, 4)
    assert (told[0], told[-1]) == ("prepare", "forget")
    assert gc.isenabled() and gc.get_freeze_count() <= frozen
    assert not mcore_graphs.is_graph_capturing()
    train(worker, graphs, 4)
    assert graphs.num_replays > 0


def test_a_step_that_fails_behind_a_routers_replay_changes_no_later_pass(graphed, monkeypatch):
    """megatron-core's layer keeps its router's output until its experts are done, and the next pass reads it first."""
    worker, graphs = replaying(graphed, ["moe_router"], hf_config=TINY_QWEN3_MOE)
    assert graphs.num_replays > 0
    data = random_batch(4, longest=12)
    want = worker.get_logprobs(data, mbs=2)["logprobs"]
    layer = worker.state.model[0].module.module.decoder.layers[1]

    def fail(*_, **__):
        assert not layer.mlp.cudagraph_tensor_store.is_empty()
        raise MemoryError

    with monkeypatch.context() as failing:
        failing.setattr(layer.mlp.experts, "forward", fail)
        with pytest.raises(MemoryError):
            train(worker, graphs, 4, seed=9)
    assert torch.equal(worker.get_logprobs(data, mbs=2)["logprobs"], want)


@pytest.mark.parametrize("modules", [["attn"], ["moe_router"], ["attn", "moe_router"]])
def test_routers_leave_padding_out_inside_and_behind_graphs(make_worker, graphed, modules):
    aux_loss = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
    rows = [4, 6, 5, 6]
    plain = make_worker(tiny_policy(TINY_QWEN3_MOE, "bfloat16", **aux_loss))
    want = [train(plain, NoCudaGraphs(), n, seed=seed)[0] for seed, n in enumerate(rows)]
    worker, graphs = graphed(modules, hf_config=TINY_QWEN3_MOE, **aux_loss)
    assert [train(worker, graphs, n, seed=seed)[0] for seed, n in enumerate(rows)] == want
    assert graphs.num_replays == LAYERS * 3


def test_micro_batches_of_two_shapes_are_refused(graphed):
    worker, _ = graphed()
    batches = [worker.batcher.cut(random_batch(2, longest=n), 2, "train_mb_tokens")[0][0] for n in (8, 12)]
    with pytest.raises(ValueError, match=r"shapes \[\(2, 8\), \(2, 12\)\].*pad all of them alike"):
        step_shape(batches)


def test_deleted_graphs_leave_plain_layers_and_are_captured_anew(graphed, captures):
    worker, graphs = replaying(graphed)
    layers, held = graphs._captured.layers, [graph for of_layer in graphs._captured.graphs for graph in of_layer]
    graphs.delete()
    graphs.delete()
    assert all(graph.was_reset for graph in held)
    assert not any(layer.cuda_graphs or "_get_te_cuda_graph_replay_args" in vars(layer) for layer in layers)
    train(worker, graphs, 4)
    assert (graphs.num_replays, len(captures)) == (LAYERS * 2, 2)


def test_an_error_in_a_step_takes_the_graphs_off(graphed):
    worker, graphs = replaying(graphed)
    batches, _ = worker.batcher.cut(random_batch(4), 2, "train_mb_tokens", fixed_shapes=True)
    with pytest.raises(KeyError), graphs.step(batches):
        raise KeyError
    assert not any(layer.cuda_graphs for layer in graphs._captured.layers)


def test_a_step_that_replays_nothing_is_an_error(graphed):
    worker, graphs = replaying(graphed)
    words = "graphs of 4 layers are captured, but a training step replayed none"
    with pytest.raises(RuntimeError, match=words), step.eval_mode(worker.state.model):
        train(worker, graphs, 4)


def test_moved_parameters_are_an_error(graphed):
    worker, graphs = replaying(graphed)
    parameter = next(graphs._captured.layers[0].parameters())
    parameter.data = parameter.data.clone()
    with pytest.raises(RuntimeError, match=r"have moved since CUDA graphs captured.*policy\.residency\.table"):
        train(worker, graphs, 4)


def test_a_model_without_such_layers_is_refused_with_the_reason(graphed):
    words = r"none of the 4 layers here \(0 of them MoE\).*\['moe_router'\] names; choose"
    with pytest.raises(RuntimeError, match=words):
        replaying(graphed, ["moe_router"])


def test_hooks_of_overlapped_gather_are_off_for_the_capture_and_called_by_replays(graphed, captures):
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    worker, graphs = graphed(distributed_data_parallel_config=overlap)
    chunk = worker.state.model[0]
    chunk.enable_forward_pre_hook()
    run_steps(worker, graphs)
    assert len(captures) == 1
    assert chunk.remove_forward_pre_hook_handles
    assert all(layer.cuda_graph_manual_hooks for layer in graphs._captured.layers)
    graphs.delete()
    assert not any(layer.cuda_graph_manual_hooks for layer in chunk.module.module.decoder.layers)
    chunk.disable_forward_pre_hook(param_sync=True)


@pytest.mark.parametrize(("precision", "residual"), [("float32", False), ("bfloat16", True)])
def test_hidden_states_that_are_not_bfloat16_are_refused(make_worker, precision, residual):
    state = make_worker(tiny_policy(precision=precision)).state
    state.config.fp32_residual_connection = residual
    with pytest.raises(ValueError, match="whose graphs take bfloat16"):
        CudaGraphs(state.model, state.config, state.optimizer, warmup_steps=1, settle=lambda: None)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_need_unregistered_buffers(name):
    settings = {name: "max_split_size_mb:64, expandable_segments: True"}
    with pytest.raises(ValueError, match=rf"{name} has expandable_segments:True.*NCCL_GRAPH_REGISTER=0.*is not set"):
        check_graph_environment(settings)
    check_graph_environment(settings | {"NCCL_GRAPH_REGISTER": "0"})
    check_graph_environment({name: "max_split_size_mb:64"})


def test_what_a_captured_set_can_replay():
    shape = StepShape(4, 2, 12)
    others = [shape, StepShape(3, 2, 12), StepShape(5, 2, 12), StepShape(4, 2, 10), StepShape(4, 1, 12)]
    for stages, virtual_stages, able in ((1, 1, [True] * 3), (2, 1, [True, True, False]), (2, 2, [True, False, False])):
        found = [shape.can_replay(other, stages=stages, virtual_stages=virtual_stages) for other in others]
        assert found == [*able, False, False]


SHAPE, OTHER = (4, 2, 128), (3, 2, 128)


class Training:
    def __init__(self) -> None:
        self.now = 10.0
        self.events: list[At] = []
        self.pace = GraphSpeedCheck(["attn", "mlp"], copies_inside=False, mark=self._mark)

    def _mark(self) -> Event:
        self.events.append(At(self.now))
        return self.events[-1]

    def run(self, capture: int, *seconds: float, shape: object = SHAPE) -> None:
        """Runs steps that replay a capture, or eager ones for 0."""
        for one in seconds:
            with self.pace.step(shape, capture):
                self.now += one


@pytest.fixture
def training(caplog) -> Training:
    caplog.set_level(logging.WARNING)
    return Training()


def test_slower_replays_are_said_once(training, caplog):
    training.run(0, 9.0, 2.0, 1.0, 3.0)
    training.run(1, 9.0, 1.5, 1.25, 1.5)
    assert caplog.messages == []  # the third step's events have not been read
    training.run(1, 1.5)
    assert caplog.messages == [slower_than_eager(1.25, 1.0, ["attn", "mlp"], copies_inside=False)]
    num_marks = len(training.events)
    training.run(1, 1.5, 1.5)
    training.run(2, 9.0, 2.5, 2.5, 2.5, 2.5)
    assert len(caplog.messages) == 1
    assert len(training.events) == num_marks


RUNS = [
    ([(0, 9.0, 1.0), (1, 9.0, 1.5, 0.5, 1.5, 1.5), (1, *[5.0] * 5)], 5, None),  # after three it ends
    ([(0, 9.0, 1.0), (1, 9.0, 1.5, 1.0625, 1.5, 1.5), (1, *[5.0] * 5)], 5, None),  # less than a tenth
    ([(0, 0.5, 1.0), (1, *[1.0] * 5)], 5, None),  # a fast first step would be too strict, a slow one too lenient
    ([(0, 1.0), (1, *[9.0] * 9)], 0, None),  # one eager step is no baseline
    ([(0, 9.0, 1.0), (1, 0.5, 1.5, 1.5), (2, 0.5, 1.5, 1.5)], 5, (1.5, 1.0)),  # not the first one after a capture
    ([(0, 9.0, 1.0), (1, OTHER, *[3.0] * 9), (1, 1.0, 1.0, 1.0), (1, OTHER, 3.0, 3.0)], 4, None),
    ([(0, 9.0, 1.0), (0, OTHER, 4.0), (1, 9.0, 2.0, 2.0), (1, OTHER, 5.0, 5.0)], 6, (5.0, 4.0)),
]


@pytest.mark.parametrize(("runs", "num_timed", "said"), RUNS)
def test_steps_are_compared_with_eager_ones_of_their_shape(training, caplog, runs, num_timed, said):
    for capture, *seconds in runs:
        shape = seconds.pop(0) if seconds[0] == OTHER else SHAPE
        training.run(capture, *seconds, shape=shape)
    assert len(training.events) == 2 * num_timed
    assert caplog.messages == ([] if said is None else [slower_than_eager(*said, ["attn", "mlp"], copies_inside=False)])


SWITCH_OFF = "set policy.megatron_cfg.cuda_graph_impl to none."
REMEDIES = {"attn": SWITCH_OFF, "mlp": SWITCH_OFF, "attn moe_router": "remove modules from it, or set"}
REMEDIES["attn mlp moe_router"] = "remove 'mlp' from it, or set"


@pytest.mark.parametrize("modules", REMEDIES)
def test_what_is_left_must_name_something(modules):
    for copies_inside in (False, True):
        said = slower_than_eager(0.2345, 0.2, modules.split(), copies_inside=copies_inside)
        assert "takes 234.5 ms, 17% longer than the 200.0 ms" in said
        assert f"slower: {REMEDIES[modules]}" in said
        assert ("copies of activations inside it" in said) == copies_inside
