import contextlib
import faulthandler
import gc
import io
import mmap
import os
import signal

import psutil
import pytest
import torch

from nemo_offload_rl.memory import host_pages, pinned
from nemo_offload_rl.memory.host_pages import CudaPageLocker, PageLockError, populate, slices, touching, write_each_page
from nemo_offload_rl.memory.pinned import HostMemoryError, LeakError, PinnedArena, cut_at_locks

PAGE = mmap.PAGESIZE
MIB = 1024**2
UNMAPPED = 1 << 45  # between the program's heap and where the kernel maps on request


@pytest.fixture(autouse=True)
def no_leak():
    assert PinnedArena.live_bytes() == 0
    yield
    gc.collect()
    assert PinnedArena.live_bytes() == 0


class Ledger:
    """Replaces the CUDA driver: records what is page-locked, once its pages are there; refuses from a call on."""

    def __init__(self, *, refuse_from=None, refuse_only=None):
        self.locked = {}
        self.history = []
        self.refuse_from, self.refuse_only = refuse_from, refuse_only

    def lock(self, address, nbytes):
        number = len(self.history)
        self.history.append((address, nbytes))
        if number == self.refuse_only or (self.refuse_from is not None and number >= self.refuse_from):
            raise PageLockError("cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY")
        assert address not in self.locked
        assert all(is_resident(page) for page in range(address, address + nbytes, PAGE))
        self.locked[address] = nbytes

    def unlock(self, address):
        del self.locked[address]


@contextlib.contextmanager
def segment_of(nbytes, ledger=None, **options):
    """Gives an arena with one segment, and the ledger; checks that nothing is left of them."""
    ledger = Ledger() if ledger is None else ledger
    with PinnedArena(locker=ledger, **options) as arena:
        segment = arena.allocate("moments", nbytes)
        yield arena, segment, ledger
        arena.release(segment)
        assert arena.allocated_bytes == arena.pinned_bytes == 0
        assert ledger.locked == {}


def rss():
    return psutil.Process().memory_info().rss


