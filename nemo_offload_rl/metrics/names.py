"""Names metrics; NeMo-RL's recipes write ``val:accuracy`` for the logged metric ``validation/accuracy``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# NeMo-RL's DPO names a metric by its validation set, such as val:validation-default_loss; here there is only one set.
_DEFAULT_SET = "validation-default_"
_SECTIONS = {"val": "validation", "train": "train"}

MEASUREMENTS = ("timing/", "performance/", "residency/")
"""Prefixes of metrics that differ between two runs of the same recipe: seconds, bytes and speeds."""


def logged_name(recipe_name: str) -> str:
    """Translates a recipe's name of a metric to the one in metrics.jsonl.

    Raises:
        ValueError: the name does not start with ``val:`` or ``train:``.
    """
    section, separator, metric = without_default_set(recipe_name).partition(":")
    if not separator or section not in _SECTIONS:
        raise ValueError(
            f"A metric must be named val:NAME or train:NAME in a recipe, such as val:accuracy; found {recipe_name!r}."
        )
    return f"{_SECTIONS[section]}/{metric}"


def validation_name(recipe_name: str) -> str:
    """Returns the name of an early stop's metric with its section: NeMo-RL writes ``accuracy`` for ``val:accuracy``."""
    return without_default_set(recipe_name if ":" in recipe_name else f"val:{recipe_name}")


def without_default_set(recipe_name: str) -> str:
    """Shortens NeMo-RL's names of DPO's metrics: ``val:validation-default_loss`` is ``val:loss``."""
    return recipe_name.replace(f"val:{_DEFAULT_SET}", "val:", 1)


def memory_metrics(owner: str, stats: Mapping[str, float]) -> dict[str, float]:
    """Returns the memory of a policy's or a generation engine's processes under logged names; differs between runs."""
    return {f"performance/memory/{owner}/{name}": value for name, value in stats.items()}


def residency_metrics(moves: Mapping[str, float]) -> dict[str, float]:
    """Returns a step's moves between GPU and host under logged names; they differ between runs."""
    return {f"residency/{name}": value for name, value in moves.items()}


def training_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics of a policy's ``train`` result under logged names."""
    own = {name: float(result[name]) for name in ("loss", "grad_norm", "lr", "num_skipped")}
    return {f"train/{name}": value for name, value in (own | result["metrics"]).items()}
