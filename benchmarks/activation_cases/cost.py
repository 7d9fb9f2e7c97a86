"""Measures table 3: what offloading costs and saves, for a dense model and a mixture of experts.

Without graphs the two ways are `plain` and `offloaded`: one worker, whose offloading is suspended in every other step.
With graphs they are `eager offloaded` and `graphs offloaded`: one worker, whose graphs are set aside in every other
step. `overhead_percent` compares the second way with the first by medians of single steps; `overhead_low_95` and
`overhead_high_95` are the bootstrap interval of worker_train.py. Peaks come from steps that are not timed.

`r` is the fall of torch's peak of allocated memory divided by the distinct bytes that should be offloaded at the peak:
of one micro-batch (one pipeline stage holds no more), all that the manager saw in the modules except what it kept on
purpose (`kept_mib`, such as the last group of each module). Bytes that one module offloads while another keeps them
alive count as "should be offloaded", so such a module has a low R. `r` is null with graphs, whose pools torch does not
count as allocated.

Bytes are those of a step. `link_ms`, `forward_ms` and `offloaded_forward_ms`, up to the logits, are those of a
micro-batch. `bound_percent` is `link_bound_percent` in figures.py; `bar_percent`, `forward_bar_ms` and `r_bar` are the
bars.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from worker_train import interval_95, ratio_of_medians

from activation_cases import figures
from activation_cases.combinations import ATTENTION, Combination
from activation_cases.measuring import forward_seconds, in_turn, peaks_of
from activation_cases.table import Row, Setting, as_list
from activation_cases.trial import num_replays
from activation_cases.worker import MIB, STATE_STAYS, Feed, Moved, moved_by, offloader, policy, running, suspended
from nemo_offload_rl.mcore.graphs.cuda_graphs import NoCudaGraphs
from nemo_offload_rl.memory.link import measure_link
from nemo_offload_rl.worker.worker import MegatronPolicyWorker

NUM_STEPS = 50
NUM_MICRO_BATCHES = {1: 4, 4: 2, 8: 2}
"""Of a step, by their size."""
# Captured layers keep their host memory, and eager steps of the same worker need as much again.
_ROOM_FOR_BOTH = "policy.activation_offload.host_memory_limit_gib=24"
_MODULES_WITH_BARS = (("qkv_linear",), ATTENTION, ("moe_act",))


@dataclass(frozen=True)
class Case:
    """Describes one worker.

    Attributes:
        settings: its recipe and what is on.
        sizes: rows of a micro-batch, each measured.
    """

    settings: Combination
    sizes: tuple[int, ...] = (1,)

    @property
    def is_moe(self) -> bool:
        """Returns whether the model has experts."""
        return self.settings.model == "moe"


CASES: Mapping[str, Case] = {
    "dense/qkv_linear": Case(Combination("dense", ("qkv_linear",)), (4, 1, 8)),
    "dense/attention": Case(Combination("dense", ATTENTION), (4, 1, 8)),
    "dense/attention/fraction=0.75": Case(Combination("dense", ATTENTION, fraction=0.75), (4,)),
    "dense/attention/fraction=0.7": Case(Combination("dense", ATTENTION, fraction=0.7), (4,)),
    "dense/attention/fraction=0.65": Case(Combination("dense", ATTENTION, fraction=0.65), (4,)),
    "dense/attention/fraction=0.5": Case(Combination("dense", ATTENTION, fraction=0.5), (4,)),
    "dense/core_attn+attn_proj": Case(Combination("dense", ("core_attn", "attn_proj")), (4, 1, 8)),
    "dense/core_attn": Case(Combination("dense", ("core_attn",)), (4,)),
    "dense/attention/graphs=attn": Case(Combination("dense", ATTENTION, graphs=("attn",)), (4, 1)),
    "dense/attention/graphs=attn+mlp": Case(Combination("dense", ATTENTION, graphs=("attn", "mlp")), (4, 1)),
    "moe/moe_act": Case(Combination("moe", ("moe_act",))),
    "moe/expert_fc1": Case(Combination("moe", ("expert_fc1",))),
    "moe/expert_fc1+moe_act": Case(Combination("moe", ("expert_fc1", "moe_act"))),
    "moe/moe_act/graphs=attn+moe_router": Case(Combination("moe", ("moe_act",), graphs=("attn", "moe_router"))),
    "moe/moe_act/graphs=attn+moe_router/delay": Case(
        Combination("moe", ("moe_act",), graphs=("attn", "moe_router"), delay=True)
    ),
}


def parts(setting: Setting) -> Mapping[str, Callable[[], None]]:
    """Returns one part for each worker; --micro-batches chooses among its sizes."""
    return {name: functools.partial(_measure_case, setting, name, case) for name, case in CASES.items()}


def _measure_case(setting: Setting, part: str, case: Case) -> None:
    sizes = [size for size in case.sizes if not setting.micro_batches or size in setting.micro_batches]
    # Captured graphs have one shape, and their memory must not count in the next size's figures.
    workers = [[size] for size in sizes] if case.settings.graphs else [sizes] if sizes else []
    for of_worker in workers:
        largest = f"policy.train_micro_batch_size={max(of_worker)}"
        room = [_ROOM_FOR_BOTH] if case.settings.graphs else []
        section = policy(case.settings.model, [*case.settings.overrides(), *STATE_STAYS, *room, largest])
        with running(section) as worker:
            for size in of_worker:
                measurement = _Measurement(setting, part, case, worker, section, size)
                measurement.with_graphs() if case.settings.graphs else measurement.without_graphs()


class _Measurement:
    """Measures one size of micro-batches on one worker."""

    def __init__(
        self, setting: Setting, part: str, case: Case, worker: MegatronPolicyWorker, section: dict[str, Any], size: int
    ) -> None:
        self._setting, self._part, self._case, self._worker, self._size = setting, part, case, worker, size
        self._number = NUM_MICRO_BATCHES[size]
        self._feed = Feed(worker, section, str(self._number), size, full=True)
        self._data = self._feed.batch(0)
        self._num_steps = setting.num_steps(NUM_STEPS)
        self._num_tokens = int(self._data["input_lengths"].sum())
        self._has_bar = case.settings.modules in _MODULES_WITH_BARS

    def without_graphs(self) -> None:
        """Measures plain steps and offloaded ones."""
        active = offloader(self._worker)
        assert active is not None, f"{self._part} offloads"

        def plain() -> None:
            with suspended(active):
                self._step()

        ways = {"plain": plain, "offloaded": self._step}
        seconds = in_turn(ways, self._num_steps)
        peaks = {name: peaks_of(way) for name, way in ways.items()}  # offloaded last: its report is read below
        moved = moved_by(self._worker)
        forward_s = forward_seconds(self._worker, plain)
        rows = {name: self._cells(seconds[name]) | peaks[name].cells() for name in ways}
        rows["offloaded"] |= moved.cells() | self._compared(seconds["plain"], seconds["offloaded"])
        rows["offloaded"] |= self._link(moved, forward_s, median(seconds["plain"]))
        rows["offloaded"] |= {"offloaded_forward_ms": round(forward_seconds(self._worker, self._step) * 1e3, 3)}
        share = figures.recovered_share(
            peaks["plain"].allocated, peaks["offloaded"].allocated, moved.should_leave / moved.num_micro_batches
        )
        has_bar = self._has_bar and not self._case.is_moe and self._size == 4
        rows["offloaded"] |= {
            "r": None if share is None else round(share, 4),
            "r_bar": figures.R_BAR if has_bar else None,
            "driver_saved_mib": round((peaks["plain"].driver - peaks["offloaded"].driver) / MIB),
        }
        rows["plain"] |= {"modules": "none"}
        self._add(rows)

    def with_graphs(self) -> None:
        """Measures eager steps and replayed ones, both offloaded; the graphs' pools are in the peaks of both."""
        self._capture()

        def eager() -> None:
            with _eager(self._worker):
                self._step()

        seconds = in_turn({"eager offloaded": eager, "graphs offloaded": self._step}, self._num_steps)
        peaks = peaks_of(self._step)
        rows = {name: self._cells(values) for name, values in seconds.items()}
        rows["graphs offloaded"] |= peaks.cells() | moved_by(self._worker).cells()
        rows["graphs offloaded"] |= self._compared(*seconds.values())
        graphs = as_list(self._case.settings.graphs)
        rows["graphs offloaded"] |= {
            "num_graph_replays": num_replays(self._worker),
            "bar_percent": figures.GRAPH_BARS_PERCENT[graphs],
        }
        rows["eager offloaded"] |= {"graphs": "none", "delay": False}
        self._add(rows)

    def _capture(self) -> None:
        for _ in range(self._worker.state.config.cuda_graph_warmup_steps + 1):
            self._step()
        if not num_replays(self._worker):
            raise RuntimeError(f"{self._part}: no graph was replayed after the warm-up")

    def _step(self) -> None:
        self._feed.train(self._data)

    def _cells(self, seconds: list[float]) -> Row:
        settings = self._case.settings
        return {
            "model": settings.model,
            "modules": as_list(settings.modules),
            "fraction": settings.fraction,
            "graphs": as_list(settings.graphs),
            "delay": settings.delay,
            "micro_batch": self._size,
            "num_micro_batches": self._number,
            "parallel": settings.parallel,
            "step_ms": round(median(seconds) * 1e3, 3),
            "tokens_per_s": round(self._num_tokens / median(seconds)),
            "steps": len(seconds),
        }

    def _compared(self, base: list[float], ours: list[float]) -> Row:
        low, high = interval_95(list(zip(base, ours, strict=True)), ratio_of_medians)
        return {
            "overhead_percent": round(figures.overhead_percent(base, ours), 3),
            "overhead_low_95": round((low - 1) * 100, 3),
            "overhead_high_95": round((high - 1) * 100, 3),
        }

    def _link(self, moved: Moved, forward_s: float, plain_step_s: float) -> Row:
        link = measure_link(self._worker.device, self._worker.offloader.context.arena)
        assert link is not None, "there is a GPU, and memory can be page-locked"
        of_micro_batch = moved.moved / moved.num_micro_batches
        bound = figures.link_bound_percent(
            of_micro_batch, link.d2h_bytes_per_s, forward_s, num_micro_batches=self._number, plain_step_s=plain_step_s
        )
        link_ms, forward_ms = of_micro_batch / link.d2h_bytes_per_s * 1e3, forward_s * 1e3
        bar = forward_bar = None
        if self._has_bar:
            is_moe, size = self._case.is_moe, self._size
            bar = figures.overhead_bar_percent(is_moe=is_moe, micro_batch=size, bound_percent=bound)
            forward_bar = figures.forward_bar_ms(
                is_moe=is_moe, micro_batch=size, link_ms=link_ms, forward_ms=forward_ms
            )
        return {
            "link_ms": round(link_ms, 3),
            "forward_ms": round(forward_ms, 3),
            "forward_bar_ms": None if forward_bar is None else round(forward_bar, 3),
            "link_gb_per_s": round(link.d2h_bytes_per_s / 1e9, 2),
            "bound_percent": round(bound, 3),
            "bar_percent": None if bar is None else round(bar, 3),
        }

    def _add(self, rows: Mapping[str, Row]) -> None:
        for way, row in rows.items():
            self._setting.file.add("cost", self._part, way, row)


@contextlib.contextmanager
def _eager(worker: MegatronPolicyWorker) -> Iterator[None]:
    """Keeps captured graphs without replaying them."""
    graphs, worker.graphs = worker.graphs, NoCudaGraphs()
    try:
        yield
    finally:
        worker.graphs = graphs
