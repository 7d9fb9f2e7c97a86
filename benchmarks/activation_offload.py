"""What does activation offloading cost, and what does it save, for a dense model and a mixture of experts?

    export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0
    python benchmarks/activation_offload.py --only 'dense/attention*' --out docs/results/activation_offload.json

Without graphs the two ways are `plain` and `offloaded`: one worker, whose offloading is suspended in every other step.
With graphs they are `eager offloaded` and `graphs offloaded`: one worker, whose graphs are set aside in every other
step. `overhead_percent` compares the second way with the first by medians of single steps; `overhead_low_95` and
`overhead_high_95` are the bootstrap interval of worker_train.py. Peaks come from steps that are not timed.

`r` is the fall of torch's peak of allocated memory divided by the distinct bytes that should be offloaded at the peak:
of one micro-batch (one pipeline stage holds no more), all that the manager saw in the modules except what it kept on
purpose (`kept_mib`, such as the last group of each module). Bytes that one module offloads while another keeps them
alive count as "should be offloaded", so such a module has a low R. `r` is absent with graphs, whose pools torch does
not count as allocated.

Bytes are those of a step. `link_ms`, `forward_ms` and `offloaded_forward_ms`, up to the logits, are those of a
micro-batch. `bound_percent` is the overhead that no schedule can avoid. Rows are written after each size, in place of
older ones of the same case, size and way.
"""

import argparse
import contextlib
import fnmatch
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

# Transformer Engine reads it when imported.
os.environ.setdefault("NVTE_CPU_OFFLOAD_V1", "1")

import torch
from gpu_watch import GIB, GpuWatch
from measuring import random_rows
from megatron.core.models.gpt import GPTModel
from one_rank import one_rank_worker
from result_file import TableValue, print_rows, write_result
from worker_train import interval_95, ratio_of_medians

from nemo_offload_rl.activation_offload.manager import ActivationOffloader
from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.config import for_machine, load
from nemo_offload_rl.mcore.graphs.cuda_graphs import NoCudaGraphs
from nemo_offload_rl.memory.link import measure_link
from nemo_offload_rl.worker.environment import library_environment
from nemo_offload_rl.worker.worker import MegatronPolicyWorker

Row = dict[str, TableValue]

RECIPES = Path(__file__).parent / "activation_cases"
DETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
"""A variable of Transformer Engine's: with 0 it takes kernels whose results are the same in each run."""
MIB = 2**20
NUM_WARMUPS, NUM_STEPS = 3, 50
NUM_MICRO_BATCHES = {1: 4, 4: 2, 8: 2}
"""Of a step, by their size."""
ATTENTION = ("qkv_linear", "core_attn", "attn_proj")
_MEGATRON = "policy.megatron_cfg"
_SHOWN = ("part", "way", "micro_batch", "step_ms", "overhead_percent", "r", "peak_mib")
# A worker that enters no phase but training: no host memory is set aside for its state.
_STATE_STAYS = ("policy.offload_optimizer_for_refit=false", "policy.residency.table.generate.params=keep")
# Captured layers keep their host memory, and eager steps of the same worker need as much again.
_ROOM_FOR_BOTH = "policy.activation_offload.host_memory_limit_gib=24"


@dataclass(frozen=True)
class Case:
    """Describes one worker.

    Attributes:
        model: a recipe of activation_cases/.
        modules: offloaded.
        fraction: of them that is offloaded.
        graphs: parts of a layer that are captured.
        delay: delay_offload_until_cuda_graph.
        sizes: rows of a micro-batch, each measured.
    """

    model: str
    modules: tuple[str, ...]
    sizes: tuple[int, ...] = (1,)
    fraction: float = 1.0
    graphs: tuple[str, ...] = ()
    delay: bool = False

    def policy(self, largest: int) -> dict[str, Any]:
        """Returns the policy section of the recipe, for micro-batches of up to so many rows."""
        overrides = [
            f"{_MEGATRON}.fine_grained_activation_offloading=true",
            f"{_MEGATRON}.offload_modules=[{','.join(self.modules)}]",
            f"{_MEGATRON}.activation_offload_fraction={self.fraction}",
            f"{_MEGATRON}.delay_offload_until_cuda_graph={str(self.delay).lower()}",
            f"policy.train_micro_batch_size={largest}",
            *_STATE_STAYS,
        ]
        if self.graphs:
            overrides += [
                f"{_MEGATRON}.cuda_graph_impl=transformer_engine",
                f"{_MEGATRON}.cuda_graph_modules=[{','.join(self.graphs)}]",
                _ROOM_FOR_BOTH,
            ]
        config: Any = load(RECIPES / f"{self.model}.yaml", overrides).config
        config, _ = for_machine(config, has_gpus=torch.cuda.is_available())
        return dict(config["policy"])


