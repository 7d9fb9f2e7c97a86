"""Measures what surrounds a move: the host's set-up, a compute stream beside it, fifty cycles."""

import statistics
import time
from collections.abc import Callable

import psutil
import torch

from nemo_offload_rl.memory.host_pages import CudaPageLocker, PageLocker
from nemo_offload_rl.memory.pinned import PinnedArena
from offload_ways import bars
from offload_ways.cases import NO_GPU, Setting, moments_sizes
from offload_ways.trips import checksum, driver_free, release_unused, seconds, settle
from offload_ways.ways import Ours

STATE_BYTES = 18_000_000_000
NUM_CYCLES = 50
NUM_REPEATS = 7
MATRIX = 8192


def setup(setting: Setting) -> None:
    """Measures the seconds to a usable host buffer for 18 GB, ours and torch's, and how much they pin."""
    nbytes = round(STATE_BYTES * setting.scale)
    # A virtual machine's memory is slow to touch the first time.
    with PinnedArena(pin=False) as arena:
        arena.release(arena.allocate("warm-up", 2 * nbytes))
    found: dict[str, float] = {}
    for way, huge_pages in (("ours", False), ("ours_huge_pages", True)):
        with setting.report.attempt("setup", way):
            found[way], pinned = _arena_setup(nbytes, huge_pages)
            if setting.has_gpu:
                setting.report.add("setup", way, bars.PINNED_OF_STATE, pinned / nbytes)
    if setting.has_gpu:
        with setting.report.attempt("setup", "torch_pinned"):
            found["torch_pinned"], pinned = _torch_setup(nbytes)
            setting.report.add("setup", "torch_pinned", bars.PINNED_OF_STATE, pinned / nbytes)
    else:
        setting.report.leave_out("setup", "torch_pinned", NO_GPU)
    for way, taken in found.items():
        setting.report.add("setup", way, "seconds to a usable buffer", round(taken, 4))
        if "torch_pinned" in found:
            setting.report.add("setup", way, bars.TIMES_SOONER, round(found["torch_pinned"] / taken, 3))


def _arena_setup(nbytes: int, huge_pages: bool) -> tuple[float, int]:
    """Returns the median seconds, and the bytes pinned."""
    samples = []
    for _ in range(3):
        with PinnedArena(huge_pages=huge_pages) as arena:
            start = time.perf_counter()
            segment = arena.allocate("benchmark", nbytes)
            samples.append(time.perf_counter() - start)
            pinned = arena.pinned_bytes
            arena.release(segment)
            del segment
    return statistics.median(samples), pinned


def _torch_setup(nbytes: int) -> tuple[float, int]:
    """Returns the seconds, and the bytes pinned; measured once, since it is slow. torch's cache keeps the block."""
    start = time.perf_counter()
    buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    taken = time.perf_counter() - start
    assert buffer.is_pinned()
    return taken, int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


def beside_compute(setting: Setting) -> None:
    """Measures a move beside a stream that multiplies matrices, and how much each delays the other."""
    if not setting.has_gpu:
        setting.report.leave_out("beside_compute", "ours", NO_GPU)
        return
    with setting.report.attempt("beside_compute", "ours"):
        tensors = setting.random_tensors(moments_sizes(setting.scale))
        ours = Ours(tensors, setting.device)
        for queue in (Queue("matmul", MatrixProduct(setting.device)), Queue("spin", spin)):
            _transitions(setting, ours, queue)
        ours.close()
    release_unused(setting.device)


class MatrixProduct:
    """Multiplies matrices, which uses the GPU's power and part of its memory bandwidth, as copies do."""

    def __init__(self, device: torch.device) -> None:
        self._left, self._right = (torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16) for _ in range(2))
        self._result = torch.empty_like(self._left)

    def __call__(self) -> None:
        """Starts it on the current stream."""
        torch.mm(self._left, self._right, out=self._result)


def spin() -> None:
    """Starts a kernel that only counts cycles, so that only a blocked stream delays it."""
    torch.cuda._sleep(2_000_000)


class Queue:
    """Queues kernels on a stream.

    Args:
        work: what the report calls the kernel.
        kernel: starts one.
    """

    def __init__(self, work: str, kernel: Callable[[], None]) -> None:
        self.work = work
        self._kernel = kernel
        self._stream = torch.cuda.Stream()
        self._length = 1
        self.run(lambda: None)
        self._length = 50
        self.one_s = self.run(lambda: None) / self._length

    def last_for(self, duration_s: float) -> None:
        """Makes the queue last for some seconds."""
        self._length = max(1, round(duration_s / self.one_s))

    def run(self, beside: Callable[[], None]) -> float:
        """Returns the seconds that the queue takes on the GPU while the caller does something else.

        The same kernels run for as long before, so that every queue starts under the same conditions: after an idle
        time a queue of matrix products was about 4% faster than after another queue.
        """
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            for _ in range(self._length):
                self._kernel()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            begin.record()
            for _ in range(self._length):
                self._kernel()
            end.record()
        beside()
        end.synchronize()
        return begin.elapsed_time(end) / 1000


