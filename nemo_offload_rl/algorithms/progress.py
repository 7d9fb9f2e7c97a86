"""How far a run has come, and what of that is on disk: what is said where it ends early."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class Progress:
    """Finished steps, and those that a checkpoint holds.

    ``str`` of it says which steps are lost where the run ends now, and from where the same command goes on.

    Attributes:
        name: of what is run.
        num_done: finished steps.
        in_step: whether another is under way.
        num_saved: finished steps that are on disk: in the newest checkpoint, or in the model of a finished warm start.
        checkpoint: the newest, or None.
        saves: whether checkpoints are written.
    """

    name: str = "run"
    num_done: int = 0
    in_step: bool = False
    num_saved: int = 0
    checkpoint: Path | None = None
    saves: bool = True

    @property
    def num_lost(self) -> int:
        """Steps that are lost where the run ends now, the unfinished one counted."""
        return self.num_done + self.in_step - self.num_saved

    def __str__(self) -> str:
        """Two sentences."""
        return f"{self._lost()} {self._next()}"

    def _lost(self) -> str:
        first, last = self.num_saved + 1, self.num_done + self.in_step
        if last < first:
            return "No step is lost."
        steps = f"Step {last} is" if first == last else f"Steps {first} to {last} are"
        unfinished = "" if not self.in_step else " (unfinished)" if first == last else f" ({last} unfinished)"
        since = "" if self.checkpoint is None else f" since {self.checkpoint}"
        verb = steps.rsplit(" ", 1)
        return f"{verb[0]}{since}{unfinished} {verb[1]} lost."

    def _next(self) -> str:
        if self.checkpoint is not None:
            return f"The same command goes on from {self.checkpoint}."
        why = "" if self.saves or self.num_lost == 0 else " (checkpointing.enabled is false)"
        return f"The same command starts the {self.name} afresh{why}."
