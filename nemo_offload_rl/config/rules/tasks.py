"""Data and environments."""

import re
from typing import Any

from nemo_offload_rl.config.problems import show, show_choices
from nemo_offload_rl.config.rules.base import Verdict, note, rule


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


@rule("data.train.split_validation_size?", "data.train.seed?")
def splits_have_a_seed(size: float | None, seed: int | None) -> Verdict:
    """A resumed run splits as the first one did, and so does one on another machine."""
    return f"is {size}, which needs data.train.seed" if size and seed is None else None


@rule("data.train.split_validation_size?")
def splits_are_shares_or_counts(size: float | None) -> Verdict:
    """There is no part of a sample."""
    if size is None or isinstance(size, int) or size < 1:
        return None
    return f"is {size}; it is a share below 1, or a number of samples, written without a point"


@rule("data.validation.split_validation_size?")
def validation_data_is_not_split(size: float | None) -> Verdict:
    """The rest of it would be lost."""
    return f"is {size}, but only data.train is split; delete it" if size else None


@note("data.validation.seed?", "data.validation.dataset_name?")
def nothing_is_drawn_of_validation_data(seed: int | None, name: str | None) -> Verdict:
    """Validation reads the first rows, in their order."""
    return None if seed is None or name == "arithmetic" else f"has no effect, since {name} is read in its order"
