"""Compares a run's peak memory in each phase with what the plan gave it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from rich.table import Table

from nemo_offload_rl.metrics.samples import as_plain_text

logger = logging.getLogger(__name__)

_POLICY, _GENERATION = "performance/memory/policy/", "performance/memory/generation/"
# Verb of the policy, or other quantity -> its row's title.
_VERBS = {"train": "training", "logprobs": "log-prob passes", "refit": "refit"}
_OTHERS = {
    f"{_GENERATION}gpu_peak_allocated_gib": "GPU: generation, by torch",
    f"{_POLICY}host_rss_gib": "host: a process of the policy",
    f"{_GENERATION}host_rss_gib": "host: a process of generation",
}


def memory_table(rows: Sequence[Mapping[str, float | None]], planned_gib: Mapping[str, float]) -> Table | None:
    """Makes a table of the largest memory that a rank, or an engine, has taken in each phase, beside the planned.

    Args:
        rows: The steps' metrics, as `read_metrics` gives them.
        planned_gib: The planned peak of each verb of the policy, as far as it is known.

    Returns:
        GiB of the policy's phases, if it has GPUs, then of generation and of the host; None where nothing was measured.
    """
    peaks = _policy_peaks(rows)
    others = {title: gib for name, title in _OTHERS.items() if (gib := _largest(rows, name)) is not None}
    if not peaks and not others:
        return None
    table = Table(title="Peak memory, GiB of the fullest process", title_justify="left")
    table.add_column("phase")
    for title in ("measured", "planned") if planned_gib and peaks else ("measured",):
        table.add_column(title, justify="right")
    for verb, gib in peaks.items():
        planned = [f"{planned_gib[verb]:.2f}"] if verb in planned_gib else []
        table.add_row(f"GPU: {_VERBS[verb]}", f"{gib:.2f}", *planned)
    for title, gib in others.items():
        table.add_row(title, f"{gib:.2f}")
    return table


def log_peaks(rows: Sequence[Mapping[str, float | None]], planned_gib: Mapping[str, float]) -> None:
    """Logs the memory of a run with GPUs, and warns if a phase has taken more GPU memory than was planned."""
    peaks = _policy_peaks(rows)
    table = memory_table(rows, planned_gib)
    if not peaks or table is None:
        return
    logger.info("%s", as_plain_text(table))
    above = [
        f"{_VERBS[verb]} {gib:.2f} GiB, {gib - planned_gib[verb]:.2f} more than planned"
        for verb, gib in peaks.items()
        if verb in planned_gib and gib > planned_gib[verb]
    ]
    if above:
        logger.warning(
            "The policy took more GPU memory than the plan gave it: %s; what the plan decided for this GPU has that "
            "much less room than it assumed: if memory runs out, take smaller micro-batches or packed rows.",
            "; ".join(above),
        )


def _policy_peaks(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    found = {verb: _largest(rows, f"{_POLICY}gpu_peak_{verb}_gib") for verb in _VERBS}
    return {verb: gib for verb, gib in found.items() if gib is not None}


def _largest(rows: Sequence[Mapping[str, float | None]], name: str) -> float | None:
    return max((value for row in rows if (value := row.get(name)) is not None), default=None)
