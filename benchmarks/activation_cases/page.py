"""Puts the tables of a result file into its page; the page's prose is written by hand.

A table is between `<!-- table: NAME -->` and `<!-- end -->`, where NAME is one of page_tables.py's. Every table that
has rows must be on the page.
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from activation_cases.page_cells import Row
from activation_cases.page_tables import TABLES

END = "<!-- end -->"
_WITHOUT_ROWS = "Not measured."


class PageError(ValueError):
    """Reports a page or a result file from which, or into which, no tables can be written."""


def update_page(result: Path) -> Path:
    """Writes the tables of a result file into the page of the same name beside it.

    Args:
        result: a JSON file; its page ends in .md instead.

    Returns:
        The page.

    Raises:
        PageError: the page or a marker is missing, or a row is not of this benchmark.
    """
    page = result.with_suffix(".md")
    for path in (result, page):
        if not path.is_file():
            raise PageError(f"{path} is no file; a result is a JSON file, and a Markdown file of its name beside it")
    text = with_tables(page.read_text(encoding="utf-8"), read_rows(result))
    beside = page.with_name(f".{page.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, page)
    return page


def read_rows(result: Path) -> list[Row]:
    """Reads the rows of a result file.

    Raises:
        PageError: a row does not name its table or part.
    """
    rows: list[Row] = json.loads(result.read_text(encoding="utf-8"))["rows"]
    for number, row in enumerate(rows, start=1):
        if missing := [name for name in ("table", "part", "way") if name not in row]:
            raise PageError(
                f"row {number} of {result} has no {', '.join(missing)}, so benchmarks/activation_offload.py did not "
                "write it; take it out"
            )
    return rows


def with_tables(text: str, rows: Sequence[Row]) -> str:
    """Returns a page's text with its tables replaced.

    Raises:
        PageError: a marker is missing, is there twice, has no end, or is of no table.
    """
    named = re.findall(r"<!-- table: (.*?) -->", text)
    if unknown := sorted(set(named) - set(TABLES)):
        raise PageError(f"the page asks for a table {', '.join(unknown)}; there are {', '.join(TABLES)}")
    for name, table in TABLES.items():
        begin, made = f"<!-- table: {name} -->", table(rows)
        if made is None and name not in named:
            continue
        if named.count(name) != 1:
            raise PageError(f"the page has {begin} {named.count(name)} times; it must be there once, {END} below it")
        before, _, rest = text.partition(begin)
        old, end, after = rest.partition(END)
        if not end or "<!-- table:" in old:
            raise PageError(f"the page has no {END} below {begin}")
        text = f"{before}{begin}\n\n{_WITHOUT_ROWS if made is None else made}\n\n{END}{after}"
    return text
