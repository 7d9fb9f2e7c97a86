"""Lists the bars of the figures, as data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Bar:
    """Limits one figure."""

    bar: float
    bar_is: Literal["at_least", "at_most"]


SHARES_OF_LINK: Mapping[tuple[str, str], float] = {
    ("tensors_198", "d2h"): 0.99,
    ("tensors_198", "h2d"): 0.98,
    ("optimizer_state", "d2h"): 0.98,
    ("optimizer_state", "h2d"): 0.97,
    ("tensors_10000", "d2h"): 0.95,
    ("tensors_10000", "h2d"): 0.95,
}
"""By case and direction."""

TIMES_SOONER = "times sooner usable than torch's pin_memory"
PINNED_OF_STATE = "pinned bytes over bytes of the state"
STREAM_DELAY = "delay of a stream of {work} kernels, as a share, {direction}"
MOVE_DELAY = "delay of the transition by a stream of {work} kernels, as a share, {direction}"
PAGE_LOCKINGS = "page-locking calls after the first cycle"
GROWTH = "growth of {what} from the first cycle to the last, bytes"
SAME = "{what} the same in every cycle"

_MIB = 2**20
_METRICS: Mapping[tuple[str, str], Bar] = {
    ("setup", TIMES_SOONER): Bar(6.0, "at_least"),
    ("setup", PINNED_OF_STATE): Bar(1.01, "at_most"),
    ("soak", PAGE_LOCKINGS): Bar(0, "at_most"),
    ("soak", GROWTH.format(what="pinned memory")): Bar(0, "at_most"),
    # The interpreter's own heap varies by a few pages.
    ("soak", GROWTH.format(what="resident memory")): Bar(8 * _MIB, "at_most"),
    ("soak", GROWTH.format(what="memory that torch reserves")): Bar(0, "at_most"),
    ("soak", GROWTH.format(what="memory that the driver counts")): Bar(0, "at_most"),
    ("soak", SAME.format(what="addresses")): Bar(1, "at_least"),
    ("soak", SAME.format(what="checksums")): Bar(1, "at_least"),
    **{
        ("beside_compute", name.format(direction=direction, work=work)): Bar(0.01, "at_most")
        for name in (STREAM_DELAY, MOVE_DELAY)
        for direction in ("d2h", "h2d")
        for work in ("matmul", "spin")
    },
}
_RELEASED = Bar(0.99, "at_least")


def of_speed(case: str, way: str, direction: str) -> dict[str, Any]:
    """Returns the bar of a share of the link as fields of a row; empty if there is none."""
    if way != "ours" or (case, direction) not in SHARES_OF_LINK:
        return {}
    return asdict(Bar(SHARES_OF_LINK[case, direction], "at_least"))


def of_metric(case: str, way: str, metric: str) -> dict[str, Any]:
    """Returns the bar of a figure as fields of a row; empty if there is none."""
    if not way.startswith("ours"):
        return {}
    if case == "residue":
        return asdict(_RELEASED)
    return asdict(_METRICS[case, metric]) if (case, metric) in _METRICS else {}
