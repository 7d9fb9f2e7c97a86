"""Tests the clock of a stream's waits with events of plain numbers; and, on a CUDA GPU, with its events."""

import pytest
import torch
from support.events import At

from nemo_offload_rl.activation_offload.copies import CopyHandle, CudaCopies, Span
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.memory.streams import Event, StagingRing, WaitClock

CYCLES = 15_000_000  # 8 to 15 ms of a GPU's clock


class Timeline:
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


BUFFER = 4096


@pytest.fixture
def arena():
    with PinnedArena(pin=False) as arena:
        yield arena
    assert PinnedArena.live_bytes() == 0


@pytest.fixture
def ring(arena):
    ring = StagingRing(arena, num_buffers=3, buffer_bytes=BUFFER)
    assert not ring.pinned
    yield ring
    assert arena.allocated_bytes == 3 * BUFFER
    ring.close()
    assert arena.allocated_bytes == 0


@pytest.mark.parametrize("nbytes", [0, 1, BUFFER, BUFFER + 1, 3 * BUFFER, 11 * BUFFER - 7])
@pytest.mark.parametrize("verb", ["to_host", "to_gpu"])
def test_every_byte_arrives_and_no_other_changes(ring, verb, nbytes):
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    around = torch.full((nbytes + 2,), 77, dtype=torch.uint8)
    getattr(ring, verb)(source, around[1:-1], None)
    assert torch.equal(around[1:-1], source)
    assert around[[0, -1]].tolist() == [77, 77]


FLAT = torch.zeros(8, dtype=torch.uint8)


MISFITS = [
    (FLAT, FLAT[:7].clone(), "8 bytes to copy into 7"),
    (FLAT, torch.zeros(8), r"torch.float32 \[8\]"),
    (FLAT.view(2, 4), FLAT, r"torch.uint8 \[2, 4\]"),
    (FLAT[::2], FLAT[:4], "contiguous"),
]


@pytest.mark.parametrize("verb", ["to_host", "to_gpu"])
@pytest.mark.parametrize(("source", "destination", "words"), MISFITS)
def test_tensors_that_do_not_fit_each_other_are_refused(ring, verb, source, destination, words):
    with pytest.raises(ValueError, match=words):
        getattr(ring, verb)(source, destination, None)


@pytest.mark.gpu
@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("nbytes", [1, 3 * BUFFER, 1000 * BUFFER + 5])
def test_a_round_trip_over_the_link_keeps_every_byte(pin, nbytes):
    values = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    stream = torch.cuda.Stream()
    with PinnedArena(pin=pin) as arena:
        ring = StagingRing(arena, num_buffers=3, buffer_bytes=BUFFER)
        assert ring.pinned == pin
        on_gpu = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        ring.to_gpu(values, on_gpu, stream)
        assert torch.equal(on_gpu.cpu(), values)
        back = torch.empty_like(values)
        ring.to_host(on_gpu, back, stream)
        assert torch.equal(back, values)
        ring.close()
