"""Markdown tables from rows of results: columns, cells, what is said below them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Cells = Callable[[Row], str]
MISSING = "\N{EN DASH}"


@dataclass(frozen=True)
class Column:
    """Of a table: its heading, and what a row has there."""

    title: str
    show: Cells


def has_failed(row: Row) -> bool:
    """Whether a row has nothing but an error."""
    return row.get("error") is not None


def shown(value: Any) -> str:
    """A value as Markdown."""
    match value:
        case None:
            return MISSING
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:g}"
    return " ".join(str(value).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").split())


def rounded(value: float | None, digits: int = 0) -> str:
    """A number with so many digits behind the point."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def field(name: str) -> Cells:
    """A field as it is."""
    return lambda row: shown(row.get(name))


def number(name: str, digits: int = 0) -> Cells:
    """A field, rounded."""
    return lambda row: rounded(row.get(name), digits)


def names(name: str) -> Cells:
    """A list of names, as table.as_list writes it."""

    def cell(row: Row) -> str:
        value = row.get(name)
        return shown(value) if value in (None, "none") else ", ".join(f"`{one}`" for one in value.split(", "))

    return cell


def quotient(name: str, divisor: str, digits: int = 0) -> Cells:
    """One field over another."""

    def cell(row: Row) -> str:
        value, by = row.get(name), row.get(divisor)
        return MISSING if value is None or by is None else rounded(value / by, digits)

    return cell


def difference(name: str, less: str) -> Cells:
    """One field less another."""

    def cell(row: Row) -> str:
        value, other = row.get(name), row.get(less)
        return MISSING if value is None or other is None else rounded(value - other)

    return cell


def verdict(name: str, bar: str) -> Cells:
    """A bar, and whether a field is at most that."""

    def cell(row: Row) -> str:
        value, limit = row.get(name), row.get(bar)
        if value is None or limit is None:
            return MISSING
        return f"{limit:g}, met" if value <= limit else f"{limit:g}, **missed by {value - limit:.2g}**"

    return cell


def section(
    rows: Sequence[Row], columns: Sequence[Column], summary: Callable[[Sequence[Row]], str] | None = None
) -> str | None:
    """What the summary says, a table of all that was measured, what failed, and where rows were measured.

    Returns:
        None if there are no rows.
    """
    if not rows:
        return None
    machines = list(dict.fromkeys(row.get("machine") for row in rows))
    commits = list(dict.fromkeys(row.get("commit") for row in rows))
    where: list[Column] = []
    if len(commits) > 1:
        where.append(Column("commit", field("commit")))
    if len(machines) > 1:
        where.append(Column("machine", lambda row: str(machines.index(row.get("machine")) + 1)))
    measured = [row for row in rows if not has_failed(row)]
    blocks = [
        summary(rows) if summary else "",
        markdown(measured, [*columns, *where]) if measured else "",
        "\n".join(_failure(row) for row in rows if has_failed(row)),
        _where(machines, commits),
    ]
    return "\n\n".join(block for block in blocks if block)


def markdown(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """A table, a line a row."""
    lines = [f"| {' | '.join(column.title for column in columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(column.show(row) for column in columns)} |" for row in rows]
    return "\n".join(lines)


def _failure(row: Row) -> str:
    words = " with late copies" if row["way"] == "late copies" else ""
    first, *_ = str(row["error"]).splitlines()
    return f"- **failed**{words}: {shown(row['part'])}, at {shown(row.get('commit'))}: {shown(first)}"


def _where(machines: Sequence[Any], commits: Sequence[Any]) -> str:
    numbered = [f"{index}: {shown(name)}" for index, name in enumerate(machines, start=1)]
    machine = f"Machines: {'; '.join(numbered)}." if len(machines) > 1 else f"Machine: {shown(machines[0])}."
    return machine if len(commits) > 1 else f"{machine} Commit: {shown(commits[0])}."
