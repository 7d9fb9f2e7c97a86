"""Tests the clock of a stream's waits with events of plain numbers; and, on a CUDA GPU, with its events."""

import pytest
import torch
from support.events import At

from nemo_offload_rl.activation_offload.copies import CopyHandle, CudaCopies, Span
from nemo_offload_rl.memory.streams import Event, WaitClock

CYCLES = 15_000_000  # 8 to 15 ms of a GPU's clock


class Timeline:
    """Simulates a stream whose time the test advances."""

    def __init__(self) -> None:
        self.now = 10.0

    def mark(self) -> Event:
        return At(self.now)


def test_waits_and_the_whole_are_summed():
    stream = Timeline()
    clock = WaitClock(stream.mark)
    with clock.running() as waits:
        for computing, waiting in ((0.25, 0.5), (2.0, 0.0), (1.0, 0.125)):
            stream.now += computing
            with clock.wait():
                stream.now += waiting
        stream.now += 4.0
        assert (waits.seconds_waited, waits.seconds) == (0.0, 0.0)
    assert (waits.seconds_waited, waits.seconds) == (0.625, 7.875)


def test_what_fails_is_not_waited_for():
    clock = WaitClock(Timeline().mark)
    with pytest.raises(ZeroDivisionError), clock.running() as waits:
        raise ZeroDivisionError
    assert waits.seconds == 0.0


@pytest.fixture
def copies() -> CudaCopies:
    return CudaCopies(torch.device("cuda", 0), graphs=True)


@pytest.fixture
def span() -> Span:
    gpu = torch.zeros(1024, dtype=torch.uint8, device="cuda").untyped_storage()
    return Span(gpu, torch.empty(1024, dtype=torch.uint8).pin_memory(), 0, 1024)


def late_copy(copies: CudaCopies, span: Span) -> CopyHandle:
    with torch.cuda.stream(copies.copy_streams["out"].stream):
        torch.cuda._sleep(CYCLES)
    return copies.out([span], [])


@pytest.mark.gpu
def test_a_stream_that_is_held_up(copies, span):
    copies.wait(late_copy(copies, span))  # this copy is not watched
    torch.cuda.synchronize()
    with copies.timed_waits() as waits:
        copies.wait(late_copy(copies, span))
        torch.cuda._sleep(CYCLES)
    assert 0.3 * waits.seconds < waits.seconds_waited < 0.7 * waits.seconds
    with copies.timed_waits() as waits:
        handle = late_copy(copies, span)
        torch.cuda._sleep(3 * CYCLES)
        copies.wait(handle)
    assert waits.seconds_waited < 0.1 * waits.seconds


@pytest.mark.gpu
def test_nothing_is_recorded_in_a_capture(copies, span):
    graph = torch.cuda.CUDAGraph()
    with copies.timed_waits() as waits, torch.cuda.graph(graph):
        copies.wait(copies.out([span], []))
    assert waits.seconds > 0
    assert waits.seconds_waited == 0.0
