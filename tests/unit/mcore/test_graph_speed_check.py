"""Tests how replayed training steps are compared with eager ones, with events of plain numbers."""

import logging

import pytest
from support.events import At

from nemo_offload_rl.mcore.graphs.graph_capture import GraphSpeedCheck, slower_than_eager
from nemo_offload_rl.memory.streams import Event

SHAPE, OTHER = (4, 2, 128), (3, 2, 128)


class Training:
    """Runs steps of known lengths through the check."""

    def __init__(self) -> None:
        self.now = 10.0
        self.events: list[At] = []
        self.pace = GraphSpeedCheck(["attn", "mlp"], copies_inside=False, mark=self._mark)

    def _mark(self) -> Event:
        self.events.append(At(self.now))
        return self.events[-1]

    def eager(self, *seconds: float, shape: object = SHAPE) -> None:
        self.replayed(*seconds, shape=shape, capture=0)

    def replayed(self, *seconds: float, shape: object = SHAPE, capture: int = 1) -> None:
        for one in seconds:
            with self.pace.step(shape, capture):
                self.now += one


@pytest.fixture
def training(caplog) -> Training:
    caplog.set_level(logging.WARNING)
    return Training()


def test_slower_replays_are_said_once(training, caplog):
    training.eager(9.0, 2.0, 1.0, 3.0)
    training.replayed(9.0, 1.5, 1.25, 1.5)
    assert caplog.messages == []  # the third step's events have not been read
    training.replayed(1.5)
    assert caplog.messages == [slower_than_eager(1.25, 1.0, ["attn", "mlp"], copies_inside=False)]
    num_marks = len(training.events)
    training.replayed(1.5, 1.5)
    training.replayed(9.0, 2.5, 2.5, 2.5, 2.5, capture=2)
    assert len(caplog.messages) == 1
    assert len(training.events) == num_marks


@pytest.mark.parametrize("fastest", [0.5, 1.0, 1.0625])
def test_replays_that_are_slower_by_less_than_a_tenth_are_not_said(training, caplog, fastest):
    training.eager(9.0, 1.0)
    training.replayed(9.0, 1.5, fastest, 1.5, 1.5)
    num_marks = len(training.events)
    training.replayed(*[5.0] * 5)  # after three steps the comparison ends
    assert caplog.messages == []
    assert len(training.events) == num_marks


def test_the_first_eager_step_is_no_baseline(training, caplog):
    training.eager(0.5, 1.0)  # a fast one would be too strict, a slow one too lenient
    training.replayed(*[1.0] * 5)
    assert caplog.messages == []


def test_the_first_replay_after_a_capture_is_left_out(training, caplog):
    training.eager(9.0, 1.0)
    training.replayed(0.5, 1.5, 1.5)
    training.replayed(0.5, 1.5, 1.5, capture=2)
    assert caplog.messages == [slower_than_eager(1.5, 1.0, ["attn", "mlp"], copies_inside=False)]


def test_steps_of_another_shape_are_not_compared(training, caplog):
    training.eager(9.0, 1.0)
    num_marks = len(training.events)
    training.replayed(*[3.0] * 9, shape=OTHER)
    assert len(training.events) == num_marks
    training.replayed(1.0, 1.0, 1.0)
    training.replayed(3.0, 3.0, shape=OTHER)
    assert caplog.messages == []


def test_each_shape_has_a_baseline_of_its_own(training, caplog):
    training.eager(9.0, 1.0)
    training.eager(4.0, shape=OTHER)
    training.replayed(9.0, 2.0, 2.0)
    training.replayed(5.0, 5.0, shape=OTHER)
    assert caplog.messages == [slower_than_eager(5.0, 4.0, ["attn", "mlp"], copies_inside=False)]


def test_one_eager_step_is_no_baseline(training, caplog):
    training.eager(1.0)
    training.replayed(*[9.0] * 9)
    assert caplog.messages == []
    assert training.events == []


def test_no_step_waits_for_its_own_marks(training):
    training.eager(9.0, 1.0)
    _, end = training.events
    assert not end.was_waited_for
    with training.pace.step(SHAPE, 1):
        assert not end.was_waited_for
    assert end.was_waited_for


def test_a_step_that_fails_is_not_timed(training, caplog):
    training.eager(9.0, 1.0)
    training.replayed(9.0)
    with pytest.raises(ZeroDivisionError), training.pace.step(SHAPE, 1):
        raise ZeroDivisionError
    training.replayed(1.5, 1.5, 1.5, 1.5)
    assert len(caplog.messages) == 1


def test_what_is_said():
    assert slower_than_eager(0.2345, 0.2, ["attn", "mlp"], copies_inside=True) == (
        "a training step from CUDA graphs takes 234.5 ms, 17% longer than the 200.0 ms of an eager one of the same "
        "shape (a graph ends only after the copies of activations inside it); capturing "
        "policy.megatron_cfg.cuda_graph_modules ['attn', 'mlp'] may make it at most 10% slower: remove 'mlp' "
        "from it, or set policy.megatron_cfg.cuda_graph_impl to none."
    )


@pytest.mark.parametrize(
    ("modules", "remedy"),
    [
        (["attn"], "slower: set policy.megatron_cfg.cuda_graph_impl to none."),
        (["mlp"], "slower: set policy.megatron_cfg.cuda_graph_impl to none."),
        (["attn", "moe_router"], "slower: remove modules from it, or set policy.megatron_cfg.cuda_graph_impl to none."),
        (["attn", "mlp", "moe_router"], "slower: remove 'mlp' from it, or set"),
    ],
)
def test_what_is_left_must_name_something(modules, remedy):
    said = slower_than_eager(2.0, 1.0, modules, copies_inside=False)
    assert remedy in said
    assert "copies" not in said
