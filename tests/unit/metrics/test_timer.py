import time

import pytest

from nemo_offload_rl.metrics.timer import Timer


def test_a_phase_entered_twice_is_summed_and_order_is_kept(monkeypatch):
    moments = iter((0.0, 2.0, 2.0, 3.0, 10.0, 14.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    timer = Timer()
    for phase in ("generation", "training", "generation"):
        with timer.phase(phase):
            pass
    assert list(timer.seconds().items()) == [("generation", 6.0), ("training", 1.0)]


def test_a_phase_that_raises_is_counted():
    timer = Timer()
    with pytest.raises(KeyError), timer.phase("refit"):
        raise KeyError("gone")
    assert timer.seconds()["refit"] > 0


def test_reset_forgets_and_what_was_read_before_stays():
    timer = Timer()
    with timer.phase("training"):
        pass
    before = timer.seconds()
    timer.reset()
    assert timer.seconds() == {}
    assert list(before) == ["training"]