CASES: Mapping[str, Case] = {
    "dense/qkv_linear": Case("dense", ("qkv_linear",), (4, 1, 8)),
    "dense/attention": Case("dense", ATTENTION, (4, 1, 8)),
    "dense/attention/fraction=0.75": Case("dense", ATTENTION, (4,), fraction=0.75),
    "dense/attention/fraction=0.7": Case("dense", ATTENTION, (4,), fraction=0.7),
    "dense/attention/fraction=0.65": Case("dense", ATTENTION, (4,), fraction=0.65),
    "dense/attention/fraction=0.5": Case("dense", ATTENTION, (4,), fraction=0.5),
    "dense/core_attn+attn_proj": Case("dense", ("core_attn", "attn_proj"), (4, 1, 8)),
    "dense/core_attn": Case("dense", ("core_attn",), (4,)),
    "dense/attention/graphs=attn": Case("dense", ATTENTION, (4, 1), graphs=("attn",)),
    "dense/attention/graphs=attn+mlp": Case("dense", ATTENTION, (4, 1), graphs=("attn", "mlp")),
    "moe/moe_act": Case("moe", ("moe_act",)),
    "moe/expert_fc1": Case("moe", ("expert_fc1",)),
    "moe/expert_fc1+moe_act": Case("moe", ("expert_fc1", "moe_act")),
    "moe/moe_act/graphs=attn+moe_router": Case("moe", ("moe_act",), graphs=("attn", "moe_router")),
    "moe/moe_act/graphs=attn+moe_router/delay": Case("moe", ("moe_act",), graphs=("attn", "moe_router"), delay=True),
}


def measure_case(case: Case) -> Iterator[dict[str, Row]]:
    """Yields the rows of each size, by way."""
    # Captured graphs have one shape, and their memory must not count in the next size's figures.
    for sizes in [(size,) for size in case.sizes] if case.graphs else [case.sizes]:
        section = case.policy(max(sizes))
        environment = dict(os.environ)
        os.environ |= library_environment(section["megatron_cfg"], refit_follows=False)  # read while layers are built
        release_memory()
        worker = one_rank_worker(section)
        try:
            for size in sizes:
                measurement = Measurement(case, worker, section, size)
                yield measurement.with_graphs() if case.graphs else measurement.without_graphs()
        finally:
            worker.shutdown()
            release_memory()
            os.environ.clear()
            os.environ.update(environment)


