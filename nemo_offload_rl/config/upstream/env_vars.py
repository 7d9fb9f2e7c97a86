"""Reads environment variables as NeMo-RL's recipes write them: 1 and true without quotes are read as text."""

from collections.abc import Iterator
from typing import Any

from nemo_offload_rl.config.problems import show

ENV_VARS = ("policy.generation.vllm_cfg.env_vars", "policy.megatron_cfg.env_vars")
"""Sections of environment variables, whose values are text."""


def values_as_text(path: str, section: Any) -> Iterator[str]:
    """Replaces the numbers and booleans of a section of variables by text, and yields a note for each of them.

    Args:
        path: the section's path.
        section: modified in place; other values, or a value that is no section, are left for the schema to refuse.
    """
    if not isinstance(section, dict):
        return
    for name, value in section.items():
        if isinstance(value, bool | int | float):
            section[name] = show(value)
            yield f'{path}.{name} is read as the text "{section[name]}"; writing it in quotes means the same'
