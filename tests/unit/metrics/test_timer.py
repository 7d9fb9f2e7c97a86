import time
from contextlib import suppress

from nemo_offload_rl.metrics.timer import Timer


def test_a_phase_entered_twice_is_summed_also_if_it_raises_until_the_timer_is_reset(monkeypatch):
    moments = iter((0.0, 2.0, 2.0, 3.0, 10.0, 14.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    timer = Timer()
    for phase in ("generation", "training", "generation"):
        with suppress(KeyError), timer.phase(phase):
            raise KeyError
    before = timer.seconds()
    assert list(before.items()) == [("generation", 6.0), ("training", 1.0)]
    timer.reset()
    assert (timer.seconds(), list(before)) == ({}, ["generation", "training"])
