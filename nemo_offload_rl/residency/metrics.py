"""Measures every move: bytes, seconds, share of the link, exposed and hidden time, and memory."""

import dataclasses
import os
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil
import torch

from nemo_offload_rl.memory.link import LinkSpeed
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.metrics.memory import graph_pool_bytes
from nemo_offload_rl.residency.table import Phase, Placement, Target
from nemo_offload_rl.residency.target import Move

_MOST_RECORDS = 512
"""Records that are kept until they are taken; older ones are dropped."""


@dataclass(frozen=True)
class MemoryNow:
    """Holds the memory in use, in bytes; the GPU's values are None without one."""

    host_rss: int
    """Resident memory of this process, page-locked memory included."""
    host_pinned: int
    gpu_allocated: int | None = None
    """By torch's allocator; ranges not included."""
    gpu_reserved: int | None = None
    gpu_ranges: int | None = None
    """Mapped in ranges."""
    gpu_free: int | None = None
    """As the driver sees it."""
    gpu_total: int | None = None

    def left(self, target_bytes: Mapping[Target, int]) -> dict[str, float]:
        """Returns the GPU memory of each item in GiB, as `left_NAME_gib`; empty without a GPU.

        Args:
            target_bytes: bytes mapped in each target's ranges.
        """
        if self.gpu_reserved is None or self.gpu_allocated is None or self.gpu_free is None or self.gpu_total is None:
            return {}
        known = self.gpu_reserved + (self.gpu_ranges or 0)
        items = {
            **{str(target): nbytes for target, nbytes in target_bytes.items()},
            "tensors": self.gpu_allocated,
            "cache": self.gpu_reserved - self.gpu_allocated,
            "others": self.gpu_total - self.gpu_free - known,
        }
        return {f"left_{name}_gib": nbytes / GIB for name, nbytes in items.items()}

    def describe(self) -> str:
        """Describes the memory in use for an error message."""
        if self.gpu_free is None or self.gpu_total is None or self.gpu_reserved is None or self.gpu_ranges is None:
            return f"this process holds {self.host_rss / GIB:.2f} GiB of host memory"
        return (
            f"the GPU has {self.gpu_free / GIB:.2f} GiB free of {self.gpu_total / GIB:.2f}, this process holds "
            f"{(self.gpu_reserved + self.gpu_ranges) / GIB:.2f} of them and {self.host_rss / GIB:.2f} GiB of the host"
        )

    def as_gib(self) -> dict[str, float]:
        """Returns the known values in GiB, by name."""
        return {f"{name}_gib": value / GIB for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Started:
    """Describes a move that has begun: its phase, its target, its source and its goal."""

    phase: Phase
    target: Target
    source: Placement
    goal: Placement
    move: Move

    def finished(self, link: LinkSpeed | None) -> "MoveRecord":
        """Returns its measurements; waits for its copies."""
        move = self.move
        seconds = move.copy_seconds(), move.exposed_seconds()
        return MoveRecord(self.phase, self.target, self.source, self.goal, move.nbytes, *seconds, link)


@dataclass(frozen=True)
class MoveRecord:
    """Holds the measurements of a move."""

    phase: Phase
    target: Target
    source: Placement
    goal: Placement
    nbytes: int
    """Bytes that crossed the link."""
    copy_s: float
    """Seconds from the first byte on the link to the last."""
    exposed_s: float
    """Seconds that the caller, or its stream, waited."""
    link: LinkSpeed | None

    @property
    def hidden_s(self) -> float:
        """Returns the seconds of copying that overlapped with other work."""
        return max(0.0, self.copy_s - self.exposed_s)

    def plus(self, later: "MoveRecord") -> "MoveRecord":
        """Returns the sum of this record and a later one."""
        return dataclasses.replace(
            later,
            nbytes=self.nbytes + later.nbytes,
            copy_s=self.copy_s + later.copy_s,
            exposed_s=self.exposed_s + later.exposed_s,
        )

    def metrics(self) -> dict[str, float]:
        """Returns the metrics by name: seconds, and for copies also GB, GB/s and the share of the link."""
        values = {"exposed_s": self.exposed_s}
        if self.nbytes and self.copy_s > 0:
            speed = self.nbytes / self.copy_s
            values |= {
                "copy_s": self.copy_s,
                "hidden_s": self.hidden_s,
                "gb": self.nbytes / 1e9,
                "gb_per_s": speed / 1e9,
            }
            if self.link is not None:
                directions = {Placement.GPU: (0, 1), Placement.STREAMED: (1, 1)}.get(self.goal, (1, 0))
                out, back = directions
                limit = out * self.link.d2h_bytes_per_s + back * self.link.h2d_bytes_per_s
                values["share_of_link"] = speed / limit
        return values


class Meter:
    """Collects the measurements of moves until they are taken.

    Args:
        device: the device whose memory is measured.
        pinned_bytes: returns how many bytes are page-locked now.
        mapped_bytes: returns how many bytes of GPU memory ranges have mapped now.
        link: speed of the link; None where it was not measured.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        pinned_bytes: Callable[[], int] = lambda: 0,
        mapped_bytes: Callable[[], int] = lambda: 0,
        link: LinkSpeed | None = None,
    ) -> None:
        self._device = device
        self._pinned_bytes = pinned_bytes
        self._mapped_bytes = mapped_bytes
        self.link = link
        self._process = psutil.Process(os.getpid())
        self._started: deque[Started] = deque(maxlen=_MOST_RECORDS)
        self._transitions: defaultdict[str, float] = defaultdict(float)

    def memory(self) -> MemoryNow:
        """Returns the memory in use now."""
        rss, pinned = self._process.memory_info().rss, self._pinned_bytes()
        if self._device.type != "cuda":
            return MemoryNow(rss, pinned)
        free, total = torch.cuda.mem_get_info(self._device)
        return MemoryNow(
            rss,
            pinned,
            gpu_allocated=torch.cuda.memory_allocated(self._device),
            gpu_reserved=torch.cuda.memory_reserved(self._device),
            gpu_ranges=self._mapped_bytes(),
            gpu_free=free,
            gpu_total=total,
        )

    def give_back_cache(self) -> None:
        """Release torch's cached but unused memory to the driver; may wait for every stream."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def record_start(self, started: Started) -> None:
        """Record a move that has begun."""
        self._started.append(started)

    def forget(self, move: Move) -> None:
        """Remove a move that failed from the records."""
        self._keep([started for started in self._started if started.move is not move])

    def record_transition(
        self, phase: Phase, seconds: float, before: MemoryNow, target_bytes: Mapping[Target, int]
    ) -> None:
        """Record the time of an `enter`, which is added up by phase, and the memory before and after it.

        Args:
            phase: the phase that was entered.
            seconds: the time that `enter` took.
            before: memory at its beginning.
            target_bytes: GPU memory that is mapped for each target at its end.
        """
        self._transitions[f"{phase}/enter_s"] += seconds
        after = self.memory()
        for name, gib in after.left(target_bytes).items():
            self._transitions[f"{phase}/{name}"] = gib
        for when, memory in (("before", before), ("after", after)):
            for name, value in memory.as_gib().items():
                if not name.startswith(("gpu_total", "host_rss", "host_pinned")):
                    self._transitions[f"{phase}/{name.removesuffix('_gib')}_{when}_gib"] = value

    def _keep(self, started: list[Started]) -> None:
        self._started.clear()
        self._started.extend(started)

    def take_records(self) -> list[MoveRecord]:
        """Returns the moves that have ended since the last call. Waits for queued copies."""
        ended: list[Started] = []
        running: list[Started] = []
        for started in self._started:  # a move may end at any time, so each is asked once
            (ended if started.move.is_queued else running).append(started)
        self._keep(running)
        return [started.finished(self.link) for started in ended if not started.move.has_failed]

    def take_metrics(self) -> dict[str, float]:
        """Returns metrics by name: `PHASE/TARGET/...` of moves, `PHASE/...` of transitions, and the host memory now.

        Several moves of a target in one phase, such as the params' before and after a swap with the reference weights,
        are added up, and so are the seconds of several entries of a phase.
        """
        totals: dict[tuple[Phase, Target], MoveRecord] = {}
        for record in self.take_records():
            key = record.phase, record.target
            totals[key] = totals[key].plus(record) if key in totals else record
        values: dict[str, float] = {}
        for record in totals.values():
            for name, value in record.metrics().items():
                values[f"{record.phase}/{record.target}/{name}"] = value
        values |= self._transitions
        self._transitions.clear()
        now: Mapping[str, float] = self.memory().as_gib()
        values |= {name: now[name] for name in ("host_rss_gib", "host_pinned_gib")}
        if self._device.type == "cuda":
            values["gpu_graph_pools_gib"] = graph_pool_bytes() / GIB
        return values
