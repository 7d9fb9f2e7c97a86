"""Compares two settings: whether they compute the same, and how much longer one takes."""

from collections.abc import Iterator, Mapping

from colocated_ways.measured import Measured
from colocated_ways.settings import OURS, OURS_ASLEEP, UPSTREAM

SLEEP_AND_WAKE_UP = "sleep and wake_up, by themselves"
SWITCH_BOTH_WAYS = "switch both ways"
BESIDE_SLEEP = f"{SWITCH_BOTH_WAYS}, less the sleep and wake_up of {OURS_ASLEEP}"
"""What the bar is on; where the engine of `ours` stays awake, its switch has no sleep of its own."""
_OF_PAIRS = {OURS: "both", OURS_ASLEEP: f"{OURS_ASLEEP} and {UPSTREAM}"}
"""What a setting is called together with `upstream_way`."""
_RATIOS = ("refit, by itself", "switch to training", "switch to generation", SWITCH_BOTH_WAYS)

Comparison = tuple[str, str, float | bool, str]
"""(setting, metric, value, unit)."""


def comparisons(found: Mapping[str, Measured]) -> Iterator[Comparison]:
    """Compares ours with `upstream_way`, and ours awake with ours asleep, where both settings were run.

    Args:
        found: what each setting gave in steps and switches; settings without switches have no ratios.
    """
    for setting, called in _OF_PAIRS.items():
        if setting in found and UPSTREAM in found:
            for metric, value, unit in _with_upstream(setting, found[setting], found[UPSTREAM]):
                yield called, metric, value, unit
    if OURS in found and OURS_ASLEEP in found:
        ours, asleep = found[OURS].value_of, found[OURS_ASLEEP].value_of
        if SWITCH_BOTH_WAYS in ours:
            yield OURS, BESIDE_SLEEP, round(ours[SWITCH_BOTH_WAYS] - asleep[SLEEP_AND_WAKE_UP], 5), "s"


def _with_upstream(setting: str, ours: Measured, upstream: Measured) -> Iterator[tuple[str, float | bool, str]]:
    yield "losses of all steps are equal", ours.losses == upstream.losses, ""
    differences = [abs(one - other) for one, other in zip(ours.losses, upstream.losses, strict=True)]
    yield "largest difference of losses", max(differences), ""
    yield "greedy tokens are equal", ours.greedy_ids == upstream.greedy_ids, ""
    of_ours, of_upstream = ours.value_of, upstream.value_of
    for metric in _RATIOS:
        if metric in of_ours:
            yield f"{metric}: {UPSTREAM} over {setting}", round(of_upstream[metric] / of_ours[metric], 2), "times"