def is_resident(address):
    """Returns whether the kernel has allocated the page at an address (bit 63 of its entry; bit 62 would be swap)."""
    with open("/proc/self/pagemap", "rb") as entries:
        entries.seek(address // PAGE * 8)
        return bool(int.from_bytes(entries.read(8), "little") >> 63)


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 3 * MIB + 5])
def test_a_segment_is_exact_to_the_page(nbytes):
    with segment_of(nbytes) as (arena, segment, ledger):
        pages = -(-nbytes // PAGE) * PAGE
        assert arena.allocated_bytes == arena.pinned_bytes == PinnedArena.live_bytes() == pages
        assert ledger.locked == {segment.tensor.data_ptr(): pages}
        assert (segment.tensor.shape, segment.tensor.dtype) == ((nbytes,), torch.uint8)
        assert segment.tensor.data_ptr() % PAGE == 0


@pytest.mark.parametrize("huge_pages", [False, True])
def test_memory_is_there_after_allocate_and_gone_after_release(huge_pages):
    nbytes = 64 * MIB
    with PinnedArena(pin=False, huge_pages=huge_pages) as arena:
        before = rss()
        segment = arena.allocate("moments", nbytes)
        assert all(is_resident(segment.tensor.data_ptr() + offset) for offset in range(0, nbytes, PAGE))
        assert abs(rss() - before - nbytes) < 4 * MIB
        assert not segment.tensor.any()
        assert abs(rss() - before - nbytes) < 4 * MIB
        arena.release(segment)
        assert abs(rss() - before) < 4 * MIB


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what happens without CUDA")
def test_without_page_locking_a_segment_is_plain_memory():
    with segment_of(5, pin=False) as (arena, segment, ledger):
        assert (segment.pinned, arena.pinned_bytes, ledger.history) == (False, 0, [])
    with PinnedArena(pin=True) as arena:
        segment = arena.allocate("moments", 5)
        assert (segment.pinned, arena.pinned_bytes) == (False, 0)
        arena.release(segment)


def test_a_window_is_a_part_of_the_segment_and_is_saved_without_the_rest():
    with segment_of(MIB, pin=False) as (_, segment, _):
        window = segment.window(PAGE, 4000)
        window.fill_(7)
        assert segment.tensor[PAGE - 1 : PAGE + 4001].tolist() == [0, *[7] * 4000, 0]
        assert window.untyped_storage().nbytes() == 4000
        written = io.BytesIO()
        torch.save(window.view(torch.float32), written)
        assert written.tell() < 8000
        del window


def test_page_locking_goes_in_chunks_that_cover_the_segment_once():
    with segment_of(5 * MIB + 100, lock_chunk_bytes=MIB, num_touch_threads=2) as (_, segment, ledger):
        start = segment.tensor.data_ptr()
        assert ledger.history == [(start + k * MIB, MIB) for k in range(5)] + [(start + 5 * MIB, PAGE)]
        assert segment.pinned


@pytest.mark.parametrize("refused", [0, 1, 5])
def test_a_refused_chunk_unlocks_the_others_and_leaves_plain_memory(refused, caplog):
    with segment_of(6 * MIB, Ledger(refuse_from=refused), lock_chunk_bytes=MIB) as (arena, segment, ledger):
        assert not segment.pinned
        assert ledger.locked == {}
        assert len(ledger.history) == refused + 1  # it does not try again
        assert (arena.allocated_bytes, arena.pinned_bytes) == (6 * MIB, 0)
        segment.tensor.fill_(3)
        assert int(segment.tensor.sum(dtype=torch.int64)) == 3 * 6 * MIB
        (warning,) = caplog.messages
        assert all(words in warning for words in ("moments", "0.01 GiB requested", "OUT_OF_MEMORY", "RLIMIT_MEMLOCK"))


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 60, 1 << 70])
def test_memory_that_cannot_be_mapped_is_an_error_with_numbers(nbytes):
    error = HostMemoryError if nbytes > 0 else ValueError
    lacking = rf"Cannot allocate {nbytes} bytes .* for moments; .* bytes \(.*\) are available"
    with PinnedArena(pin=False) as arena:
        with pytest.raises(error, match=lacking if nbytes > 0 else "moments requested a host segment of"):
            arena.allocate("moments", nbytes)
        assert arena.allocated_bytes == PinnedArena.live_bytes() == 0


def test_an_error_while_touching_leaves_nothing_behind(monkeypatch):
    """Raises the kernel's own error: the fourth slice has an unmapped address, which also fails with ENOMEM."""
    ledger = Ledger()
    arena = PinnedArena(locker=ledger, lock_chunk_bytes=MIB, num_touch_threads=1)
    before = rss()
    touched = []

    def touch(address, nbytes):
        touched.append(address)
        populate(address if len(touched) < 4 else UNMAPPED, nbytes)

    monkeypatch.setattr(arena, "_touch", touch)
    with pytest.raises(HostMemoryError, match=r"Cannot allocate .* for moments"):
        arena.allocate("moments", 64 * MIB)
    assert len(ledger.history) == 3
    assert ledger.locked == {}
    assert arena.allocated_bytes == PinnedArena.live_bytes() == 0
    assert abs(rss() - before) < 4 * MIB
    arena.close()


def test_releasing_twice_or_elsewhere_is_refused():
    with PinnedArena(pin=False) as arena, PinnedArena(pin=False) as other:
        segment = arena.allocate("moments", 1)
        with pytest.raises(ValueError, match="was not allocated by this arena"):
            other.release(segment)
        arena.release(segment)
        with pytest.raises(ValueError, match="was already released"):
            arena.release(segment)
        with pytest.raises(AssertionError, match="moments has been released"):
            _ = segment.tensor


def test_a_tensor_that_outlives_its_segment_stays_valid_and_is_named_a_leak():
    ledger = Ledger()
    with PinnedArena(locker=ledger) as arena:
        segment = arena.allocate("moments", 8 * PAGE)
        view = segment.tensor[100:108].view(torch.int32)
        view.fill_(5)
        with pytest.raises(LeakError, match="Tensors still view the host segment of moments"):
            arena.release(segment)
        assert ledger.locked == {}
        assert PinnedArena.live_bytes() == 8 * PAGE
        assert view.tolist() == [5, 5]
        del view
        assert PinnedArena.live_bytes() == 0