def _transitions(setting: Setting, ours: Ours, queue: Queue) -> None:
    def own_stream() -> None:
        torch.cuda.current_stream().synchronize()  # the other one goes on

    def pause() -> None:
        time.sleep(alone["d2h"])

    # Warm up, and learn how long a transition takes.
    alone = {"d2h": seconds(ours.leave, own_stream), "h2d": seconds(ours.come_back, own_stream)}
    queue.last_for(1.5 * max(alone.values()))
    moves: dict[str, dict[bool, list[float]]] = {d: {True: [], False: []} for d in alone}
    queues: dict[str, dict[str, list[float]]] = {d: {"nothing": [], "link": [], "ours": []} for d in alone}
    for _ in range(NUM_REPEATS):
        for direction, move in (("d2h", ours.leave), ("h2d", ours.come_back)):
            if direction == "d2h":  # everything is mapped
                for copied in alone:
                    queues[copied]["link"].append(queue.run(lambda: ours.copy_only(copied)))  # noqa: B023
            queues[direction]["nothing"].append(queue.run(pause))
            taken: list[float] = []
            queues[direction]["ours"].append(queue.run(lambda: taken.append(seconds(move, own_stream))))  # noqa: B023
            moves[direction][True] += taken
            settle(setting.device)
            # The same transition alone: undo it, and do it again.
            undo = ours.come_back if direction == "d2h" else ours.leave
            undo()
            settle(setting.device)
            moves[direction][False].append(seconds(move, own_stream))
    for direction, of in queues.items():
        for way in ("link", "ours"):
            delay = statistics.median(of[way]) / statistics.median(of["nothing"]) - 1
            name = bars.STREAM_DELAY.format(direction=direction, work=queue.work)
            setting.report.add("beside_compute", way, name, round(delay, 5))
    for direction, when in moves.items():
        delay = statistics.median(when[True]) / statistics.median(when[False]) - 1
        name = bars.MOVE_DELAY.format(direction=direction, work=queue.work)
        setting.report.add("beside_compute", "ours", name, round(delay, 5))


class CountingLocker:
    """Page-locks memory and counts the calls."""

    def __init__(self, locker: PageLocker) -> None:
        self._locker = locker
        self.num_calls = 0

    def lock(self, address: int, nbytes: int) -> None:
        """See `PageLocker`."""
        self.num_calls += 1
        self._locker.lock(address, nbytes)

    def unlock(self, address: int) -> None:
        """See `PageLocker`."""
        self._locker.unlock(address)


def soak(setting: Setting) -> None:
    """Runs fifty cycles and compares the last with the first."""
    with setting.report.attempt("soak", "ours"):
        tensors = setting.random_tensors(moments_sizes(setting.scale))
        locker = CountingLocker(CudaPageLocker()) if setting.has_gpu else None
        ours = Ours(tensors, setting.device, locker)
        _cycles(setting, ours, tensors, locker)
        ours.close()
    release_unused(setting.device)


def _cycles(setting: Setting, ours: Ours, tensors: list[torch.Tensor], locker: CountingLocker | None) -> None:
    addresses, sums = [tensor.data_ptr() for tensor in tensors], checksum(tensors)
    same_addresses = same_sums = True
    memories: list[dict[str, int]] = []
    calls: list[int] = []
    for _ in range(NUM_CYCLES):
        ours.leave()
        ours.come_back()
        same_addresses &= [tensor.data_ptr() for tensor in tensors] == addresses
        same_sums &= torch.equal(checksum(tensors), sums)
        settle(setting.device)
        memories.append(_memory(setting, ours))
        calls.append(locker.num_calls if locker is not None else 0)
    first, last = memories[0], memories[-1]
    for what in first:
        setting.report.add("soak", "ours", bars.GROWTH.format(what=what), last[what] - first[what])
    if locker is not None:
        setting.report.add("soak", "ours", bars.PAGE_LOCKINGS, calls[-1] - calls[0])
    setting.report.add("soak", "ours", bars.SAME.format(what="addresses"), same_addresses)
    setting.report.add("soak", "ours", bars.SAME.format(what="checksums"), same_sums)


def _memory(setting: Setting, ours: Ours) -> dict[str, int]:
    memory = {"resident memory": psutil.Process().memory_info().rss}
    if setting.has_gpu:
        memory |= {
            "pinned memory": ours.arena.pinned_bytes,
            "memory that torch reserves": torch.cuda.memory_reserved(setting.device),
            "memory that the driver counts": -driver_free(setting.device),
        }
    return memory
