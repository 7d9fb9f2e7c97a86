"""Finds the phases of a step among its metrics."""

from __future__ import annotations

from collections.abc import Mapping

PHASE_PREFIX = "timing/train/"
STEP_SECONDS = "total_step_time"


def phase_seconds(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Returns the seconds of each phase from a step's metrics named timing/train/PHASE."""
    return {
        name.removeprefix(PHASE_PREFIX): seconds
        for name, seconds in metrics.items()
        if name.startswith(PHASE_PREFIX) and seconds is not None
    }