def test_closing_releases_and_names_what_owners_forgot_and_dropping_an_arena_releases_it():
    ledger = Ledger()
    arena = PinnedArena(locker=ledger)
    arena.release(arena.allocate("params", PAGE))
    arena.allocate("moments", PAGE)
    with pytest.raises(LeakError, match=r"moments \(4096 bytes\)"):
        arena.close()
    assert ledger.locked == {}
    assert PinnedArena.live_bytes() == arena.allocated_bytes == 0
    arena.close()
    arena = PinnedArena(locker=ledger)
    arena.allocate("moments", PAGE)
    assert ledger.locked
    del arena
    gc.collect()
    assert ledger.locked == {}


def test_an_error_inside_the_arenas_scope_is_not_hidden_by_the_leak_that_it_made():
    ledger = Ledger()
    with pytest.raises(ValueError, match="bytes; request at least 1 byte"), PinnedArena(locker=ledger) as arena:
        arena.allocate("params", arena.allocate("moments", PAGE).nbytes - PAGE)
    assert ledger.locked == {}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(("refuse_only", "status"), [(None, -signal.SIGSEGV), (0, 0)], ids=["pinned", "not pinned"])
def test_a_forked_child_inherits_plain_segments_only(refuse_only, status):
    with segment_of(PAGE, Ledger(refuse_only=refuse_only)) as (_, segment, _):
        segment.tensor.fill_(9)
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            os._exit(0 if segment.tensor[0].item() == 9 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
        assert (segment.tensor == 9).all()


@pytest.mark.parametrize("touch", [populate, write_each_page])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_both_ways_to_touch_bring_every_page(touch, num_threads, monkeypatch):
    monkeypatch.setattr(host_pages, "SLICE_BYTES", MIB)
    size = 5 * MIB + 3 * PAGE
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        start = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        pages = range(start, start + size, PAGE)
        assert not any(map(is_resident, pages))
        with touching(start, size, 2 * MIB, num_threads=num_threads, touch=touch) as chunks:
            assert list(chunks) == list(slices(start, size, 2 * MIB))
        assert all(map(is_resident, pages))


@pytest.mark.gpu
def test_cuda_knows_a_segment_as_pinned_until_it_is_released():
    with PinnedArena(lock_chunk_bytes=MIB) as arena:
        segment = arena.allocate("moments", 4 * MIB + 10)
        assert segment.pinned
        assert segment.tensor.is_pinned()
        address = segment.tensor.data_ptr()
        on_gpu = torch.randint(0, 256, (segment.nbytes,), dtype=torch.uint8, device="cuda")
        for to, source in zip(segment.tensor.split(MIB), on_gpu.split(MIB), strict=True):
            to.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(segment.tensor, on_gpu.cpu())
        del to
        arena.release(segment)
        with mmap.mmap(-1, 4 * MIB) as elsewhere:
            assert not torch.frombuffer(elsewhere, dtype=torch.uint8).is_pinned(), f"what was at {address:#x}"


@pytest.mark.gpu
def test_a_refusal_by_the_driver_leaves_no_cuda_error():
    locker = CudaPageLocker()
    with mmap.mmap(-1, 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        locker.lock(address, PAGE)
        with pytest.raises(PageLockError, match="CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"):
            locker.lock(address, PAGE)
        assert torch.ones(3, device="cuda").sum().item() == 3
        locker.unlock(address)


def test_a_range_is_cut_where_pages_were_locked(monkeypatch):
    monkeypatch.setattr(pinned, "LOCK_CHUNK_BYTES", 2 * PAGE)
    assert cut_at_locks(PAGE, 4 * PAGE - 10) == [(PAGE, 2 * PAGE), (2 * PAGE, 4 * PAGE), (4 * PAGE, 5 * PAGE - 10)]
    assert cut_at_locks(2 * PAGE, 2 * PAGE) == [(2 * PAGE, 4 * PAGE)]
    assert cut_at_locks(PAGE, 0) == []
