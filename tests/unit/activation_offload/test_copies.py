"""Tests copies of activations by the driver, on a CUDA GPU."""

import threading
from collections.abc import Iterator

import pytest
import torch

from nemo_offload_rl.activation_offload.copies import CudaCopies, Span
from nemo_offload_rl.memory import pinned
from nemo_offload_rl.memory.pinned import HostSegment, PinnedArena

pytestmark = pytest.mark.gpu

CHUNK = 1 << 16
NBYTES = 3 * CHUNK + 100
OFFSET = 4096
CYCLES = 15_000_000  # 8 to 15 ms of a GPU's clock


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostSegment]:
    monkeypatch.setattr(pinned, "LOCK_CHUNK_BYTES", CHUNK)
    with PinnedArena(lock_chunk_bytes=CHUNK) as arena:
        segment = arena.allocate("activations", OFFSET + NBYTES)
        assert segment.pinned
        yield segment
        arena.release(segment)


@pytest.fixture
def copies() -> CudaCopies:
    return CudaCopies(torch.device("cuda", 0))


def span(gpu: torch.Tensor, host: HostSegment) -> Span:
    return Span(gpu.untyped_storage(), host.tensor, OFFSET, len(gpu))


@pytest.mark.parametrize("is_synchronized", [False, True])
def test_bytes_leave_and_come_back_in_the_order_of_tickets(copies, host, is_synchronized):
    sent = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    received = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    ramp = torch.arange(NBYTES, device="cuda").to(torch.uint8)
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    sent.copy_(ramp)  # the copy to the host has to wait for this
    out = copies.out([span(sent, host)], [])
    back = copies.back([span(received, host)], [out])
    assert not out.reached()
    copies.synchronize() if is_synchronized else copies.wait(back)
    assert torch.equal(received, ramp)
    assert out.reached() and back.reached()
    assert torch.equal(host.tensor[OFFSET:], ramp.cpu())
    assert not host.tensor[:OFFSET].any()


def test_memory_is_used_again_by_the_stream_that_asked_for_it(copies, host):
    """The garbage collector runs in any thread, and each thread has its own current stream."""
    gpu = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    caller, used_again = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(copies.copy_streams["back"].stream):
        torch.cuda._sleep(CYCLES)
    with torch.cuda.stream(caller):
        handle = copies.back([span(gpu, host)], [])
    collector = threading.Thread(target=copies.wait_to_free, args=(handle,))
    collector.start()
    collector.join()
    used_again.record(caller)
    assert not handle.reached()
    used_again.synchronize()
    assert handle.reached()


def test_what_the_driver_refuses_is_an_error(copies):
    gpu = torch.zeros(16, dtype=torch.uint8, device="cuda")
    nowhere = torch.zeros(16, dtype=torch.uint8, device="meta")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE for 16 bytes of activations to the host"):
        copies.out([Span(gpu.untyped_storage(), nowhere, 0, 16)], [])
