"""How close to the link's limit does optimizer state move off the GPU and back?

    python benchmarks/optimizer_offload.py --out docs/results/optimizer_offload.json
    python benchmarks/optimizer_offload.py --scale 0.01

A row is the median of round trips in which memory is really given back and taken again: the way out ends when the
driver has the memory, the way back when the GPU may read the data. `released` is the rise of the driver's free memory
over the bytes that left. The link's limit is that of page-locked blocks of 1 GiB, measured before and after. Without a
GPU, at a scale such as 0.01, tensors move between two places in host memory, and no link is measured.
"""

import argparse
import contextlib
import gc
import io
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from model_shapes import QWEN2_1_5B
from ports import free_port
from result_file import TableValue, print_rows, write_result

from nemo_offload_rl.config import for_machine, load
from nemo_offload_rl.mcore import distributed
from nemo_offload_rl.mcore.model import model_config
from nemo_offload_rl.mcore.optimizer.init_optimizer_state import init_optimizer_state
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.flat_buffer import BufferEntry, FlatBuffer, FlatBufferTarget
from nemo_offload_rl.residency.optimizer_state import OptimizerState, state_tensors
from nemo_offload_rl.residency.table import Placement
from nemo_offload_rl.residency.transfer import Mover

Row = dict[str, TableValue]

RECIPE = "examples/configs/grpo_math_1B_megatron.yaml"
OVERRIDES = [
    "policy.max_total_sequence_length=512",
    "policy.sequence_packing.enabled=false",
    "policy.megatron_cfg.optimizer.use_precision_aware_optimizer=false",  # fp32 masters: 12 bytes a parameter
]
LINK_BLOCK_BYTES = 2**30
NUM_TRIPS = 7


class Moved:
    """Has tensors in a range of the engine, which move as one."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self.arena = PinnedArena()
        self.mover = Mover(device, self.arena)
        self.flat_buffer = FlatBuffer("benchmark", device, self.arena)
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        self._housed = self._house(tensors)
        settle(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # where the tensors lived before

    def _house(self, tensors: Sequence[torch.Tensor]) -> FlatBufferTarget:
        entries = [
            BufferEntry(str(number), tensor.untyped_storage(), [tensor]) for number, tensor in enumerate(tensors)
        ]
        self.flat_buffer.add(entries)
        return FlatBufferTarget(self.flat_buffer, self.mover)

    def leave(self) -> None:
        """Moves tensors to the host; returns when the device's memory has been given back."""
        self._housed.start(Placement.HOST).wait()

    def come_back(self) -> None:
        """Moves tensors to the device; work queued on the current stream afterwards finds everything in place."""
        self._housed.start(Placement.GPU).wait_on_current_stream()

    def close(self) -> None:
        """Frees everything."""
        self.mover.close()
        self.flat_buffer.close()
        self.arena.close()