class Measurement:
    """Measures one size of micro-batches on one worker."""

    def __init__(self, case: Case, worker: MegatronPolicyWorker, section: dict[str, Any], size: int) -> None:
        self._case, self._worker, self._size = case, worker, size
        self._number = NUM_MICRO_BATCHES[size]
        length = section["max_total_sequence_length"]
        self._data = random_rows(self._number * size, length, section["hf_config"]["vocab_size"])
        self._data["token_mask"][:, : length // 8] = 0  # a prompt, which is not trained on

    def without_graphs(self) -> dict[str, Row]:
        """Measures plain steps and offloaded ones."""
        active = self._worker.activations.offloader
        assert active is not None, "every case offloads"

        def plain() -> None:
            with suspended(active):
                self._step()

        ways = {"plain": plain, "offloaded": self._step}
        seconds = in_turn(ways)
        peaks = {name: peaks_of(way) for name, way in ways.items()}  # offloaded last: its report is read below
        report = active.report
        total, num_passes = report.total(), report.num_micro_batches
        forward_s = forward_seconds(self._worker, plain)
        rows = {name: self._cells(seconds[name]) | peaks[name] for name in ways}
        rows["plain"] |= {"modules": "none"}
        rows["offloaded"] |= moved(active) | compared(seconds["plain"], seconds["offloaded"])
        rows["offloaded"] |= self._link(total.moved_bytes / num_passes, forward_s, median(seconds["plain"]))
        should_leave_mib = (total.distinct_bytes - total.resident_bytes) / num_passes / MIB
        fall = {name: int(str(peaks["plain"][name])) - int(str(peaks["offloaded"][name])) for name in peaks["plain"]}
        rows["offloaded"] |= {
            "offloaded_forward_ms": round(forward_seconds(self._worker, self._step) * 1e3, 3),
            "r": round(fall["allocated_peak_mib"] / should_leave_mib, 4) if should_leave_mib else None,
            "driver_saved_mib": fall["peak_mib"],
        }
        return rows

    def with_graphs(self) -> dict[str, Row]:
        """Measures eager steps and replayed ones, both offloaded; the graphs' pools are in the peaks of both."""
        for _ in range(self._worker.state.config.cuda_graph_warmup_steps + 1):
            self._step()
        if not self._worker.graphs.num_replays:
            raise RuntimeError("no graph was replayed after the warm-up")

        def eager() -> None:
            with eager_layers(self._worker):
                self._step()

        seconds = in_turn({"eager offloaded": eager, "graphs offloaded": self._step})
        peaks = peaks_of(self._step)
        rows = {name: self._cells(values) for name, values in seconds.items()}
        active = self._worker.activations.offloader
        assert active is not None, "every case offloads"
        rows["eager offloaded"] |= {"graphs": "none", "delay": False}
        rows["graphs offloaded"] |= peaks | moved(active) | compared(*seconds.values())
        rows["graphs offloaded"] |= {"num_graph_replays": int(self._worker.graphs.num_replays)}
        return rows

    def _step(self) -> None:
        self._worker.train(self._data, NLLLoss(), gbs=self._data.size, mbs=self._size)

    def _cells(self, seconds: list[float]) -> Row:
        return {
            "model": self._case.model,
            "modules": ", ".join(self._case.modules),
            "fraction": self._case.fraction,
            "graphs": ", ".join(self._case.graphs) or "none",
            "delay": self._case.delay,
            "micro_batch": self._size,
            "num_micro_batches": self._number,
            "step_ms": round(median(seconds) * 1e3, 3),
            "tokens_per_s": round(int(self._data["input_lengths"].sum()) / median(seconds)),
            "steps": len(seconds),
        }

    def _link(self, moved_bytes: float, forward_s: float, plain_step_s: float) -> Row:
        """Returns a micro-batch's time on the link; its copies run beside the forward pass up to the logits."""
        link = measure_link(self._worker.device, self._worker.offloader.context.arena)
        assert link is not None, "there is a GPU, and memory can be page-locked"
        link_s = moved_bytes / link.d2h_bytes_per_s
        bound = max(0.0, link_s - forward_s) * self._number / plain_step_s
        return {
            "link_ms": round(link_s * 1e3, 3),
            "forward_ms": round(forward_s * 1e3, 3),
            "link_gb_per_s": round(link.d2h_bytes_per_s / 1e9, 2),
            "bound_percent": round(bound * 100, 3),
        }


def moved(active: ActivationOffloader) -> Row:
    """Returns what the last step offloaded; see `activation_offload/report.py`."""
    total = active.report.total()
    names = {"moved": "moved", "distinct": "distinct", "kept": "resident", "refused": "refused", "late": "late"}
    return {f"{name}_mib": round(getattr(total, f"{of}_bytes") / MIB, 3) for name, of in names.items()}


def compared(base: list[float], ours: list[float]) -> Row:
    """Returns by how many percent the median of `ours` is above that of `base`."""
    low, high = interval_95(list(zip(base, ours, strict=True)), ratio_of_medians)
    return {
        "overhead_percent": round((median(ours) / median(base) - 1) * 100, 3),
        "overhead_low_95": round((low - 1) * 100, 3),
        "overhead_high_95": round((high - 1) * 100, 3),
    }


@contextlib.contextmanager
def suspended(active: ActivationOffloader) -> Iterator[None]:
    """Runs the passes in the block without offloading."""
    active.disable_offload()
    try:
        yield
    finally:
        active.enable_offload()


@contextlib.contextmanager
def eager_layers(worker: MegatronPolicyWorker) -> Iterator[None]:
    """Keeps captured graphs without replaying them."""
    graphs, worker.graphs = worker.graphs, NoCudaGraphs()
    try:
        yield
    finally:
        worker.graphs = graphs


def release_memory() -> None:
    """Empties torch's cache of GPU memory."""
    gc.collect()
    torch.cuda.empty_cache()


def in_turn(ways: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Returns the seconds of each way's steps, after warm-ups; each way goes first every other time."""
    for _ in range(NUM_WARMUPS):
        for way in ways.values():
            way()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.freeze()  # 800,000 objects of the model take 0.3 s in any way's step
    try:
        for step in range(NUM_STEPS):
            for name, way in list(ways.items())[:: 1 if step % 2 else -1]:
                torch.cuda.synchronize()
                start = time.perf_counter()
                way()
                torch.cuda.synchronize()
                taken[name].append(time.perf_counter() - start)
    finally:
        gc.unfreeze()
    return taken


def peaks_of(step: Callable[[], object]) -> Row:
    """Returns the peaks over two untimed steps, from an empty cache on; the driver is queried every 10 ms."""
    release_memory()
    torch.cuda.reset_peak_memory_stats()
    free, total = torch.cuda.mem_get_info()
    grown_gib: dict[str, float] = {}
    with GpuWatch() as watch, watch.peak("steps", grown_gib):
        step()
        step()
        torch.cuda.synchronize()
    return {
        "peak_mib": round((total - free + int(grown_gib["steps"] * GIB)) / MIB),
        "allocated_peak_mib": round(torch.cuda.max_memory_allocated() / MIB),
        "reserved_peak_mib": round(torch.cuda.max_memory_reserved() / MIB),
    }


def forward_seconds(worker: MegatronPolicyWorker, step: Callable[[], object]) -> float:
    """Returns the median GPU time from a micro-batch's start to its logits, over two steps.

    Copies have this much time: offloaded memory has to be free before the logits exist, or the peak is not lower.
    """
    begins: list[torch.cuda.Event] = []
    ends: list[torch.cuda.Event] = []

    def note(events: list[torch.cuda.Event]) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        events.append(event)

    [chunk] = worker.state.model
    [output_layer] = [module.output_layer for module in chunk.modules() if isinstance(module, GPTModel)]
    hooks = [
        chunk.register_forward_pre_hook(lambda *_: note(begins)),
        output_layer.register_forward_pre_hook(lambda *_: note(ends)),
    ]
    try:
        step()
        step()
    finally:
        for hook in hooks:
            hook.remove()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) / 1e3 for begin, end in zip(begins, ends, strict=True))


def main() -> None:
    """Measures the chosen cases, and writes each size's rows as soon as there are some."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="*", help="a pattern of case names, with * and ?")
    parser.add_argument("--out", type=Path, default=Path("build/activation_offload.json"), help="the result file")
    arguments = parser.parse_args()
    chosen = fnmatch.filter(CASES, arguments.only)
    if not chosen:
        parser.error(f"--only: no case is {arguments.only!r}; there are {', '.join(CASES)}")
    if not torch.cuda.is_available():
        parser.error("this needs a GPU")
    if os.environ.get(DETERMINISTIC) != "0":
        parser.error(f"set {DETERMINISTIC}=0, or two runs of the same kind would differ")
    for name in chosen:
        for ways in measure_case(CASES[name]):
            rows = [{"table": "cost", "part": name, "way": way, **row} for way, row in ways.items()]
            write_result(arguments.out, rows, append_by=("table", "part", "way", "micro_batch"))
            print_rows([{field: row.get(field) for field in _SHOWN} for row in rows])


if __name__ == "__main__":
    main()
