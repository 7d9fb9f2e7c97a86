import pytest
import torch

from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.memory.streams import StagingRing

BUFFER = 4096


@pytest.fixture
def arena():
    with PinnedArena(pin=False) as arena:
        yield arena
    assert PinnedArena.live_bytes() == 0


@pytest.fixture
def ring(arena):
    ring = StagingRing(arena, num_buffers=3, buffer_bytes=BUFFER)
    yield ring
    ring.close()


@pytest.mark.parametrize("nbytes", [0, 1, BUFFER, BUFFER + 1, 3 * BUFFER, 11 * BUFFER - 7])
@pytest.mark.parametrize("verb", ["to_host", "to_gpu"])
def test_every_byte_arrives_and_no_other_changes(ring, verb, nbytes):
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    around = torch.full((nbytes + 2,), 77, dtype=torch.uint8)
    getattr(ring, verb)(source, around[1:-1], None)
    assert torch.equal(around[1:-1], source)
    assert around[[0, -1]].tolist() == [77, 77]


def test_it_holds_its_buffers_and_no_more(arena):
    ring = StagingRing(arena, num_buffers=3, buffer_bytes=BUFFER)
    source = torch.zeros(100 * BUFFER, dtype=torch.uint8)
    ring.to_host(source, torch.empty_like(source), None)
    assert arena.allocated_bytes == 3 * BUFFER
    assert not ring.pinned
    ring.close()
    assert arena.allocated_bytes == 0


def test_it_moves_between_segments_of_the_arena(arena, ring):
    segment = arena.allocate("moments", 10 * BUFFER + 3)
    values = torch.randint(0, 256, (segment.nbytes,), dtype=torch.uint8)
    ring.to_host(values, segment.tensor, None)
    back = torch.empty_like(values)
    ring.to_gpu(segment.tensor, back, None)
    assert torch.equal(back, values)
    arena.release(segment)


@pytest.mark.parametrize("verb", ["to_host", "to_gpu"])
def test_tensors_that_do_not_fit_each_other_are_refused(ring, verb):
    flat = torch.zeros(8, dtype=torch.uint8)
    copy = getattr(ring, verb)
    with pytest.raises(ValueError, match="8 bytes to copy into 7"):
        copy(flat, flat[:7].clone(), None)
    with pytest.raises(ValueError, match=r"torch.float32 \[8\]"):
        copy(flat, torch.zeros(8), None)
    with pytest.raises(ValueError, match=r"torch.uint8 \[2, 4\]"):
        copy(flat.view(2, 4), flat, None)
    with pytest.raises(ValueError, match="contiguous"):
        copy(flat[::2], flat[:4], None)


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
