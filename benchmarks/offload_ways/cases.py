"""Defines what is moved: tensors of an optimizer's sizes, a real optimizer's state, ten thousand small tensors."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from offload_ways import memory_saver
from offload_ways.real_optimizer import real_optimizer
from offload_ways.report import Report
from offload_ways.trips import Way, release_unused, round_trips
from offload_ways.ways import Ours, OursForOptimizer, Pageable, TorchPinned, link_seconds_per_byte

NO_GPU = "this machine has no GPU"


@dataclass
class Setting:
    """Holds what every case is given.

    Attributes:
        device: the GPU, or the CPU.
        scale: of the sizes; 1 for what the bars speak of.
        report: takes rows.
        saver_jobs: what torch_memory_saver is to move, once all cases have said so.
    """

    device: torch.device
    scale: float
    report: Report
    saver_jobs: list[memory_saver.Job] = field(default_factory=list)

    @property
    def has_gpu(self) -> bool:
        """Returns whether there is a link."""
        return self.device.type == "cuda"

    def random_tensors(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Creates fp32 tensors with the given numbers of elements."""
        return [torch.rand(size, device=self.device) for size in sizes]


@dataclass(frozen=True)
class Rounds:
    """Says how often the ways of a case are measured, and how often they run before that."""

    quick: int
    slow: int
    slow_warmups: int


def moments_sizes(scale: float) -> list[int]:
    """Returns the fp32 elements of two moments of 99 parameters: 198 tensors, 6.2 GB."""
    hidden, ffn, vocab = 1536, 7168, 151936
    layer = [hidden * 2048, 2048, hidden * hidden, hidden, hidden, 2 * hidden * ffn, hidden * ffn]
    return [max(1, round(size * scale)) for size in 2 * [vocab * hidden, *(14 * layer)]]


def small_sizes(scale: float) -> list[int]:
    """Returns the fp32 elements of 10,000 tensors of 100 to 300 KB each: 2 GB."""
    return [max(1, round((25_000 + number * 7919 % 50_001) * scale)) for number in range(10_000)]


def link(setting: Setting) -> None:
    """Measures the link's limit, at the beginning and at the end of a run."""
    if not setting.has_gpu:
        setting.report.leave_out("link", "link", NO_GPU)
        return
    setting.report.add_link(link_seconds_per_byte(setting.device, samples=5))
    release_unused(setting.device)


def tensors_198(setting: Setting) -> None:
    """Moves 6.2 GB in 198 tensors."""
    _tensors(setting, "tensors_198", moments_sizes(setting.scale), Rounds(quick=7, slow=3, slow_warmups=0))


def tensors_10000(setting: Setting) -> None:
    """Moves 2 GB in 10,000 tensors."""
    _tensors(setting, "tensors_10000", small_sizes(setting.scale), Rounds(quick=7, slow=3, slow_warmups=0))


def optimizer_state(setting: Setting) -> None:
    """Moves the state of a real DistributedOptimizer, 18 GB with its masters."""
    from nemo_offload_rl.residency.optimizer_state import state_tensors

    case, rounds = "optimizer_state", Rounds(quick=5, slow=1, slow_warmups=0)
    with setting.report.attempt(case, "all ways"), real_optimizer(setting.scale) as (model, optimizer):
        shared = {p.untyped_storage().data_ptr() for chunk in model for p in chunk.parameters()}
        tensors = [
            tensor
            for _, tensor in state_tensors(optimizer, setting.device)
            if tensor.untyped_storage().data_ptr() not in shared
        ]
        setting.saver_jobs += _saver_jobs(case, [tensor.nbytes // 4 for tensor in tensors], rounds)

        def ours(tensors: Sequence[torch.Tensor], device: torch.device) -> Way:
            return OursForOptimizer(optimizer, model, tensors, device)

        for name, make in _ways(ours).items():
            with setting.report.attempt(case, name):
                _measure(setting, case, name, make, tensors, rounds)
            release_unused(setting.device)


def torch_memory_saver(setting: Setting) -> None:
    """Runs what the other cases requested of torch_memory_saver, in a process for each way to run it."""
    for way in memory_saver.WAYS:
        jobs = [job for job in setting.saver_jobs if job.way == way]
        cases = ", ".join(job.case for job in jobs)
        if not setting.has_gpu:
            setting.report.leave_out(cases, way, NO_GPU)
            continue
        with setting.report.attempt(cases, way):
            trips = memory_saver.run(way, jobs)
            for job in jobs:
                setting.report.add_trips(job.case, way, 4 * sum(job.sizes), trips[job.case], has_driver=True)


def _saver_jobs(case: str, sizes: Sequence[int], rounds: Rounds) -> list[memory_saver.Job]:
    return [
        memory_saver.Job(case, "torch_memory_saver", sizes, rounds.slow, rounds.slow_warmups),
        memory_saver.Job(case, "torch_memory_saver_retained", sizes, rounds.quick, 1),
    ]


def _ways(ours: Callable[..., Way]) -> Mapping[str, Callable[..., Way]]:
    # torch_pinned first: `release_unused` gives back the block that it may find cached. Ours last: it keeps tensors.
    return {TorchPinned.name: TorchPinned, Pageable.name: Pageable, Ours.name: ours}


def _tensors(setting: Setting, case: str, sizes: Sequence[int], rounds: Rounds) -> None:
    setting.saver_jobs += _saver_jobs(case, sizes, rounds)
    for name, make in _ways(Ours).items():
        with setting.report.attempt(case, name):
            _measure(setting, case, name, make, setting.random_tensors(sizes), rounds)
        release_unused(setting.device)


def _measure(
    setting: Setting, case: str, name: str, make: Callable[..., Way], tensors: list[torch.Tensor], rounds: Rounds
) -> None:
    if name == TorchPinned.name and not setting.has_gpu:
        setting.report.leave_out(case, name, NO_GPU)
        return
    slow = name == Pageable.name
    times = (rounds.slow, rounds.slow_warmups) if slow else (rounds.quick, 1)
    with contextlib.closing(make(tensors, setting.device)) as way:
        trips = round_trips(way, tensors, setting.device, rounds=times[0], warmups=times[1])
        setting.report.add_trips(case, name, way.nbytes, trips, setting.has_gpu)