class MovedOptimizer(Moved):
    """Uses the engine's optimizer-state target, which looks for new state in every `leave`."""

    def __init__(
        self, optimizer: Any, model: Iterable[torch.nn.Module], tensors: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        self._optimizer = optimizer
        shared = {p.untyped_storage().data_ptr() for chunk in model for p in chunk.parameters()}
        self._shared = lambda: shared
        super().__init__(tensors, device)

    def _house(self, tensors: Sequence[torch.Tensor]) -> FlatBufferTarget:
        return OptimizerState(self._optimizer, self._shared, self.flat_buffer, self.mover)


def link_seconds_per_byte(device: torch.device, *, samples: int, copies: int = 4) -> dict[str, list[float]]:
    """Measures the link's limit: pinned blocks of 1 GiB, one direction at a time.

    Returns:
        Samples of seconds a byte, by direction (d2h, h2d).
    """
    there = torch.randint(0, 256, (LINK_BLOCK_BYTES,), dtype=torch.uint8, device=device)
    here = torch.empty(LINK_BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
    found: dict[str, list[float]] = {"d2h": [], "h2d": []}
    for number in range(samples + 1):
        for direction, (destination, source) in {"d2h": (here, there), "h2d": (there, here)}.items():
            settle(device)
            start = time.perf_counter()
            for _ in range(copies):
                destination.copy_(source, non_blocking=True)
            settle(device)
            if number:  # the first warms up
                found[direction].append((time.perf_counter() - start) / (copies * LINK_BLOCK_BYTES))
    return found


@dataclass(frozen=True)
class Trip:
    """Holds the figures of a round trip."""

    out_s: float
    back_s: float
    released_bytes: int
    """By which the driver's free memory rose; 0 without a GPU."""


def settle(device: torch.device) -> None:
    """Waits until nothing runs."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def driver_free(device: torch.device) -> int:
    """Returns the free memory by cudaMemGetInfo; 0 without a GPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def release_unused(device: torch.device) -> None:
    """Empties the caches of torch's allocators, on the device and on the host."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()


def seconds(action: Callable[[], None], wait: Callable[[], None]) -> float:
    """Returns the wall time from an idle device until an action's work is done."""
    wait()
    start = time.perf_counter()
    action()
    wait()
    return time.perf_counter() - start


def round_trip(way: Moved, device: torch.device) -> Trip:
    """Moves out and back, each timed by itself."""

    def wait() -> None:
        settle(device)

    before = driver_free(device)
    out_s = seconds(way.leave, wait)
    released = driver_free(device) - before
    return Trip(out_s, seconds(way.come_back, wait), released)


def round_trips(way: Moved, tensors: Sequence[torch.Tensor], device: torch.device) -> list[Trip]:
    """Makes several round trips, and compares the contents at the end.

    Raises:
        RuntimeError: something came back changed.
    """
    before = checksum(tensors)
    release_unused(device)  # so that nothing but the tensors is given back
    trips = [round_trip(way, device) for _ in range(NUM_TRIPS + 1)][1:]
    if not torch.equal(before, checksum(tensors)):
        raise RuntimeError("tensors came back changed")
    return trips


@torch.no_grad()
def checksum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns int64 [number of tensors]: sums, modulo 2**64, of the 8-byte words and of the remaining bytes."""
    return torch.stack([_checksum(tensor.detach().reshape(-1).view(torch.uint8)) for tensor in tensors])


def _checksum(flat: torch.Tensor) -> torch.Tensor:
    whole = flat.numel() // 8 * 8  # int64 is summed without a copy to another type
    return flat[:whole].view(torch.int64).sum() + flat[whole:].sum()


def moments_sizes(scale: float) -> list[int]:
    """Returns the fp32 elements of two moments of 99 parameters: 198 tensors, 6.2 GB."""
    hidden, ffn, vocab = 1536, 7168, 151936
    layer = [hidden * 2048, 2048, hidden * hidden, hidden, hidden, 2 * hidden * ffn, hidden * ffn]
    return [max(1, round(size * scale)) for size in 2 * [vocab * hidden, *(14 * layer)]]


def small_sizes(scale: float) -> list[int]:
    """Returns the fp32 elements of 10,000 tensors of 100 to 300 KB each: 2 GB."""
    return [max(1, round((25_000 + number * 7919 % 50_001) * scale)) for number in range(10_000)]


def model_sizes(scale: float) -> dict[str, Any]:
    """Returns the model's sizes; below a scale of 1, fewer layers and a smaller vocabulary of a far narrower model."""
    sizes = dict(QWEN2_1_5B)
    if scale < 1:
        sizes |= {
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": max(1, round(28 * scale)),
            "vocab_size": max(512, round(151936 * scale)),
        }
    return sizes


@contextlib.contextmanager
def real_optimizer(scale: float) -> Iterator[tuple[list[torch.nn.Module], Any]]:
    """Builds model and optimizer in process groups of one rank; their state has random values."""
    config = load(RECIPE, OVERRIDES).config
    config, _ = for_machine(config, has_gpus=torch.cuda.is_available())
    policy = dict(config["policy"]) | {"hf_config": model_sizes(scale)}
    distributed.initialize(
        model_config.parallel_sizes(policy["megatron_cfg"]),
        rank=0,
        world_size=1,
        local_rank=0,
        master_addr="localhost",
        master_port=free_port(),
        seed=0,
        te_rng_tracker=False,
    )
    torch.manual_seed(0)  # megatron-core creates routers with the CPU's generator, other weights with the ranks' own
    try:
        yield _build(policy)
    finally:
        distributed.destroy()


def _build(policy: Any) -> tuple[list[torch.nn.Module], Any]:
    from megatron.core.optimizer import get_megatron_optimizer

    provider = model_config.make_provider(policy, model_config.make_bridge(policy, model_config.hf_config(policy)))
    with contextlib.redirect_stdout(io.StringIO()):  # Megatron-Bridge prints the parameter count
        model = provider.provide_distributed_model(
            ddp_config=model_config.make_ddp_config(policy),
            overlap_param_gather_with_optimizer_step=False,
            use_cpu_initialization=provider.use_cpu_initialization,
        )
    optimizer = get_megatron_optimizer(model_config.make_optimizer_config(policy), model, use_gloo_process_groups=False)
    init_optimizer_state(optimizer)
    device = next(model[0].parameters()).device
    with torch.no_grad():
        for name, tensor in state_tensors(optimizer, device):
            if not name.startswith("master") and tensor.is_floating_point():
                tensor.uniform_(0.0, 1.0)
    return model, optimizer


def tensors_of(sizes: Sequence[int], device: torch.device) -> list[Row]:
    """Moves random fp32 tensors with the given numbers of elements."""
    tensors = [torch.rand(size, device=device) for size in sizes]
    return rows_of(lambda: Moved(tensors, device), tensors, device)


def optimizer_state(scale: float, device: torch.device) -> list[Row]:
    """Moves the state of a real DistributedOptimizer, 18 GB with its masters."""
    with real_optimizer(scale) as (model, optimizer):
        shared = {p.untyped_storage().data_ptr() for chunk in model for p in chunk.parameters()}
        tensors = [
            tensor
            for _, tensor in state_tensors(optimizer, device)
            if tensor.untyped_storage().data_ptr() not in shared
        ]
        return rows_of(lambda: MovedOptimizer(optimizer, model, tensors, device), tensors, device)


def rows_of(make: Callable[[], Moved], tensors: Sequence[torch.Tensor], device: torch.device) -> list[Row]:
    """Returns the medians of round trips, a row for each direction."""
    with contextlib.closing(make()) as way:
        trips = round_trips(way, tensors, device)
    released = min(trip.released_bytes for trip in trips) / way.nbytes
    rows: list[Row] = []
    for direction, taken in (("d2h", [trip.out_s for trip in trips]), ("h2d", [trip.back_s for trip in trips])):
        row: Row = {
            "direction": direction,
            "gb_per_s": round(way.nbytes / statistics.median(taken) / 1e9, 3),
            "worst_gb_per_s": round(way.nbytes / max(taken) / 1e9, 3),
            "seconds": round(statistics.median(taken), 5),
            "gb": round(way.nbytes / 1e9, 4),
            "rounds": len(taken),
        }
        rows.append(row | ({"released": round(released, 4)} if device.type == "cuda" else {}))
    return rows


def main() -> None:
    """Measures the link, every case, and the link again."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="scale of the sizes")
    parser.add_argument("--out", type=Path, default=Path("build/optimizer_offload.json"), help="the result file")
    arguments = parser.parse_args()
    scale = arguments.scale
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    cases: dict[str, Callable[[], list[Row]]] = {
        "tensors_198": lambda: tensors_of(moments_sizes(scale), device),
        "tensors_10000": lambda: tensors_of(small_sizes(scale), device),
        "optimizer_state": lambda: optimizer_state(scale, device),
    }
    link: dict[str, list[float]] = {"d2h": [], "h2d": []}

    def measure_link() -> None:
        if device.type == "cuda":
            for direction, samples in link_seconds_per_byte(device, samples=5).items():
                link[direction] += samples
            release_unused(device)

    measure_link()
    rows: list[Row] = []
    for name, measure in cases.items():
        rows += [{"case": name, "way": "ours", **row} for row in measure()]
        release_unused(device)
    measure_link()
    limits = {direction: 1 / statistics.median(samples) / 1e9 for direction, samples in link.items() if samples}
    for row in rows:
        if str(row["direction"]) in limits:
            row["share_of_link"] = round(float(str(row["gb_per_s"])) / limits[str(row["direction"])], 4)
    links: list[Row] = [
        {"case": "link", "way": "link", "direction": name, "gb_per_s": round(limit, 3)}
        for name, limit in limits.items()
    ]
    rows = [*links, *rows]
    write_result(arguments.out, rows)
    print_rows(rows)


if __name__ == "__main__":
    main()
