"""One verb for every phase change: `residency.enter(phase)` moves what differs from the table, and nothing else."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from nemo_offload_rl.offload.types import Cell, Phase, Table, Target

logger = logging.getLogger(__name__)


class Movable(Protocol):
    """A target's mechanism."""

    @property
    def cells(self) -> frozenset[Cell]:
        """Where this target can live."""
        ...

    def move(self, cell: Cell) -> int:
        """Bring the target to a cell it is not in; returns the bytes that crossed the link."""
        ...


@dataclass(frozen=True)
class Transition:
    """What one `enter` did."""

    phase: Phase
    seconds: float
    moved: Mapping[Target, tuple[Cell, Cell]] = field(default_factory=dict)
    """From and to, for each target that moved."""
    bytes: int = 0
    """Bytes that crossed the link; dropping and zeroing cross nothing."""


class Residency:
    """Knows where each target is, and moves it where a phase wants it.

    Args:
        targets: the mechanisms; everything starts on the GPU.
        table: where each target lives in each phase; every target needs a cell in every phase.

    Raises:
        ValueError: if the table lacks a cell or asks for one that a target cannot live in.
    """

    def __init__(self, targets: Mapping[Target, Movable], table: Table) -> None:
        for phase in Phase:
            for target, mechanism in targets.items():
                cell = table[phase].get(target) if phase in table else None
                if cell is None:
                    raise ValueError(f"The residency table has no cell for {target} in phase {phase}.")
                if cell is not Cell.KEEP and cell not in mechanism.cells:
                    known = ", ".join(sorted(mechanism.cells | {Cell.KEEP}))
                    raise ValueError(f"{target} cannot be {cell} in phase {phase}; it can be {known}.")
        self._targets = dict(targets)
        self._table = table
        self._where = dict.fromkeys(targets, Cell.GPU)
        self.phase: Phase | None = None

    def where(self, target: Target) -> Cell:
        """Where a target is now."""
        return self._where[target]

    def enter(self, phase: Phase) -> Transition:
        """Move every target to its cell of `phase`; twice in a row is a no-op.

        What leaves the GPU moves first, so that what comes back finds room.
        """
        start = time.perf_counter()
        goals = {target: self._table[phase][target] for target in self._targets}
        differ = [target for target, cell in goals.items() if cell not in (Cell.KEEP, self._where[target])]
        moved, total = {}, 0
        for target in sorted(differ, key=lambda t: goals[t] is Cell.GPU):
            total += self._targets[target].move(goals[target])
            moved[target] = (self._where[target], goals[target])
            self._where[target] = goals[target]
        self.phase = phase
        transition = Transition(phase, time.perf_counter() - start, moved, total)
        if moved:
            logger.debug("entered %s: %s", phase, transition)
        return transition
