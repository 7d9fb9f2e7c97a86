"""The tables of the results page: which rows they have, and which columns. Fields are said in the tables' modules."""

import re
from collections.abc import Callable, Mapping, Sequence

from activation_cases.page_cells import (
    MISSING,
    Column,
    Row,
    difference,
    field,
    has_failed,
    names,
    number,
    quotient,
    rounded,
    section,
    shown,
    verdict,
)
from activation_cases.table import FAILED

LATE = "late copies"
_REFUSED = "refused/"

_SETTINGS = (Column("model", field("model")), Column("modules", names("modules")))
_FRACTION = Column("fraction", field("fraction"))
_CAPTURED, _DELAY = Column("graphs", names("graphs")), Column("delay", field("delay"))
_ROWS = Column("rows a micro-batch", field("micro_batch"))
_STEPS = Column("steps", field("steps"))
_LEFT = Column("left, MiB a micro-batch", quotient("moved_mib", "num_micro_batches"))
_PEAK_FELL = Column("it fell by, MiB", difference("base_allocated_peak_mib", "allocated_peak_mib"))


def _overhead(row: Row) -> str:
    found = rounded(row.get("overhead_percent"), 2)
    low, high = row.get("overhead_low_95"), row.get("overhead_high_95")
    return found if low is None or high is None else f"{found} ({low:.2f} to {high:.2f})"


_OVERHEAD = (
    Column("overhead, % (95% interval)", _overhead),
    Column("bar, %", verdict("overhead_percent", "bar_percent")),
)


def _parity(rows: Sequence[Row]) -> str | None:
    columns = (
        *_SETTINGS,
        _FRACTION,
        _CAPTURED,
        _DELAY,
        Column("micro-batches", field("micro_batches")),
        Column("phases between", field("phases")),
        Column("recomputed", names("recompute")),
        Column("GPUs", field("parallel")),
        Column("copies", lambda row: "late" if row["way"] == LATE else "as they are"),
        Column("left, MiB in the last step", number("moved_mib", 1)),
        _STEPS,
        Column("equal", lambda row: "yes" if row.get("bit_equal") else f"**no**: {shown(row.get('difference'))}"),
    )
    compared = [row for row in _of("parity", rows) if not row["part"].startswith(_REFUSED)]
    return section(compared, columns, _count_equal)


def _count_equal(rows: Sequence[Row]) -> str:
    """How many are equal, of all that are there, failed ones too; runs that offload nothing apart."""
    sentences = []
    for words, of_way in (
        ("as copies are", [row for row in rows if row["way"] != LATE]),
        ("with late copies", [row for row in rows if row["way"] == LATE]),
    ):
        controls = [row for row in of_way if row.get("modules") == "none" and not has_failed(row)]
        offloaded = [row for row in of_way if row not in controls]
        if offloaded:
            sentences.append(f"**{_num_equal(offloaded)} of {len(offloaded)} bit-equal** {words}.")
        if controls:
            sentences.append(f"Of plain runs taken twice, {_num_equal(controls)} of {len(controls)} are equal.")
    return " ".join(sentences)


def _num_equal(rows: Sequence[Row]) -> int:
    return sum(row.get("bit_equal") is True for row in rows)


def _refused(rows: Sequence[Row]) -> str | None:
    refused = [row for row in _of("parity", rows) if row["part"].startswith(_REFUSED)]
    once = {(row["part"], has_failed(row)): row for row in refused}  # with late copies the same ones are refused
    columns = (
        Column("combination", lambda row: shown(row["part"].removeprefix(_REFUSED))),
        Column("why", lambda row: _first_sentence(row.get("refused"))),
    )
    return section(list(once.values()), columns)


def _first_sentence(message: str | None) -> str:
    return shown(message if message is None else re.split(r"(?:\.|;)(?: |$)", message, maxsplit=1)[0])


def _cost(rows: Sequence[Row]) -> str | None:
    columns = (
        *_SETTINGS,
        _FRACTION,
        _ROWS,
        Column("plain, ms", number("base_step_ms", 1)),
        Column("offloaded, ms", number("step_ms", 1)),
        *_OVERHEAD,
        Column("the link's bound, %", number("bound_percent", 2)),
        Column("link, ms a micro-batch", number("link_ms", 1)),
        Column("forward to the logits, ms a micro-batch", number("forward_ms", 1)),
        Column("the same, offloaded", number("offloaded_forward_ms", 1)),
        Column("bar, ms", verdict("offloaded_forward_ms", "forward_bar_ms")),
        Column("plain, tokens/s", number("base_tokens_per_s")),
        Column("offloaded, tokens/s", number("tokens_per_s")),
        _STEPS,
    )
    return section(_pairs(_of("cost", rows), "plain", "offloaded"), columns)


def _saving(rows: Sequence[Row]) -> str | None:
    columns = (
        *_SETTINGS,
        _FRACTION,
        _ROWS,
        Column("distinct, MiB a micro-batch", quotient("distinct_mib", "num_micro_batches")),
        Column("kept by choice", quotient("kept_mib", "num_micro_batches")),
        Column("no room", quotient("refused_mib", "num_micro_batches")),
        Column("left", quotient("moved_mib", "num_micro_batches")),
        Column("came back late", quotient("late_mib", "num_micro_batches")),
        Column("peak, plain, MiB", number("base_allocated_peak_mib")),
        _PEAK_FELL,
        Column("the driver's fell by, MiB", number("driver_saved_mib")),
        Column("R", number("r", 4)),
        Column("bar", verdict("r", "r_bar", at_least=True)),
    )
    pairs = _pairs(_of("cost", rows), "plain", "offloaded")
    return section([row for row in pairs if not has_failed(row)], columns)  # those that failed are in _cost


