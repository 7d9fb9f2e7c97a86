"""Tests which stream a worker computes on; test_gpu.py checks on a GPU where gradients are added."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from support.tiny import tiny_policy

from nemo_offload_rl.mcore.patches.optimizers import add_gradients_on_this_stream
from nemo_offload_rl.mcore.step import ComputeStream
from nemo_offload_rl.worker import worker

GPU = torch.device("cuda", 0)
GRAPHS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}


@pytest.mark.parametrize(("megatron", "captures"), [({}, False), (GRAPHS, True)], ids=["eager", "graphs"])
def test_a_worker_asks_for_another_stream_only_for_graphs(make_worker, monkeypatch, megatron, captures):
    def asked(_, **arguments):
        raise ZeroDivisionError(arguments)  # ends the worker once it has requested its stream

    monkeypatch.setattr(worker, "ComputeStream", asked)
    with pytest.raises(ZeroDivisionError) as found:
        make_worker(tiny_policy(**megatron))
    assert found.value.args == ({"captures": captures},)


@dataclass(eq=False)
class FakeStream:
    device = GPU
    waited_for: list["FakeStream"] = field(default_factory=list)

    def wait_stream(self, other: "FakeStream") -> None:
        self.waited_for.append(other)


@pytest.fixture
def cuda(monkeypatch):
    """Replaces torch.cuda's streams for one thread."""
    fake = SimpleNamespace(default=FakeStream())
    fake.current = fake.default
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: FakeStream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: fake.current)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda *_: fake.default)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(fake, "current", stream))
    return fake


def test_each_stream_follows_the_one_before_it(cuda):
    stream = ComputeStream(GPU, captures=True)
    own = cuda.current
    assert own is not cuda.default
    assert own.waited_for == [cuda.default]
    assert cuda.default.waited_for == []
    stream.close()
    assert cuda.current is cuda.default
    assert cuda.default.waited_for == [own]
    stream.close()
    assert cuda.default.waited_for == [own]


@pytest.mark.parametrize(("captures", "is_default"), [(False, False), (True, False), (False, True)])
def test_a_stream_that_the_caller_chose_stays_and_so_does_the_default_without_graphs(cuda, captures, is_default):
    cuda.current = chosen = cuda.default if is_default else FakeStream()
    stream = ComputeStream(GPU, captures=captures)
    assert cuda.current is chosen
    stream.close()
    assert cuda.current is chosen
    assert cuda.default.waited_for == chosen.waited_for == []


def test_each_gradient_is_added_up_by_the_node_that_tells_the_model(make_worker):
    """Each parameter must have one node: a second one, without the hook, would not report its gradient."""
    worker = make_worker()
    [ddp] = worker.state.model
    parameters = list(ddp.module.parameters())
    assert parameters
    nodes = [parameter.expand_as(parameter).grad_fn.next_functions[0][0] for parameter in parameters]
    assert nodes == ddp.grad_accs
    told = []
    make_hook = ddp._make_backward_post_hook
    ddp._make_backward_post_hook = lambda parameter: told.append(parameter) or make_hook(parameter)
    add_gradients_on_this_stream([ddp])
    assert [id(parameter) for parameter in told] == [id(parameter) for parameter in parameters]
