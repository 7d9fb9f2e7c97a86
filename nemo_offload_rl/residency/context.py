"""Provides what targets are made from: a model, an optimizer, a device, and the offloader's tools."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from nemo_offload_rl.memory.gpu_range import RangeMaker, make_range
from nemo_offload_rl.memory.link import measure_link
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.flat_buffer import FlatBuffer
from nemo_offload_rl.residency.metrics import Meter
from nemo_offload_rl.residency.residency import Residency
from nemo_offload_rl.residency.streamed.window import DEFAULT_WINDOW_BYTES
from nemo_offload_rl.residency.table import DEFAULT_TABLE, Phase, Placement, Table, Target
from nemo_offload_rl.residency.target import OffloadTarget
from nemo_offload_rl.residency.transfer import Mover


@dataclass(frozen=True)
class Options:
    """Holds the options of the offloader.

    Attributes:
        pinned_optimizer_state: whether to page-lock the host memory of optimizer state; False copies it through the
            staging ring, slowly, and page-locks only that ring.
        verify: whether to compare checksums of all data that leaves the GPU and comes back.
        with_reference: whether to keep a copy of the present weights, for `Offloader.reference`.
        stream_window_bytes: GPU memory that streamed optimizer state passes through.
        generator_bytes: free GPU memory that is enough for a generator in another process, in a refit and while it
            generates; None if it is not known (see `Residency`).
    """

    pinned_optimizer_state: bool = True
    verify: bool = False
    with_reference: bool = False
    stream_window_bytes: int = DEFAULT_WINDOW_BYTES
    generator_bytes: int | None = None


DEFAULT_OPTIONS = Options()


@dataclass(frozen=True)
class TargetContext:
    """Provides every target with what it is made from.

    A new context takes no memory: mover, meter and residency are made at their first use.

    Attributes:
        model: the model's chunks, each bare or in megatron-core's DistributedDataParallel.
        optimizer: megatron-core's, or one of torch's; None if nothing is trained.
        arena: provides the host memory.
        table: where each target lives in each phase.
        options: how the offloader works.
        ranges: makes the ranges.
        targets: the targets that have been made, in the order of `TARGETS`.
    """

    model: Sequence[torch.nn.Module]
    optimizer: Any | None
    arena: PinnedArena
    table: Table = field(default_factory=lambda: DEFAULT_TABLE)
    options: Options = DEFAULT_OPTIONS
    ranges: RangeMaker = make_range
    targets: dict[Target, OffloadTarget] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Returns the device that the model computes on."""
        return next(self.model[0].parameters()).device

    @property
    def mapped_bytes(self) -> int:
        """Returns the GPU memory that all ranges have mapped now, which torch's allocator does not count."""
        return sum(target.mapped_bytes for target in self.targets.values())

    @cached_property
    def mover(self) -> Mover:
        """Returns the mover, which copies between the GPU and the host."""
        return Mover(self.device, self.arena)

    @cached_property
    def meter(self) -> Meter:
        """Returns the meter of moves, which measures the link when it is made."""
        return Meter(
            self.device,
            pinned_bytes=lambda: self.arena.pinned_bytes,
            mapped_bytes=lambda: self.mapped_bytes,
            link=measure_link(self.device, self.arena),
        )

    @cached_property
    def residency(self) -> Residency:
        """Returns the residency, which moves the targets; all of them must have been made."""
        # During a refit, a generator loads its weights while targets are still being copied to the host.
        room = {Phase.REFIT: self.targets[Target.PARAMS].nbytes}
        return Residency(
            self.targets,
            self.table,
            meter=self.meter,
            room=room,
            generator_bytes=self.options.generator_bytes,
            check=self.mover.check,
        )

    def visits_host(self, target: Target) -> bool:
        """Returns whether the table has a target on the host in some phase."""
        return any(placements[target] is Placement.HOST for placements in self.table.values() if target in placements)

    @property
    def streams_optimizer_state(self) -> bool:
        """Returns whether the table has optimizer state streamed in the train phase."""
        return self.table[Phase.TRAIN].get(Target.OPTIMIZER_STATE) is Placement.STREAMED

    def flat_buffer(self, target: Target, *, with_host_side: bool, pin: bool = True) -> FlatBuffer:
        """Make an empty flat buffer for a target; `pin` is that of `PinnedArena.allocate`."""
        return FlatBuffer(target, self.device, self.arena if with_host_side else None, ranges=self.ranges, pin=pin)
