import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_offload_rl.run.interrupt import Interrupt, Progress, Stopped


class Clock:
    """Returns a time that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def sighup_ends_a_process():
    """Sets SIGHUP as in a terminal: under nohup it is ignored, and `Interrupt` leaves it ignored."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_in_a_step_is_noted_and_elsewhere_stops(number, status):
    with Interrupt() as interrupt, interrupt.finishing():
        assert not interrupt.requested
        send(number)
        assert (interrupt.requested, interrupt.stopped, interrupt.exit_status) == (True, False, status)
    with Interrupt() as interrupt:
        with pytest.raises(Stopped):
            send(number)
        assert (interrupt.requested, interrupt.stopped, interrupt.exit_status) == (True, True, status)


def test_a_second_ctrl_c_stops_but_not_the_same_key_press_passed_on():
    clock = Clock()
    with Interrupt(clock) as interrupt, interrupt.finishing():
        send(signal.SIGINT)
        clock.now = 0.4
        send(signal.SIGINT)
        clock.now = 0.6
        with pytest.raises(Stopped):
            send(signal.SIGINT)


def test_a_scheduler_may_repeat_itself_and_ctrl_c_still_stops():
    clock = Clock()
    with Interrupt(clock) as interrupt, interrupt.finishing():
        for clock.now in (0.0, 5.0, 10.0):
            send(signal.SIGTERM)
        send(signal.SIGHUP)
        assert not interrupt.stopped
        with pytest.raises(Stopped):
            send(signal.SIGINT)
        assert interrupt.exit_status == 143


def test_the_end_of_the_grace_period_stops():
    with Interrupt() as interrupt, interrupt.finishing():
        interrupt.grace_period_s = 0.05
        send(signal.SIGTERM)
        with pytest.raises(Stopped):
            time.sleep(30)


def test_without_a_grace_period_and_after_ctrl_c_nothing_presses():
    for number, grace_period_s in [(signal.SIGTERM, None), (signal.SIGINT, 0.05)]:
        with Interrupt() as interrupt, interrupt.finishing():
            interrupt.grace_period_s = grace_period_s
            send(number)
            time.sleep(0.3)
            assert not interrupt.stopped


def test_a_library_that_catches_the_exception_is_told_again():
    with Interrupt() as interrupt:
        interrupt.check()
        with contextlib.suppress(KeyboardInterrupt):  # as a library may do
            send(signal.SIGTERM)
        with pytest.raises(Stopped):
            interrupt.check()


def test_while_everything_ends_nothing_is_stopped_and_a_signal_between_two_starts_stops_the_second():
    with Interrupt() as interrupt:
        interrupt.close()
        assert not interrupt.requested
        interrupt.reopen()
        interrupt.close()
        send(signal.SIGTERM)
        send(signal.SIGINT)
        assert not interrupt.requested
        with pytest.raises(Stopped):
            interrupt.reopen()
    assert interrupt.exit_status == 143


def test_a_ctrl_c_with_which_steps_are_lost_is_a_failure():
    interrupt = Interrupt()
    interrupt.progress = Progress(num_done=5, num_saved=4)
    assert interrupt.exit_status == 1
    interrupt.signal = signal.SIGTERM
    assert interrupt.exit_status == 143


def test_afterwards_everything_is_as_before():
    before = signal.getsignal(signal.SIGINT)
    with contextlib.suppress(RuntimeError), Interrupt():
        assert signal.getsignal(signal.SIGINT) is not before
        raise RuntimeError
    assert signal.getsignal(signal.SIGINT) is before


def test_a_closed_terminal_is_nothing_to_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupt() as interrupt:
        send(signal.SIGHUP)
        assert not interrupt.requested


# A main thread that catches every exception that a handler raises.
STUCK = """
import ctypes, os, signal, sys, threading, time
from nemo_offload_rl.run.interrupt import Interrupt, Progress

with Interrupt(stuck_s=0.2) as interrupt, interrupt.finishing():
    interrupt.progress = Progress(num_done=6, in_step=True, num_saved=4)
    interrupt.grace_period_s = 0.1
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    print(os.getpid(), flush=True)
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            pass
"""


def test_a_run_that_does_not_heed_is_cut_off_saying_what_is_lost():
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 143
    lost = "Steps 5 to 7 (7 unfinished) are lost. The same command starts the run from the beginning.\n"
    assert done.stderr.endswith(f"The run did not stop within 0.2 s and is killed. {lost}")


AFRESH = "The same command starts the run from the beginning"
STEP_4 = Path("c/step_4")


LOST = [
    (Progress(), "No step is lost.", f"{AFRESH}."),
    (Progress(num_done=4, num_saved=4, checkpoint=STEP_4), "No step is lost.", "resumes from c/step_4."),
    (Progress("run", 4, True, 4, STEP_4), "Step 5 since c/step_4 (unfinished) is lost.", "resumes from c/step_4."),
    (Progress("run", 5, False, 4, STEP_4), "Step 5 since c/step_4 is lost.", "resumes from c/step_4."),
    (Progress("run", 6, True, 4, STEP_4), "Steps 5 to 7 since c/step_4 (7 unfinished) are lost.", "c/step_4."),
    (Progress(num_done=3), "Steps 1 to 3 are lost.", f"{AFRESH}."),
    (Progress(num_done=1, saves=False), "Step 1 is lost.", f"{AFRESH} (checkpointing.enabled is false)."),
    (Progress("warm start", 3, True), "Steps 1 to 4 (4 unfinished) are lost.", "warm start from the beginning."),
]


@pytest.mark.parametrize(("progress", "lost", "then"), LOST)
def test_what_is_lost_in_words(progress, lost, then):
    assert str(progress).startswith(f"{lost} The same command ")
    assert str(progress).endswith(then)
