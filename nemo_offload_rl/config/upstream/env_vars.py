"""Reads environment variables as NeMo-RL's recipes write them: 1 and true without quotes stand for text."""

from collections.abc import Iterator
from typing import Any

from nemo_offload_rl.config.problems import show

ENV_VARS = ("policy.generation.vllm_cfg.env_vars", "policy.megatron_cfg.env_vars")
"""Sections whose values are text for the environment of a process."""


def values_as_text(path: str, section: Any) -> Iterator[str]:
    """Puts text in place of the numbers and booleans of such a section, and yields a note for each of them.

    Args:
        path: of the section.
        section: changed in place; what is no section, and other values, are left for the schema to refuse.
    """
    if not isinstance(section, dict):
        return
    for name, value in section.items():
        if isinstance(value, bool | int | float):
            section[name] = show(value)
            yield f'{path}.{name} is read as the text "{section[name]}"; quotes around it say the same'
