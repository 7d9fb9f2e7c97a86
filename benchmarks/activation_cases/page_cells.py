"""Formats Markdown tables from rows of results: columns, cells, and the text below them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Cells = Callable[[Row], str]
MISSING = "\N{EN DASH}"


@dataclass(frozen=True)
class Column:
    """Describes a column: its heading, and how a row fills it."""

    title: str
    show: Cells


def has_failed(row: Row) -> bool:
    """Returns whether a row has only an error."""
    return row.get("error") is not None


def shown(value: Any) -> str:
    """Formats a value as Markdown."""
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
    """Formats a number with the given number of decimals."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def field(name: str) -> Cells:
    """Shows a field as it is."""
    return lambda row: shown(row.get(name))


def number(name: str, digits: int = 0) -> Cells:
    """Shows a field, rounded."""
    return lambda row: rounded(row.get(name), digits)


def names(name: str) -> Cells:
    """Shows a list of names, as table.as_list writes it."""

    def cell(row: Row) -> str:
        value = row.get(name)
        return shown(value) if value in (None, "none") else ", ".join(f"`{one}`" for one in value.split(", "))

    return cell


def quotient(name: str, divisor: str, digits: int = 0) -> Cells:
    """Shows one field divided by another."""

    def cell(row: Row) -> str:
        value, by = row.get(name), row.get(divisor)
        return MISSING if value is None or by is None else rounded(value / by, digits)

    return cell


def difference(name: str, less: str) -> Cells:
    """Shows one field minus another."""

    def cell(row: Row) -> str:
        value, other = row.get(name), row.get(less)
        return MISSING if value is None or other is None else rounded(value - other)

    return cell


def verdict(name: str, bar: str) -> Cells:
    """Shows a bar, and whether a field meets it."""

    def cell(row: Row) -> str:
        value, limit = row.get(name), row.get(bar)
        if value is None or limit is None:
            return MISSING
        return f"{limit:g}, met" if value <= limit else f"{limit:g}, **missed by {value - limit:.2g}**"

    return cell


def section(
    rows: Sequence[Row], columns: Sequence[Column], summary: Callable[[Sequence[Row]], str] | None = None
) -> str | None:
    """Formats the summary, a table of all rows measured, the failures, and where rows were measured.

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
    """Formats a table, one line for each row."""
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
