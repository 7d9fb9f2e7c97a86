"""Rules for data and environments."""

from typing import Any

from nemo_offload_rl.config.keys.tree import datasets_of
from nemo_offload_rl.config.problems import show, show_choices
from nemo_offload_rl.config.rules.base import RuleResult, rule
from nemo_offload_rl.config.schema.value_types import is_import_path
from nemo_offload_rl.named_datasets import CONVERSATIONS, NAMED_DATASETS


@rule("data.default.env_name?", "env")
def env_name(name: str | None, env: dict[str, Any]) -> RuleResult:
    """Requires GRPO to name an environment that judges its answers."""
    if name in env:
        return None
    found = "missing; it names the section of env that judges answers" if name is None else f"names {show(name)}"
    return f"{found}: env has {show_choices(env) if env else 'no section'}"


@rule("data.default.env_name?", "env")
def env_reward(used: str | None, env: dict[str, Any]) -> RuleResult:
    """Requires the environment in use to have either reward or math_verify_impl, and a Python reward its function."""
    section = env.get(used) if used else None
    if section is None:
        return None
    reward, math = section.get("reward"), section["math_verify_impl"]
    if (reward is None) == (math is None):
        return f"env.{used}", (
            "must have either reward (exact_match, numeric_match or python) or math_verify_impl (hf_math_verify or "
            f"dapo_math_verify); found reward {show(reward)}, math_verify_impl {show(math)}"
        )
    if (reward == "python") != (section.get("reward_function") is not None):
        return f"env.{used}.reward", "must be python with reward_function, and only with it; change either"
    return None


@rule("data")
def dataset_keys(data: dict[str, Any]) -> RuleResult:
    """Requires values that the named dataset has, and refuses keys that only other datasets read."""
    for path, section in {**datasets_of(data, "train"), **datasets_of(data, "validation")}.items():
        name = section["dataset_name"]
        if name not in NAMED_DATASETS:
            continue
        dataset = NAMED_DATASETS[name]
        for key, values in (("split", dataset.splits), ("output_key", dataset.output_keys)):
            if key in section and section[key] not in values:
                remedy = f"must be {show_choices(values)}" if values else "must be deleted"
                return f"{path}.{key}", f"{remedy} for {name}; found {show(section[key])}"
        if "repeat" in section and dataset.repeat is None:
            return f"{path}.repeat", f"must be deleted for {name}, which does not read it"
        if "max_samples" in section and not dataset.reads_max_samples:
            return f"{path}.max_samples", f"must be deleted for {name}, which does not read it"
        prompt_file = (data["default"] | section).get("system_prompt_file")
        if name in CONVERSATIONS and prompt_file is not None:
            return f"{path}.system_prompt_file", f"must be null for {name}, whose rows have their own system messages"
    return None


@rule("data")
def dataset_default_keys(data: dict[str, Any]) -> RuleResult:
    """Refuses settings of a class of the user's that would be read from data.default alone."""
    for path, section in {**datasets_of(data, "train"), **datasets_of(data, "validation")}.items():
        for key in ("env_name", "processor"):
            if key in section:
                return f"{path}.{key}", f"is read from data.default alone; write data.default.{key} instead"
    return None


@rule("data.train.split_validation_size?", "data.train.seed?", "data.train.dataset_name?")
def dataset_split_seed(size: float | None, seed: int | None, name: str | None) -> RuleResult:
    """Requires a seed for the split, so that resumed runs, on any machine, split the data in the same way."""
    # Named datasets have a default seed, or are not split; a class of the user's splits its data itself.
    if seed is not None or not size or name in NAMED_DATASETS or is_import_path(name or ""):
        return None
    return f"is {size}, which needs data.train.seed, so that resumed runs split the data in the same way; set that"


@rule("data")
def dataset_validation_split(data: dict[str, Any]) -> RuleResult:
    """Refuses to split validation data, of which the rest would be lost."""
    for path, section in datasets_of(data, "validation").items():
        if section.get("split_validation_size") and not is_import_path(section["dataset_name"]):
            return f"{path}.split_validation_size", "is set, but only data.train is split; delete it"
    return None