def _graphs(rows: Sequence[Row]) -> str | None:
    columns = (
        *_SETTINGS,
        _CAPTURED,
        _DELAY,
        _ROWS,
        Column("eager, ms", number("base_step_ms", 1)),
        Column("graphs, ms", number("step_ms", 1)),
        *_OVERHEAD,
        Column("replays a step", field("num_graph_replays")),
        _LEFT,
        Column("the driver's peak, MiB", number("driver_peak_mib")),
        _STEPS,
    )
    return section(_pairs(_of("cost", rows), "eager offloaded", "graphs offloaded"), columns)


def _soak(rows: Sequence[Row]) -> str | None:
    columns = (
        *_SETTINGS,
        _STEPS,
        Column("with all gone that should leave", field("steps_with_all_offloaded")),
        Column("micro-batches", field("num_micro_batches")),
        Column("page-locked at step 20, MiB", number("pinned_mib_at_step_20", 1)),
        Column("page-locked grew by, MiB", number("pinned_mib_growth", 1)),
        Column("reserved at step 20, MiB", number("reserved_mib_at_step_20", 1)),
        Column("reserved grew by, MiB", number("reserved_mib_growth", 1)),
        Column("no room, MiB", number("refused_mib", 1)),
        Column("ms a step", number("step_ms", 1)),
    )
    return section(_of("soak", rows), columns)


def _longest(rows: Sequence[Row]) -> str | None:
    columns = (
        *_SETTINGS,
        _CAPTURED,
        Column("kernels", lambda row: "deterministic" if row.get("deterministic") else "as they come"),
        Column("longest, tokens", field("seq_length")),
        Column("of the plain run's", quotient("seq_length", "plain_length", 2)),
        Column("does not fit", field("too_long")),
        Column("left, MiB a step", number("moved_mib")),
        Column("the driver's peak, MiB", number("driver_peak_mib")),
        Column("ms a step", number("step_ms", 1)),
        Column("tokens/s", number("tokens_per_s")),
    )
    of_table = _of("longest_sequence", rows)
    found = [row for row in of_table if row["way"] in ("longest", FAILED)]
    plain = {row.get("deterministic"): row.get("seq_length") for row in found if row.get("modules") == "none"}
    tries = [(row["part"], row["seq_length"]) for row in of_table if row.get("fits") is False]
    too_long = {
        row["part"]: min((length for part, length in tries if part == f"{row['part']}/tries"), default=None)
        for row in found
    }
    compared = [
        {**row, "plain_length": plain.get(row.get("deterministic")), "too_long": too_long[row["part"]]} for row in found
    ]
    return section(compared, columns)


def _memory(rows: Sequence[Row]) -> str | None:
    columns = (
        *_SETTINGS,
        _ROWS,
        Column("micro-batches", field("num_micro_batches")),
        Column("peak, plain, MiB", number("base_allocated_peak_mib")),
        Column("peak, offloaded, MiB", number("allocated_peak_mib")),
        _PEAK_FELL,
    )
    return section(_pairs(_of("memory", rows), "plain", "offloaded"), columns)


def _causes(rows: Sequence[Row]) -> str | None:
    columns = (
        *_SETTINGS,
        _ROWS,
        Column("steps are", field("way")),
        Column("ms", number("step_ms", 1)),
        Column("over plain, % of pairs (95% interval)", _paired),
        _STEPS,
    )
    return section(_of("causes", rows), columns)


def _host_time(rows: Sequence[Row]) -> str | None:
    columns = (
        *_SETTINGS,
        _ROWS,
        Column("calls of", field("way")),
        Column("a step", number("calls")),
        Column("us each", number("us", 1)),
        Column("ms a step", number("ms", 2)),
        _STEPS,
    )
    return section(_of("host_time", rows), columns)


def _paired(row: Row) -> str:
    low, high = row.get("paired_low_95"), row.get("paired_high_95")
    found = rounded(row.get("paired_percent"), 2)
    return MISSING if row.get("way") == "plain" or low is None or high is None else f"{found} ({low:.2f} to {high:.2f})"


def _of(table: str, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["table"] == table]


def _pairs(rows: Sequence[Row], base: str, ours: str) -> list[Row]:
    """Rows of the way `ours`, with what the base row of the same measurement has as `base_NAME`; and failed parts."""
    bases = {(row["part"], row.get("micro_batch")): row for row in rows if row["way"] == base}
    found: list[Row] = []
    for row in rows:
        key = row["part"], row.get("micro_batch")
        if row["way"] == ours:
            beside = bases[key] if key in bases else {}
            found.append({**row, **{f"base_{name}": value for name, value in beside.items()}})
        elif has_failed(row) and ("/graphs=" in row["part"]) == (ours == "graphs offloaded"):
            found.append(row)
    return found


TABLES: Mapping[str, Callable[[Sequence[Row]], str | None]] = {
    "parity": _parity,
    "refused": _refused,
    "cost": _cost,
    "saving": _saving,
    "graphs": _graphs,
    "soak": _soak,
    "longest_sequence": _longest,
    "memory": _memory,
    "causes": _causes,
    "host_time": _host_time,
}
"""Name of a table in a page, and what makes it of all rows: None where they have nothing for it."""
