"""A row of the table of what a key may be."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from nemo_offload_rl.config.problems import show


class Kind(Enum):
    """What a row says about its key."""

    OFF_ONLY = auto()
    """NeMo-RL's key of a feature that this package lacks: refused with other values, and then removed."""
    NO_EFFECT = auto()
    """Accepted with any value and removed, since it has nothing to change here; a note says so."""
    NOT_IN_USE = auto()
    """The same, without a note: it only tunes a part that is not in use."""
    OTHER_VALUE = auto()
    """A key of the schema, for which NeMo-RL has values that are refused here."""
    FIXED = auto()
    """Megatron's field that this package sets itself or does not support: refused with other values."""
    OFF_ON_CPU = auto()
    """Set to the row's first value on a machine without a GPU."""
    UNKNOWN_SIZES = auto()
    """Megatron's field with whose other values the plan does not know the model's sizes."""
    TESTED = auto()
    """Megatron's field that passes; `why` names the test that shows its effect."""
    PLAIN = auto()
    """Megatron's field that passes: a size or a constant that the model or a kernel reads; `why` says which."""
    UNTESTED = auto()
    """Megatron's field that passes without a test, since it needs what our machines lack; `why` says what."""


PASSES = (Kind.TESTED, Kind.PLAIN, Kind.UNTESTED)


@dataclass(frozen=True)
class Row:
    """Says what a key may be.

    Attributes:
        key: the key's full path, with `*` for a name that the user chooses.
        kind: what the row says about it.
        why: the rule, in words that follow the key.
        values: the allowed values, the usual one first; empty if there is none.
        remedy: what to do instead, with `{off}` for the usual value; empty for leaving the key at that or deleting it.
        unless: a key and the value with which the row does not apply.
    """

    key: str
    kind: Kind
    why: str
    values: tuple[Any, ...] = ()
    remedy: str = ""
    unless: tuple[str, Any] | None = None

    def allows(self, value: Any) -> bool:
        """Returns whether the value is one of the row's."""
        return any(same(value, allowed) for allowed in self.values)

    def refusal(self, value: Any) -> str:
        """Returns what is wrong with a value of the key, and what to do."""
        return f"{self.why} (found {show(value)}); {self.shown_remedy}"

    @property
    def shown_remedy(self) -> str:
        """What to do instead of another value."""
        if not self.values:
            return self.remedy or "delete it"
        return (self.remedy or "leave it at {off} or delete the key").replace("{off}", show(self.values[0]))


def each(section: str, names: str, kind: Kind, why: str, values: tuple[Any, ...] = (), remedy: str = "") -> list[Row]:
    """Returns the same row for several keys of a section, whose names are separated by spaces."""
    return [Row(f"{section}.{name}", kind, why, values, remedy) for name in names.split()]


def same(value: Any, other: Any) -> bool:
    """Returns whether two values are equal, where false is not 0 and true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def matches(config: dict[str, Any], pattern: str) -> Iterator[tuple[str, Any]]:
    """Yields the paths in the config that match a pattern with `*`, and their values."""
    found: list[tuple[str, Any]] = [("", config)]
    for part in pattern.split("."):
        found = [
            (f"{path}.{name}" if path else name, section[name])
            for path, section in found
            if isinstance(section, dict)
            for name in (list(section) if part == "*" else [part])
            if name in section
        ]
    yield from found
