"""Measures what a YAML text expands to before anything is built: its depth and its number of values.

Composing deeply nested text overflows the C stack, and twenty lines of aliases can expand to a million values, each
of which expands to a million more. The parser emits events one by one, so counting them is safe.
"""

from dataclasses import dataclass
from typing import Any

import yaml

from nemo_offload_rl.config.limits import MAX_DEPTH, MAX_VALUES


@dataclass
class _Size:
    """Counts the values in a value, itself included, and the levels below it."""

    values: int = 1
    depth: int = 0

    def add(self, child: "_Size") -> None:
        self.values += child.values
        self.depth = max(self.depth, child.depth + 1)


class TooLargeError(ValueError):
    """Says that a text expands to too many values or levels; the message continues "the file".

    Attributes:
        line: the line of the excess, from 1.
    """

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


def measure(loader: Any) -> int:
    """Counts the values of a text, each alias with everything it expands to.

    Args:
        loader: a fresh PyYAML loader; it is at the end of the text afterwards.

    Raises:
        TooLargeError: the text is nested deeper than `MAX_DEPTH`, or has more than `MAX_VALUES` values.
        yaml.YAMLError: the parser rejects the text.
    """
    anchors: dict[str | None, _Size] = {}
    open_values: list[tuple[_Size, str | None]] = [(_Size(0), None)]

    def close(size: _Size, line: int) -> None:
        outer = open_values[-1][0]
        outer.add(size)
        if outer.values > MAX_VALUES:
            raise TooLargeError(
                line,
                f"expands to more than {MAX_VALUES:,} keys and values, each alias (*name) counted with all that it "
                "expands to; delete some",
            )
        if len(open_values) - 1 + size.depth > MAX_DEPTH:
            raise TooLargeError(
                line,
                f"is nested more than {MAX_DEPTH} levels deep here, aliases (*name) included; no key lies that deep",
            )

    while loader.check_event():
        event = loader.get_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.CollectionStartEvent):
            open_values.append((_Size(), event.anchor))
            if len(open_values) - 1 > MAX_DEPTH:
                close(_Size(), line)
        elif isinstance(event, yaml.CollectionEndEvent):
            size, anchor = open_values.pop()
            if anchor is not None:
                anchors[anchor] = size
            close(size, line)
        elif isinstance(event, yaml.ScalarEvent):
            if event.anchor is not None:
                anchors[event.anchor] = _Size()
            close(_Size(), line)
        elif isinstance(event, yaml.AliasEvent):
            # An undefined alias, or one inside the value it refers to, counts as one value; the reader refuses both.
            close(anchors.get(event.anchor, _Size()), line)
    return open_values[0][0].values
