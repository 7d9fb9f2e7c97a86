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


@pytest.mark.parametrize("verb", ["to_host", "to_gpu"])
@pytest.mark.parametrize(
    ("source", "destination", "words"),
    [
        (FLAT, FLAT[:7].clone(), "8 bytes to copy into 7"),
        (FLAT, torch.zeros(8), r"torch.float32 \[8\]"),
        (FLAT.view(2, 4), FLAT, r"torch.uint8 \[2, 4\]"),
        (FLAT[::2], FLAT[:4], "contiguous"),
    ],
)
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
