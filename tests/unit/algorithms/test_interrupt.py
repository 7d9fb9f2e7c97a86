import os
import signal

import pytest

from nemo_offload_rl.algorithms.interrupt import Interrupt


def test_the_first_is_noted_and_the_second_stops():
    with Interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_afterwards_everything_is_as_before():
    before = signal.getsignal(signal.SIGINT)

    def fail_inside():
        with Interrupt():
            assert signal.getsignal(signal.SIGINT) is not before
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_inside()
    assert signal.getsignal(signal.SIGINT) is before
