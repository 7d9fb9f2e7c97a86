import time

import pytest

from nemo_offload_rl.metrics.timer import Timer


def test_a_phase_entered_twice_is_summed_and_order_is_kept():
    timer = Timer()
    with timer.phase("generation"):
        time.sleep(0.02)
    with timer.phase("training"):
        pass
    once = timer.seconds()["generation"]
    with timer.phase("generation"):
        time.sleep(0.02)
    seconds = timer.seconds()
    assert list(seconds) == ["generation", "training"]
    assert once >= 0.02
    assert seconds["generation"] >= once + 0.02
    assert seconds["training"] < 0.02


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
