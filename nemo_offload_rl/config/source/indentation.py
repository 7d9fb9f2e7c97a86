"""Hints for wrong indentation: in YAML that cannot be parsed, and for keys at another level than their own."""

import re
from collections.abc import Sequence
from typing import Any

import yaml

from nemo_offload_rl.config.problems import Origin

_KEY_AND_VALUE = re.compile(r"\s*(- )?[^\s#:][^#:]*:\s+[^\s#|>&]")
_KEY_WITHOUT_BLANK = re.compile(r"\s*[A-Za-z_]\w*:[^\s/\\]")
_PLAIN_WORDS = re.compile(r"\s*[^\s#:\[\]{}\"'|>-][^#:\[\]{}\"']*$")


def hint_at_broken_yaml(text: str, error: yaml.MarkedYAMLError) -> str:
    """Guesses what broke the YAML from its lines; the hint begins with a semicolon, or is empty.

    Args:
        text: the text of the whole file.
        error: the parser's error.
    """
    lines = text.splitlines()
    for mark in (error.context_mark, error.problem_mark):
        if mark is not None and mark.line < len(lines) and _KEY_WITHOUT_BLANK.match(lines[mark.line]):
            return f"; write a space after the colon of line {mark.line + 1}"
    mark = error.problem_mark or error.context_mark
    if mark is None or mark.line >= len(lines):
        return ""
    line = lines[mark.line]
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return "; the line is indented by a tab: use spaces, since YAML does not allow tabs there"
    above = [
        number for number in range(mark.line) if lines[number].strip() and not lines[number].lstrip().startswith("#")
    ]
    return _hint_by_lines_above(lines, mark.line, above) if line.strip() and above else ""


def _hint_by_lines_above(lines: Sequence[str], number: int, above: Sequence[int]) -> str:
    previous = lines[above[-1]]
    indent, before = _indent(lines[number]), _indent(previous)
    if _PLAIN_WORDS.match(previous):
        return f"; line {above[-1] + 1} has no colon and space between a key and its value"
    if indent > before and _KEY_AND_VALUE.match(previous):
        return (
            f"; line {number + 1} is indented deeper than line {above[-1] + 1}, which already has a value: the keys "
            "of a section must start in the same column"
        )
    levels = _open_levels(lines, above)
    if indent < before and indent not in levels:
        return (
            f"; line {number + 1} is indented by {indent}, unlike every section above it "
            f"({', '.join(map(str, sorted(levels)))}): the keys of a section must start in the same column"
        )
    return ""


def _open_levels(lines: Sequence[str], above: Sequence[int]) -> set[int]:
    """Returns the indentations of the sections that contain the last line, including its own."""
    levels = {_indent(lines[above[-1]])}
    for number in reversed(above):
        if _indent(lines[number]) < min(levels):
            levels.add(_indent(lines[number]))
    return levels


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def hint_at_level(path: str, valid: str | None, origin: Origin) -> str:
    """Says where an unknown key belongs, if a section around its own or inside it has it; otherwise empty.

    Args:
        path: the unknown key.
        valid: the valid key that the user most likely meant.
        origin: where the key was written; only a file's lines have an indentation.
    """
    section, _, name = path.rpartition(".")
    if valid is None or origin.override is not None or valid.rpartition(".")[2] != name:
        return ""
    target = valid.rpartition(".")[0]
    here = f"here it is in {section}" if section else "here it is at the top level"
    if target.startswith(f"{section}." if section else ""):
        return f"; {here}, so indent it below '{target.rpartition('.')[2]}:'" if target else ""
    if not target:
        return f"; {here}, so write it without indentation"
    if section.startswith(f"{target}."):
        return f"; {here}, so indent it as the other keys of {target}"
    return ""


def hint_at_section(path: str, value: Any, origin: Origin, *, is_required: bool) -> str:
    """Says how to write or delete a section that something else was given for; begins with a semicolon, or is empty."""
    if origin.override is not None:
        return "" if value is not None or is_required else f"; ~{path} deletes it"
    if value is None:
        return f"; indent its keys below '{path.rpartition('.')[2]}:'"
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return "; write its keys without dashes"
    return ""


def hint_at_value(path: str, value: Any, origin: Origin) -> str:
    """Says how to write the lines below a key that holds a single value, in a file; otherwise empty."""
    if origin.override is not None or not isinstance(value, dict) or not value:
        return ""
    return f"; indent {next(iter(value))} no deeper than {path.rpartition('.')[2]}, which is not a section"
