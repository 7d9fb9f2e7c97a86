"""Defines the rows and columns of the tables of the results page. The tables' modules explain the fields.

The page is one screen. Only the JSON file has the single combinations of parity, the refused ones, memory over a step,
the soak, the causes of overhead and the CPU's time.
"""

from collections.abc import Callable, Mapping, Sequence

from activation_cases.page_cells import (
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
_OFFLOADED = Column("offloaded, MiB a micro-batch", quotient("moved_mib", "num_micro_batches"))


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
        Column("models", field("models")),
        Column("GPUs", field("layouts")),
        Column("copies", lambda row: "late" if row["way"] == LATE else "as they are"),
        Column("combinations", field("runs")),
        Column("with CUDA graphs", field("captured")),
        Column("packed rows", field("packed")),
        Column("recomputation", field("recomputing")),
        Column("offloading anything", field("moving")),
        Column("equal", field("equal")),
    )
    of_table = _of("parity", rows)
    compared = [row for row in of_table if not _is_refused(row) or has_failed(row)]
    offloading = [row for row in compared if not _is_plain(row) and not has_failed(row)]
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in offloading:
        key = tuple(row.get(name) for name in ("way", "machine", "commit"))
        groups.setdefault(key, []).append(row)
    counted = [*map(_counted, groups.values()), *filter(has_failed, compared)]
    table = section(counted, columns, lambda _: _count_equal(of_table))
    unequal = [
        f"- **not equal**: {shown(row['part'])}, at {shown(row.get('commit'))}: {shown(row.get('difference'))}"
        for row in compared
        if row.get("bit_equal") is False
    ]
    return "\n\n".join([table, "\n".join(unequal)]) if table and unequal else table


def _counted(rows: Sequence[Row]) -> Row:
    """Returns one row for all combinations of one machine and commit."""
    return {
        **{name: rows[0].get(name) for name in ("way", "machine", "commit")},
        "models": ", ".join(dict.fromkeys(str(row.get("model")) for row in rows)),
        "layouts": ", ".join(dict.fromkeys(str(row.get("parallel")) for row in rows)),
        "runs": len(rows),
        "captured": sum(row.get("graphs") != "none" for row in rows),
        "packed": sum("packed" in str(row.get("micro_batches")) for row in rows),
        "recomputing": sum(row.get("recompute") != "none" for row in rows),
        "moving": sum((row.get("moved_mib") or 0) > 0 for row in rows),
        "equal": _num_equal(rows),
    }


def _is_refused(row: Row) -> bool:
    return bool(row["part"].startswith(_REFUSED))


def _is_plain(row: Row) -> bool:
    return row.get("modules") == "none" and not has_failed(row)


def _count_equal(rows: Sequence[Row]) -> str:
    """Counts the equal runs among all compared, failed ones included; plain runs and refused ones count apart."""
    sentences = []
    compared = [row for row in rows if not _is_refused(row)]
    for words, of_way in (
        ("as copies are", [row for row in compared if row["way"] != LATE]),
        ("with late copies", [row for row in compared if row["way"] == LATE]),
    ):
        controls = [row for row in of_way if _is_plain(row)]
        offloaded = [row for row in of_way if row not in controls]
        if offloaded:
            sentences.append(f"**{_num_equal(offloaded)} of {len(offloaded)} combinations bit-equal** {words}.")
        if controls:
            sentences.append(f"Of plain runs taken twice, {_num_equal(controls)} of {len(controls)} are equal.")
    refused = {row["part"] for row in rows if _is_refused(row) and not has_failed(row)}
    if refused:
        sentences.append(f"Combinations that validation refuses: {len(refused)}.")
    return " ".join(sentences)


def _num_equal(rows: Sequence[Row]) -> int:
    return sum(row.get("bit_equal") is True for row in rows)


def _cost(rows: Sequence[Row]) -> str | None:
    columns = (
        *_SETTINGS,
        _FRACTION,
        _ROWS,
        Column("plain, ms", number("base_step_ms", 1)),
        Column("offloaded, ms", number("step_ms", 1)),
        *_OVERHEAD,
        _OFFLOADED,
        Column("link, ms a micro-batch", number("link_ms", 1)),
        Column("forward to the logits, ms", number("forward_ms", 1)),
        Column("the same, offloaded", number("offloaded_forward_ms", 1)),
        Column("peak lower by, MiB", difference("base_allocated_peak_mib", "allocated_peak_mib")),
        Column("R", number("r", 2)),
        _STEPS,
    )
    return section(_pairs(_of("cost", rows), "plain", "offloaded"), columns)


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
        _OFFLOADED,
        Column("the driver's peak, MiB", number("driver_peak_mib")),
        _STEPS,
    )
    return section(_pairs(_of("cost", rows), "eager offloaded", "graphs offloaded"), columns)


def _longest(rows: Sequence[Row]) -> str | None:
    columns = (
        *_SETTINGS,
        _CAPTURED,
        Column("kernels", lambda row: "deterministic" if row.get("deterministic") else "as they come"),
        Column("longest, tokens", field("seq_length")),
        Column("of the plain run's", quotient("seq_length", "plain_length", 2)),
        Column("does not fit", field("too_long")),
        Column("offloaded, MiB a step", number("moved_mib")),
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


def _of(table: str, rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["table"] == table]


def _pairs(rows: Sequence[Row], base: str, ours: str) -> list[Row]:
    """Returns rows of the way `ours`, with the base row's fields as `base_NAME`; and failed parts."""
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
    "cost": _cost,
    "graphs": _graphs,
    "longest_sequence": _longest,
}
"""Name of a table in a page, and what makes it of all rows: None where they have nothing for it."""
