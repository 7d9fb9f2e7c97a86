"""Computes figures of refit, sleep, switch and start-up from the marks, and lists what the run decided for this GPU."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from colocated_ways.comparisons import SLEEP_AND_WAKE_UP, SWITCH_BOTH_WAYS
from colocated_ways.marks import Mark
from colocated_ways.measured import Figure
from colocated_ways.switches import Switch, median_seconds, names_of_spans
from nemo_offload_rl.plan.colocation import KV_CACHE_BYTES

_ENGINE_IMPORT = "vllm_import"


class Driver(StrEnum):
    """Names the driver's steps before anything is built, one after the other, and when they begin."""

    IMPORTS = "imports"
    READ_RECIPE = "recipe"
    PREPARATION = "preparation"
    RAY = "ray"
    SIZES = "sizes"
    BUILD = "build"


_SPANS = (*(name for name in Driver if name != Driver.BUILD), _ENGINE_IMPORT, "vllm_build")
_MILESTONES = (Driver.RAY, "engine_built", "policy_build", "first_token")


def figures_of_marks(marks: Sequence[Mark], start_s: float, counted: Sequence[Switch]) -> Iterator[Figure]:
    """Computes the figures of refit, sleep, switch and start-up.

    Args:
        marks: of all processes, the earliest first.
        start_s: when the command was given.
        counted: the switches that count.
    """
    first_step_end_s = next(mark.at_s for mark in marks if mark.name == "last_optimizer_kernel")
    spans = ("refit", "sleep", *names_of_spans(marks, "wake_up"))
    medians = {name: median_seconds(marks, name, first_step_end_s) for name in spans}
    known = {name: seconds for name, seconds in medians.items() if seconds is not None}
    for name, seconds in known.items():
        yield f"{name}, by itself", seconds, "s"
    sleep_and_wake_s = sum(known.values()) - known.get("refit", 0.0)
    yield SLEEP_AND_WAKE_UP, sleep_and_wake_s, "s"
    if counted:
        yield "switch to training", statistics.median(one.to_training_s for one in counted), "s"
        yield "switch to generation", statistics.median(one.to_generation_s for one in counted), "s"
        both_s = statistics.median(one.both_s for one in counted)
        yield SWITCH_BOTH_WAYS, both_s, "s"
        yield f"{SWITCH_BOTH_WAYS}, less sleep and wake_up", both_s - sleep_and_wake_s, "s"
    yield from _start_up(marks, start_s)


def _start_up(marks: Sequence[Mark], start_s: float) -> Iterator[Figure]:
    for name in (*_SPANS, *names_of_spans(marks, "policy_build")):
        if (seconds := median_seconds(marks, name)) is not None:
            yield f"start-up: {name} takes", seconds, "s"
    asked_s, imports_s = _starts(marks, Driver.BUILD), _starts(marks, _ENGINE_IMPORT)
    if asked_s and imports_s:
        yield f"start-up: from the engine's creation to {_ENGINE_IMPORT} takes", min(imports_s) - min(asked_s), "s"
    for name in _MILESTONES:
        ends = [mark.at_s for mark in marks if mark.name == name]
        if ends:
            yield f"start-up: from the command to the end of {name}", min(ends) - start_s, "s"


def _starts(marks: Sequence[Mark], name: str) -> list[float]:
    return [mark.at_s - mark.seconds for mark in marks if mark.name == name]


def figures_of_policy(policy: Mapping[str, Any]) -> Iterator[Figure]:
    """Returns what the run or the recipe decided: engine, row tokens and KV cache, as far as they are set.

    Args:
        policy: the section of the recipe, with all that is left to the GPU's size resolved.
    """
    yield "the engine stays awake", policy["residency"]["generation_weights"] == "gpu", ""
    packing = policy["sequence_packing"]
    if packing["enabled"]:
        for name in ("train_mb_tokens", "logprob_mb_tokens"):
            yield name, packing[name], "tokens"
    vllm_kwargs = policy["generation"].get("vllm_kwargs") or {}
    if KV_CACHE_BYTES in vllm_kwargs:
        yield KV_CACHE_BYTES, vllm_kwargs[KV_CACHE_BYTES], "bytes"
