"""The model architectures that the installed Megatron-Bridge supports, read from its source without importing it."""

import ast
import re
from collections.abc import Iterator
from functools import cache

from nemo_offload_rl.config.installed.megatron_fields import megatron_root

_BRIDGES = "bridge/models"
_CALL = re.compile(r"register_bridge\(\s*source=([\w\"']+)")


@cache
def bridged_architectures() -> frozenset[str]:
    """Returns the transformers classes for which Megatron-Bridge registers a bridge."""
    return frozenset(
        name
        for path in sorted((megatron_root() / _BRIDGES).rglob("*_bridge.py"))
        for name in _in(path.read_text(encoding="utf-8"))
    )


def _in(source: str) -> Iterator[str]:
    for found in _CALL.finditer(source):
        name = found[1]
        if name.startswith(("'", '"')):
            yield name.strip("'\"")
            continue
        constant = re.search(rf"^{name}\s*=\s*(\"\w+\"|'\w+')", source, re.MULTILINE)
        yield ast.literal_eval(constant[1]) if constant is not None else name
