"""Holds what one setting's process hands to the process that compares the settings."""

from dataclasses import dataclass, field
from typing import Any

from colocated_ways.timeline import Span

Figure = tuple[str, float, str]
"""(metric, value, unit); the value may be a bool."""


@dataclass
class Measured:
    """Holds what one setting gave.

    Attributes:
        figures: (metric, value, unit).
        losses: of each GRPO step, then of the training of each switch.
        grad_norms: of the same.
        greedy_ids: tokens after the last of them, a list a prompt.
        num_gpus: of the policy, or ranks without a GPU.
        timelines: fields of the spans of one switch, by direction.
    """

    figures: list[Figure] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    greedy_ids: list[list[int]] = field(default_factory=list)
    num_gpus: int = 1
    timelines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, metric: str, value: float | None, unit: str) -> None:
        """Adds a figure, if there is one."""
        if value is not None:
            self.figures.append((metric, value, unit))

    @property
    def value_of(self) -> dict[str, float]:
        """Returns the values of the figures, by metric."""
        return {metric: value for metric, value, _ in self.figures}

    def spans(self) -> dict[str, list[Span]]:
        """Returns the timelines."""
        return {direction: [Span(**fields) for fields in spans] for direction, spans in self.timelines.items()}
