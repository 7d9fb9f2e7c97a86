"""Describes what targets are made of: a model, an optimizer, devices, and the engine's tools."""

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
    """Holds the options of the engine.

    Attributes:
        pinned_optimizer_state: page-lock the host memory of optimizer state; False copies it through the staging
            ring, slowly, and locks no more than that.
        verify: compare checksums of everything that leaves and comes back.
        with_reference: keep a copy of the weights as they are, for `Engine.reference`.
        stream_window_bytes: GPU memory that streamed optimizer state passes through.
        generator_bytes: free GPU memory with which a generator in another process runs short of nothing in a refit and
            while it generates; None where that is not known (see `Residency`).
    """

    pinned_optimizer_state: bool = True
    verify: bool = False
    with_reference: bool = False
    stream_window_bytes: int = DEFAULT_WINDOW_BYTES
    generator_bytes: int | None = None


DEFAULT_OPTIONS = Options()


@dataclass(frozen=True)
class TargetContext:
    """Gives every target what it is made from.

    Making one takes no memory: mover, meter and residency are made when they are first asked for.

    Attributes:
        model: the chunks, each bare or in megatron-core's DistributedDataParallel.
        optimizer: megatron-core's, or one of torch's; None if nothing is trained.
        arena: gives the host memory.
        table: where each target lives in each phase.
        options: how the engine works.
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
        """Returns the GPU memory of all ranges now, which torch's allocator does not count."""
        return sum(target.mapped_bytes for target in self.targets.values())

    @cached_property
    def mover(self) -> Mover:
        """Copies between the GPU and the host."""
        return Mover(self.device, self.arena)

    @cached_property
    def meter(self) -> Meter:
        """Takes the measurements, and measures the link when it is made."""
        return Meter(
            self.device,
            pinned_bytes=lambda: self.arena.pinned_bytes,
            mapped_bytes=lambda: self.mapped_bytes,
            link=measure_link(self.device, self.arena),
        )

    @cached_property
    def residency(self) -> Residency:
        """Moves the targets; to be asked for when all of them are made."""
        # A generator loads its weights during a refit, beside what is still being copied to the host.
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
        """Whether the table has a target on the host in some phase."""
        return any(placements[target] is Placement.HOST for placements in self.table.values() if target in placements)

    @property
    def streams_optimizer_state(self) -> bool:
        """Whether the table has optimizer state streamed while the model is trained."""
        return self.table[Phase.TRAIN].get(Target.OPTIMIZER_STATE) is Placement.STREAMED

    def flat_buffer(self, target: Target, *, with_host_side: bool, pin: bool = True) -> FlatBuffer:
        """Make an empty flat buffer for a target; `pin` as `PinnedArena.allocate` takes it."""
        return FlatBuffer(target, self.device, self.arena if with_host_side else None, ranges=self.ranges, pin=pin)
