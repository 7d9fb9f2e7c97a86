"""What targets are made of: a model and an optimizer, where they are, and what the engine works with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_offload_rl.memory.gpu_range import RangeMaker
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.flat_buffer import FlatBuffer
from nemo_offload_rl.residency.metrics import Meter
from nemo_offload_rl.residency.table import Placement, Table, Target
from nemo_offload_rl.residency.transfer import Mover


@dataclass(frozen=True)
class Options:
    """How the engine works.

    Attributes:
        pinned_optimizer_state: move optimizer state as ranges through the arena; False moves tensor by tensor through
            pageable memory, slowly.
        verify: compare checksums of everything that leaves and comes back.
        with_reference: keep the weights of now for `Engine.reference`.
    """

    pinned_optimizer_state: bool = True
    verify: bool = False
    with_reference: bool = False


DEFAULT_OPTIONS = Options()


@dataclass(frozen=True)
class OffloadSubject:
    """What is to move, and how.

    Attributes:
        model: the chunks, each bare or in megatron-core's DistributedDataParallel.
        optimizer: megatron-core's, or one of torch's; None if nothing is trained.
        table: where each target lives in each phase.
        options: how the engine works.
    """

    model: Sequence[torch.nn.Module]
    optimizer: Any | None
    table: Table
    options: Options

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return next(self.model[0].parameters()).device

    def visits_host(self, target: Target) -> bool:
        """Whether the table has a target on the host in some phase."""
        return any(placements[target] is Placement.HOST for placements in self.table.values() if target in placements)


@dataclass(frozen=True)
class TargetContext(OffloadSubject):
    """The same, with what a target is built from.

    Attributes:
        arena: gives the host memory.
        mover: copies.
        meter: takes the measurements.
        ranges: makes the ranges.
        require: `Residency.require`, once all targets are made.
    """

    arena: PinnedArena
    mover: Mover
    meter: Meter
    ranges: RangeMaker
    require: Callable[[Target], None]

    def flat_buffer(self, target: Target, *, with_host_side: bool) -> FlatBuffer:
        """A flat buffer for a target, empty."""
        return FlatBuffer(target, self.device, self.arena if with_host_side else None, ranges=self.ranges)
