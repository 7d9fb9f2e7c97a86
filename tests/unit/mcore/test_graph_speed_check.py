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


@pytest.mark.parametrize(
    ("runs", "num_timed", "said"),
    [
        ([(0, 9.0, 1.0), (1, 9.0, 1.5, 0.5, 1.5, 1.5), (1, *[5.0] * 5)], 5, None),  # after three it ends
        ([(0, 9.0, 1.0), (1, 9.0, 1.5, 1.0625, 1.5, 1.5), (1, *[5.0] * 5)], 5, None),  # less than a tenth
        ([(0, 0.5, 1.0), (1, *[1.0] * 5)], 5, None),  # a fast first step would be too strict, a slow one too lenient
        ([(0, 1.0), (1, *[9.0] * 9)], 0, None),  # one eager step is no baseline
        ([(0, 9.0, 1.0), (1, 0.5, 1.5, 1.5), (2, 0.5, 1.5, 1.5)], 5, (1.5, 1.0)),  # not the first one after a capture
        ([(0, 9.0, 1.0), (1, OTHER, *[3.0] * 9), (1, 1.0, 1.0, 1.0), (1, OTHER, 3.0, 3.0)], 4, None),
        ([(0, 9.0, 1.0), (0, OTHER, 4.0), (1, 9.0, 2.0, 2.0), (1, OTHER, 5.0, 5.0)], 6, (5.0, 4.0)),
    ],
)
def test_steps_are_compared_with_eager_ones_of_their_shape(training, caplog, runs, num_timed, said):
    for capture, *seconds in runs:
        shape = seconds.pop(0) if seconds[0] == OTHER else SHAPE
        training.run(capture, *seconds, shape=shape)
    assert len(training.events) == 2 * num_timed
    assert caplog.messages == ([] if said is None else [slower_than_eager(*said, ["attn", "mlp"], copies_inside=False)])


def test_no_step_waits_for_its_own_marks(training):
    training.run(0, 9.0, 1.0)
    _, end = training.events
    assert not end.was_waited_for
    with training.pace.step(SHAPE, 1):
        assert not end.was_waited_for
    assert end.was_waited_for


def test_a_step_that_fails_is_not_timed(training, caplog):
    training.run(0, 9.0, 1.0)
    training.run(1, 9.0)
    with pytest.raises(ZeroDivisionError), training.pace.step(SHAPE, 1):
        raise ZeroDivisionError
    training.run(1, 1.5, 1.5, 1.5, 1.5)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("modules", "remedy"),
    [
        (["attn"], "slower: set policy.megatron_cfg.cuda_graph_impl to none."),
        (["mlp"], "slower: set policy.megatron_cfg.cuda_graph_impl to none."),
        (["attn", "moe_router"], "slower: remove modules from it, or set"),
        (["attn", "mlp", "moe_router"], "slower: remove 'mlp' from it, or set"),
    ],
)
def test_what_is_left_must_name_something(modules, remedy):
    for copies_inside in (False, True):
        said = slower_than_eager(0.2345, 0.2, modules, copies_inside=copies_inside)
        assert "takes 234.5 ms, 17% longer than the 200.0 ms" in said
        assert remedy in said
        assert ("copies of activations inside it" in said) == copies_inside
