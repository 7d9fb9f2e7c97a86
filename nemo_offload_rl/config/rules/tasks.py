"""Rules for data and environments."""

import re
from typing import Any

from nemo_offload_rl.config.keys.absent_keys import datasets_of, splits_validation_data
from nemo_offload_rl.config.problems import show, show_choices
from nemo_offload_rl.config.rules.base import Verdict, note, rule
from nemo_offload_rl.config.schema.value_types import is_import_path
from nemo_offload_rl.named_datasets import CONVERSATIONS, NAMED_DATASETS


@rule("data.default.env_name?", "env")
def environment_is_defined(name: str | None, env: dict[str, Any]) -> Verdict:
    """Requires GRPO to name an environment that judges its answers."""
    if name is None:
        return (
            f"missing; it names the section of env that judges answers: {show_choices(env) if env else 'env is empty'}"
        )
    if name in env:
        return None
    return f"names {show(name)}, but env has {show_choices(env) if env else 'no section'}"


@rule("data.default.env_name?", "env")
def environment_judges_in_one_way(used: str | None, env: dict[str, Any]) -> Verdict:
    """Requires the environment in use to have either reward or math_verify_impl, and none to mix the keys of both."""
    for name, section in env.items():
        has_math = section.get("math_verify_impl") is not None
        if has_math and "reward" in section:
            message = f"is {section['reward']}, but env.{name}.math_verify_impl judges answers, too; delete one of them"
            return f"env.{name}.reward", message
        if not has_math and section.get("reward") != "python" and "time_limit_s" in section:
            return (
                f"env.{name}.time_limit_s",
                f"is read only with env.{name}.math_verify_impl or reward python; delete it",
            )
        if name == used and not has_math and "reward" not in section:
            return (
                f"env.{name}",
                f"has no reward; set env.{name}.math_verify_impl (hf_math_verify or dapo_math_verify) or "
                f"env.{name}.reward (exact_match, numeric_match or python)",
            )
    return None


@note("env")
def rewards_in_the_driver_have_no_workers(env: dict[str, Any]) -> Verdict:
    """Notes that num_workers has no effect on rewards of ours; NeMo-RL's environments always have workers."""
    for name, section in env.items():
        in_driver = section.get("math_verify_impl") is None and section.get("reward") != "python"
        if "num_workers" in section and in_driver:
            return (
                f"env.{name}.num_workers",
                "has no effect: without math_verify_impl or reward python, rewards are computed in the driver",
            )
    return None


@rule("env")
def rewards_have_what_they_need(env: dict[str, Any]) -> Verdict:
    """Requires a function for a Python reward, and none for the others."""
    for name, section in env.items():
        reward, function = section.get("reward"), section.get("reward_function")
        if reward == "python" and function is None:
            return (
                f"env.{name}.reward",
                f"is python, which needs env.{name}.reward_function; set it to package.module:function",
            )
        if reward != "python" and function is not None:
            found = "math_verify_impl" if reward is None else reward
            return f"env.{name}.reward_function", f"is read only with env.{name}.reward python; found {found}"
        if function is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", function):
            return f"env.{name}.reward_function", f"must be written package.module:function; found {show(function)}"
    return None


@rule("data")
def named_datasets_have_the_keys_that_they_read(data: dict[str, Any]) -> Verdict:
    """Requires a split that the named dataset has, and refuses keys that only other datasets read."""
    for path, section in {**datasets_of(data, "train"), **datasets_of(data, "validation")}.items():
        name = section["dataset_name"]
        if name not in NAMED_DATASETS:
            continue
        dataset = NAMED_DATASETS[name]
        if "split" in section and section["split"] not in dataset.splits:
            return f"{path}.split", f"must be {show_choices(dataset.splits)} for {name}; found {section['split']}"
        if "output_key" in section and section["output_key"] not in dataset.output_keys:
            rule_says = f"must be {show_choices(dataset.output_keys)}" if dataset.output_keys else "cannot be set"
            remedy = "" if dataset.output_keys else "; delete it"
            return f"{path}.output_key", f"{rule_says} for {name}; found {section['output_key']}{remedy}"
        if "repeat" in section and dataset.repeat is None:
            return f"{path}.repeat", f"is read only with dataset_name AIME2024 or AIME2025, not {name}; delete it"
        prompt_file = _prompt_file(data, section, "system_prompt_file")
        if name in CONVERSATIONS and prompt_file is not None:
            message = (
                f"must be null for {name}, whose rows contain their own system messages; found {show(prompt_file)}"
            )
            return f"{path}.system_prompt_file", message
    return None


def _prompt_file(data: dict[str, Any], section: dict[str, Any], key: str) -> str | None:
    default = data["default"] if "default" in data else {}
    found: str | None = section[key] if key in section else default[key] if key in default else None
    return found


@rule("data")
def keys_of_all_data_are_in_default(data: dict[str, Any]) -> Verdict:
    """Refuses settings of a class of the user's that would be read from data.default alone."""
    for path, section in {**datasets_of(data, "train"), **datasets_of(data, "validation")}.items():
        for key in ("env_name", "processor"):
            if key in section:
                return f"{path}.{key}", f"is read from data.default alone; write data.default.{key} instead"
    return None


@rule("data.train.split_validation_size?", "data.train.seed?", "data.train.dataset_name?")
def splits_have_a_seed(size: float | None, seed: int | None, name: str | None) -> Verdict:
    """Requires a seed for the split, so that resumed runs, on any machine, split the data in the same way."""
    # Named datasets have a default seed, or are not split; a class of the user's splits its data itself.
    if seed is not None or not size or name in NAMED_DATASETS or is_import_path(name or ""):
        return None
    return f"is {size}, which needs data.train.seed, so that resumed runs split the data in the same way; set that"


@note("data.train.split_validation_size?", "data.train.dataset_name?")
def datasets_that_nemo_rl_does_not_split(size: float | None, name: str | None) -> Verdict:
    """Notes that the split has no effect; NeMo-RL's recipes inherit the key even for datasets with validation data."""
    if not size or splits_validation_data({"dataset_name": name, "split_validation_size": size}):
        return None
    return f"has no effect: as in NeMo-RL, no validation data is split off {name}"


@rule("data.train.split_validation_size?")
def splits_are_shares_or_counts(size: float | None) -> Verdict:
    """Refuses a number of samples that is not an integer."""
    if size is None or isinstance(size, int) or size < 1:
        return None
    return f"is {size}, but must be a share below 1, or a number of samples, written without a decimal point"


@rule("data")
def validation_data_is_not_split(data: dict[str, Any]) -> Verdict:
    """Refuses to split validation data, of which the rest would be lost."""
    for path, section in datasets_of(data, "validation").items():
        if section.get("split_validation_size") and not is_import_path(section["dataset_name"]):
            size = section["split_validation_size"]
            return f"{path}.split_validation_size", f"is {size}, but only data.train is split; delete it"
    return None


@note("data")
def nothing_is_drawn_of_validation_data(data: dict[str, Any]) -> Verdict:
    """Notes that a seed has no effect on validation data, which is read in order from the first row."""
    for path, section in datasets_of(data, "validation").items():
        name = section["dataset_name"]
        if "seed" in section and name != "arithmetic" and not is_import_path(name):
            return (
                f"{path}.seed",
                f"has no effect, since {name} is read in order, from the first row",
            )
    return None
