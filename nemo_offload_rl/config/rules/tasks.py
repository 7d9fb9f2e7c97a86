"""Data and environments."""

import re
from typing import Any

from nemo_offload_rl.config.problems import show, show_choices
from nemo_offload_rl.config.rules.base import Verdict, rule


@rule("data.default.env_name?", "env")
def environment_is_defined(name: str | None, env: dict[str, Any]) -> Verdict:
    """GRPO has a judge of its answers."""
    if name is None:
        return (
            f"missing; it names the section of env that judges answers: {show_choices(env) if env else 'env is empty'}"
        )
    if name in env:
        return None
    return f"names {show(name)}, but env has {show_choices(env) if env else 'no section'}"


@rule("env")
def rewards_have_what_they_need(env: dict[str, Any]) -> Verdict:
    """A Python reward names its function, and no other does."""
    for name, section in env.items():
        function = section["reward_function"] if "reward_function" in section else None
        if section["reward"] == "python" and function is None:
            return f"env.{name}.reward", f"is python, which needs env.{name}.reward_function: package.module:function"
        if section["reward"] != "python" and function is not None:
            return (
                f"env.{name}.reward_function",
                f"is read only with env.{name}.reward python; found {section['reward']}",
            )
        if function is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", function):
            return f"env.{name}.reward_function", f"is written package.module:function; found {show(function)}"
    return None
