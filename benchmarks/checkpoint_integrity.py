"""How much time do checksums add to saving and loading a checkpoint?

One worker saves the same state in turn with megatron-core's own strategy and as this package does: hashed while it is
written, with a manifest. Then it loads the same files in turn without checksums and after reading them for their
checksums. Files are dropped from the page cache before each load, so that both start at the disk.

python benchmarks/checkpoint_integrity.py --folder build/integrity --out docs/results/checkpoint_integrity.json

On a CPU take a smaller shape: `--layers 2 --vocab-size 32000`.
"""

import argparse
import hashlib
import os
import queue
import shutil
import statistics
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from model_shapes import QWEN2_1_5B
from one_rank import one_rank_worker
from result_file import TableValue, print_rows, write_result
from worker_train import compared

from nemo_offload_rl.config import for_machine, load
from nemo_offload_rl.mcore.checkpoint import checkpoint
from nemo_offload_rl.storage.disk import sync
from nemo_offload_rl.storage.manifest import read_manifest, write_manifest
from nemo_offload_rl.worker.worker import MegatronPolicyWorker

CHECKSUMS: dict[str, Callable[[bytes], object]] = {
    "xxh3_128": lambda data: xxhash.xxh3_128(data).digest(),
    "crc32": zlib.crc32,
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "blake2b": lambda data: hashlib.blake2b(data).digest(),
}


def policy(layers: int, vocab_size: int) -> dict[str, Any]:
    """Returns the policy section of grpo_math_1B_megatron.yaml with random weights; in fp32 on a CPU."""
    overrides = ["policy.sequence_packing.enabled=false", "policy.megatron_cfg.empty_unused_memory_level=0"]
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        overrides += ["policy.precision=float32", "policy.megatron_cfg.optimizer.bf16=false"]
    config = dict(load("examples/configs/grpo_math_1B_megatron.yaml", overrides).config)
    config, _ = for_machine(config, has_gpus=on_gpu)
    shape = QWEN2_1_5B | {"num_hidden_layers": layers, "vocab_size": vocab_size}
    return dict(config["policy"]) | {"hf_config": shape}


def save_plainly(worker: MegatronPolicyWorker, folder: Path) -> None:
    """Saves with megatron-core's own strategy."""
    filesystem_async._results_queue = queue.Queue()  # in place of a process that is started for it
    state = checkpoint.readable_state(worker.state, with_optimizer=True, read=worker.offloader.checkpoint_reader())
    dist_checkpointing.save(state, str(folder), content_metadata=checkpoint.METADATA)
    for path in [folder, *folder.rglob("*")]:
        sync(path)


def save_with_checksums(worker: MegatronPolicyWorker, folder: Path) -> None:
    """Saves as a run does."""
    files = worker.save_checkpoint(str(folder), save_optimizer=True)
    for path in [folder, *folder.rglob("*")]:
        sync(path)
    write_manifest(folder, files)


def load_plainly(worker: MegatronPolicyWorker, folder: Path) -> None:
    """Loads without checking checksums."""
    worker.load_checkpoint(str(folder))


def load_with_checksums(worker: MegatronPolicyWorker, folder: Path) -> None:
    """Loads as a run does."""
    manifest = read_manifest(folder)
    assert manifest is not None
    assert worker.find_damage(str(folder), manifest) == []
    worker.load_checkpoint(str(folder))


def drop_from_page_cache(folder: Path) -> None:
    """Drops a folder's files from the page cache, so that the next read starts at the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            sync(path)
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def timed(function: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turn(ways: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measures the seconds of each way, `repeats` times in alternating order, after one uncounted turn."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name in list(ways) if turn % 2 else list(ways)[::-1]:
            elapsed = ways[name]()
            print(f"{name:22s} turn {turn} {elapsed:8.3f} s", flush=True)
            if turn:
                seconds[name].append(elapsed)
    return seconds


def rows_of(
    verb: str, seconds: dict[str, list[float]], num_bytes: int, **case: TableValue
) -> list[dict[str, TableValue]]:
    plain, ours = seconds.values()
    ratios = compared(plain, ours)
    return [
        {
            "case": f"{verb}, {name}",
            "s": round(statistics.median(values), 3),
            "gb_per_s": round(num_bytes / 1e9 / statistics.median(values), 3),
            "ratio_to_plain": ratios["ratio_to_bare"] if values is ours else 1.0,
            "paired_ratio": ratios["paired_ratio"] if values is ours else 1.0,
            "paired_ratio_low_95": ratios["paired_ratio_low_95"] if values is ours else None,
            "paired_ratio_high_95": ratios["paired_ratio_high_95"] if values is ours else None,
            "gb": round(num_bytes / 1e9, 3),
            **case,
        }
        for name, values in seconds.items()
    ]


def checksum_rows(num_bytes: int) -> list[dict[str, TableValue]]:
    """Measures the speed of each checksum on one core, over bytes in memory."""
    data = os.urandom(num_bytes)
    rows: list[dict[str, TableValue]] = []
    for name, digest in CHECKSUMS.items():
        best = min(timed(partial(digest, data)) for _ in range(3))
        rows.append({"case": f"checksum, {name}", "s": round(best, 4), "gb_per_s": round(num_bytes / 1e9 / best, 2)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=QWEN2_1_5B["num_hidden_layers"])
    parser.add_argument("--vocab-size", type=int, default=QWEN2_1_5B["vocab_size"])
    parser.add_argument("--repeats", type=int, default=6, help="measurements of each way, in turn")
    parser.add_argument("--folder", type=Path, default=Path("build/integrity"), help="on the disk that is measured")
    parser.add_argument("--out", default="build/checkpoint_integrity.json")
    args = parser.parse_args()
    worker = one_rank_worker(policy(args.layers, args.vocab_size))
    folder = args.folder / "policy"

    def saving(save: Callable[[MegatronPolicyWorker, Path], None]) -> Callable[[], float]:
        def run() -> float:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            os.sync()
            return timed(lambda: save(worker, folder))

        return run

    def loading(read: Callable[[MegatronPolicyWorker, Path], None]) -> Callable[[], float]:
        def run() -> float:
            drop_from_page_cache(folder)
            return timed(lambda: read(worker, folder))

        return run

    case: dict[str, TableValue] = {"layers": args.layers, "vocab_size": args.vocab_size, "repeats": args.repeats}
    saved = in_turn({"plain": saving(save_plainly), "with checksums": saving(save_with_checksums)}, args.repeats)
    saving(save_with_checksums)()  # the last was a plain one, or was not
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    loaded = in_turn({"plain": loading(load_plainly), "with checksums": loading(load_with_checksums)}, args.repeats)
    rows = [
        *rows_of("save", saved, num_bytes, **case),
        *rows_of("load", loaded, num_bytes, **case),
        *checksum_rows(1 << 28),
    ]
    write_result(Path(args.out), rows)
    print_rows(rows)
    worker.shutdown()
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
