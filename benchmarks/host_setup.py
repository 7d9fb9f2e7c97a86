"""How long until a large host buffer is page-locked and usable, for each way to get one?

    python benchmarks/host_setup.py [--gb 18] [--rounds 3] [--out docs/results/host_setup.json]

The ways take turns in one run: the first time that a virtual machine touches its memory is slower than any later. A row
is the median over the rounds, with the first round beside it; `times_sooner` compares with torch's way. Without CUDA
nothing is page-locked, and only the touching is measured.
"""

import argparse
import gc
import mmap
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import torch
from result_file import Cell, print_rows, write_result

from nemo_offload_rl.offload.pinned_arena import LOCK_CHUNK_BYTES, PinnedArena

TORCH = "torch.empty(pin_memory=True)"
BAR_TIMES_SOONER = 6.0
BAR_BYTES_OVER_ASKED = 1.01
COPY_BYTES = 256 * 1024**2
Sample = tuple[float, int, int]
"""Seconds until usable, bytes pinned, bytes that became resident."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=18.0, help="the buffer's size, 10^9 bytes")
    parser.add_argument("--rounds", type=int, default=3, help="how often each way is measured")
    parser.add_argument("--threads", type=int, nargs="+", default=thread_counts(), help="numbers of touching threads")
    parser.add_argument("--out", type=Path, default=Path("build/host_setup.json"), help="the result file")
    arguments = parser.parse_args()
    nbytes = int(arguments.gb * 1e9)
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        torch.cuda.synchronize()  # the context is not part of any way's time
    else:
        print(f"No CUDA: left out are {TORCH}, page-locking and the copies; only mapping and touching is measured.")
    samples = take_turns(ways(nbytes, arguments.threads, has_cuda), arguments.rounds)
    rows = rows_of(samples, nbytes)
    if has_cuda:
        rows += copies()
    print_rows(rows)
    write_result(arguments.out, rows)
    print(f"written to {arguments.out}")


def thread_counts() -> list[int]:
    """1, 2, 4, ... up to the CPUs of this process, at most 16."""
    return [count for count in (1, 2, 4, 8, 16) if count <= len(os.sched_getaffinity(0))]


def ways(nbytes: int, threads: list[int], has_cuda: bool) -> dict[str, Callable[[], Sample]]:
    """A function a way: gets a buffer, gives it back, tells what it cost."""
    named: dict[str, Callable[[], Sample]] = {TORCH: partial(by_torch, nbytes)} if has_cuda else {}
    for huge_pages in (False, True):
        pages = "huge pages" if huge_pages else "pages of the default size"
        named |= {
            f"ours, {pages}, {count} threads": partial(by_arena, nbytes, huge_pages=huge_pages, num_threads=count)
            for count in threads
        }
    if has_cuda:
        named[f"ours, huge pages, {max(threads)} threads, locked in one piece"] = partial(
            by_arena, nbytes, huge_pages=True, num_threads=max(threads), lock_chunk_bytes=in_pages(nbytes)
        )
    return named


def in_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def by_torch(nbytes: int) -> Sample:
    resident = resident_bytes()
    start = time.perf_counter()
    buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    seconds = time.perf_counter() - start
    assert buffer.is_pinned()
    pinned = int(torch.cuda.host_memory_stats()["allocated_bytes.current"])
    grown = resident_bytes() - resident
    del buffer
    gc.collect()
    torch._C._host_emptyCache()
    return seconds, pinned, grown


def by_arena(nbytes: int, *, huge_pages: bool, num_threads: int, lock_chunk_bytes: int = LOCK_CHUNK_BYTES) -> Sample:
    resident = resident_bytes()
    with PinnedArena(huge_pages=huge_pages, num_touch_threads=num_threads, lock_chunk_bytes=lock_chunk_bytes) as arena:
        start = time.perf_counter()
        segment = arena.allocate("benchmark", nbytes)
        seconds = time.perf_counter() - start
        sample = seconds, arena.pinned_bytes, resident_bytes() - resident
        arena.release(segment)
    return sample


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def take_turns(named: dict[str, Callable[[], Sample]], num_rounds: int) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {name: [] for name in named}
    for _ in range(num_rounds):
        for name, way in named.items():
            samples[name].append(way())
    return samples


def rows_of(samples: dict[str, list[Sample]], nbytes: int) -> list[dict[str, Cell]]:
    medians = {name: statistics.median(seconds for seconds, *_ in of_way) for name, of_way in samples.items()}
    rows: list[dict[str, Cell]] = []
    for name, of_way in samples.items():
        _, pinned, resident = of_way[-1]
        row: dict[str, Cell] = {
            "case": "setup",
            "way": name,
            "gb": nbytes / 1e9,
            "first_s": round(of_way[0][0], 4),
            "median_s": round(medians[name], 4),
            "gb_per_s": round(nbytes / 1e9 / medians[name], 2),
            "resident_of_asked": round(resident / nbytes, 4),
        }
        if TORCH in medians:
            row |= {
                "pinned_of_asked": round(pinned / nbytes, 4),
                "pinned_bar": BAR_BYTES_OVER_ASKED,
                "times_sooner": round(medians[TORCH] / medians[name], 2),
                "times_sooner_bar": BAR_TIMES_SOONER,
            }
        rows.append(row)
    return rows


def copies() -> list[dict[str, Cell]]:
    """Copies inside one page-locked chunk and across the border of two, which CUDA may refuse, GB/s."""
    on_gpu = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    rows: list[dict[str, Cell]] = []
    with PinnedArena(huge_pages=True) as arena:
        segment = arena.allocate("benchmark", 2 * LOCK_CHUNK_BYTES)
        for way, offset in (("inside a chunk", 0), ("across two chunks", LOCK_CHUNK_BYTES - COPY_BYTES // 2)):
            on_host = segment.window(offset, COPY_BYTES)
            row: dict[str, Cell] = {"case": "copy", "way": way, "gb": COPY_BYTES / 1e9}
            try:
                rates = {"d2h": copy_rate(on_host, on_gpu), "h2d": copy_rate(on_gpu, on_host)}
            except torch.AcceleratorError as error:
                rows.append(row | {"refused": str(error).splitlines()[0]})
            else:
                rows += [row | {"direction": direction, "gb_per_s": rate} for direction, rate in rates.items()]
            del on_host
        arena.release(segment)
    return rows


def copy_rate(destination: torch.Tensor, source: torch.Tensor) -> float:
    """GB/s of a copy, the median of ten."""
    seconds = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        destination.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    assert torch.equal(destination.cpu(), source.cpu())
    return round(source.numel() / 1e9 / statistics.median(seconds), 2)


if __name__ == "__main__":
    main()
