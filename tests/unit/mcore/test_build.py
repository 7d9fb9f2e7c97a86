"""How the model of a policy is built."""

import contextlib
from collections.abc import Iterator

import pytest
from support.tiny import tiny_policy

from nemo_offload_rl.mcore import build

GRAPHS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}


@pytest.mark.parametrize(("megatron", "times"), [({}, 0), (GRAPHS, 1)], ids=["eager", "graphs"])
def test_gradients_have_a_stream_of_their_own_only_for_graphs(make_worker, monkeypatch, megatron, times):
    """It slows copies of activations (docs/decisions/activation-manager.md), and captures need it."""
    make_worker()  # with process groups
    entered = []

    @contextlib.contextmanager
    def side_stream() -> Iterator[None]:
        entered.append(True)
        yield

    monkeypatch.setattr(build, "_side_stream", side_stream)
    build.build(tiny_policy(**megatron), seed=0, init_optimizer=False)
    assert len(entered) == times
