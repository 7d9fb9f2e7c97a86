"""Names of metrics: NeMo-RL's recipes write ``val:accuracy`` for what the logs call ``validation/accuracy``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# NeMo-RL's DPO names a metric by its validation set, such as val:validation-default_loss; here there is the one set.
_DEFAULT_SET = "validation-default_"
_SECTIONS = {"val": "validation", "train": "train"}

MEASUREMENTS = ("timing/", "performance/", "residency/")
"""Beginnings of the names of metrics that differ between two runs of the same recipe: seconds, bytes and speeds."""


def logged_name(recipe_name: str) -> str:
    """Translates a recipe's name of a metric to the one in metrics.jsonl.

    Raises:
        ValueError: the name has neither ``val:`` nor ``train:`` in front.
    """
    section, separator, metric = without_default_set(recipe_name).partition(":")
    if not separator or section not in _SECTIONS:
        raise ValueError(
            f"A metric is named val:NAME or train:NAME in a recipe, such as val:accuracy; found {recipe_name!r}."
        )
    return f"{_SECTIONS[section]}/{metric}"


def without_default_set(recipe_name: str) -> str:
    """Shortens NeMo-RL's names of DPO's metrics: ``val:validation-default_loss`` is ``val:loss``."""
    return recipe_name.replace(f"val:{_DEFAULT_SET}", "val:", 1)


def memory_metrics(owner: str, stats: Mapping[str, float]) -> dict[str, float]:
    """Returns the memory of a policy's or a generation engine's processes, as logged; it differs from run to run."""
    return {f"performance/memory/{owner}/{name}": value for name, value in stats.items()}


def residency_metrics(moves: Mapping[str, float]) -> dict[str, float]:
    """Names the moves between GPU and host during a step as they are logged; they differ from run to run."""
    return {f"residency/{name}": value for name, value in moves.items()}


def training_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of a policy's ``train``, as logged."""
    own = {name: float(result[name]) for name in ("loss", "grad_norm", "lr", "num_skipped")}
    return {f"train/{name}": value for name, value in (own | result["metrics"]).items()}
