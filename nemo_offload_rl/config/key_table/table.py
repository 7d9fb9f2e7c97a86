"""The table of what a key may be, and its reader."""

from collections.abc import Iterator
from typing import Any

from nemo_offload_rl.config.key_table.megatron import MEGATRON_ROWS
from nemo_offload_rl.config.key_table.nemo_rl import NEMO_RL_ROWS
from nemo_offload_rl.config.key_table.row import Kind, Row, matches

ROWS: tuple[Row, ...] = (*NEMO_RL_ROWS, *MEGATRON_ROWS)


def rows_of(*kinds: Kind) -> tuple[Row, ...]:
    """Returns the rows of some kinds."""
    return tuple(row for row in ROWS if row.kind in kinds)


def row_of(path: str, *kinds: Kind) -> Row | None:
    """Returns the first row of some kinds about a key without names that the user chooses; None if there is none."""
    return next((row for row in ROWS if row.key == path and row.kind in kinds), None)


def not_allowed(config: Any, kind: Kind) -> Iterator[tuple[Row, str, Any]]:
    """Yields the rows of a kind whose key the config has with another value than they allow, its path and the value."""
    for row in rows_of(kind):
        for path, value in matches(config, row.key):
            if not row.allows(value):
                yield row, path, value


def accepted_paths() -> tuple[str, ...]:
    """Returns NeMo-RL's keys that are accepted with any value."""
    return tuple(row.key for row in rows_of(Kind.NO_EFFECT, Kind.NOT_IN_USE))


def nemo_rl_paths() -> tuple[str, ...]:
    """Returns NeMo-RL's keys that are removed from a recipe."""
    return tuple(row.key for row in rows_of(Kind.OFF_ONLY, Kind.NO_EFFECT, Kind.NOT_IN_USE))
