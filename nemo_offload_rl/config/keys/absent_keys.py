"""Fills in the values of absent keys: the schema's (`IfAbsent`), and those that other keys decide."""

import copy
from collections.abc import Mapping
from typing import Any, get_args, get_origin, is_typeddict

from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.keys.section_kinds import is_kind
from nemo_offload_rl.config.keys.tree import alternatives, hints_of, if_absent
from nemo_offload_rl.config.schema import GRPOMasterConfig
from nemo_offload_rl.config.schema.residency import ResidencyConfig
from nemo_offload_rl.named_datasets import NAMED_DATASETS

# Keys of a dataset that `data.default` may hold for all datasets (nemo_rl/data/datasets/utils.py,
# `update_single_dataset_config`).
SHARED_DATASET_KEYS = (
    "dataset_name", "data_path", "split", "input_key", "output_key", "prompt_key", "chosen_key", "rejected_key",
)  # fmt: skip

# The names of NeMo-RL's environment for math, and its default verifier, where `env.NAME` has no reward of its own.
MATH_ENVIRONMENTS = ("math", "math_default")
MATH_VERIFY_IMPL = "hf_math_verify"

# Absent keys of `env.NAME` with a `math_verify_impl`, and with `reward: python`, whose function may keep a state or ask
# a model.
IF_ABSENT_WITH_MATH_VERIFY: dict[str, Any] = {"num_workers": 8, "time_limit_s": 10.0}
IF_ABSENT_WITH_PYTHON: dict[str, Any] = {"num_workers": 1, "time_limit_s": 60.0}

# `policy.generation.vllm_kwargs.max_num_seqs` with vLLM: sequences that an engine runs at once, as many as vLLM
# captures CUDA graphs for. vLLM's own default, 256 or 1024, depends on the GPU, which the plan would have to know.
MAX_NUM_SEQS = 512

# The section that a recipe may write as `auto`, and the keys that this sets to auto; the others get their values as
# absent keys.
RESIDENCY = "policy.residency"
_AUTO: Mapping[str, Any] = {"table": {"generate": {"params": "auto", "optimizer_state": "auto"}}}


def section_of_auto(path: str, value: Any) -> dict[str, Any] | None:
    """Returns the section that `auto` stands for; None for any other value, or if `auto` stands for no section here.

    Args:
        path: the section's full path.
        value: the recipe's value at this path.
    """
    if value != "auto" or path != RESIDENCY:
        return None
    section = copy.deepcopy(dict(_AUTO))
    _fill(ResidencyConfig, section)
    return section


def share_dataset_keys(config: dict[str, Any]) -> dict[str, str]:
    """Moves the keys of datasets in `data.default` into the datasets that lack them, as NeMo-RL does.

    Args:
        config: a recipe's config, modified in place.

    Returns:
        The path in `data.default` of each moved key, by its path in a dataset.
    """
    data = config["data"] if isinstance(config.get("data"), dict) else {}
    default = data["default"] if isinstance(data.get("default"), dict) else {}
    shared = {key: default.pop(key) for key in SHARED_DATASET_KEYS if key in default}
    written_as = {}
    for role in ("train", "validation"):
        for path, section in datasets_of(data, role).items():
            for key in [key for key, value in shared.items() if value is not None and key not in section]:
                section[key] = copy.deepcopy(shared[key])
                written_as[f"{path}.{key}"] = f"data.default.{key}"
    return written_as


def resolve_absent_keys(config: dict[str, Any]) -> None:
    """Fills in the absent keys of the sections that a recipe has, and the sections that it writes as `auto`.

    Args:
        config: a recipe's config, modified in place.
    """
    data, policy, grpo, environments = (
        config[name] if isinstance(config.get(name), dict) else {} for name in ("data", "policy", "grpo", "env")
    )
    if data.get("default", {}) is None:
        data["default"] = {}
    for role in ("train", "validation"):
        for dataset in datasets_of(data, role).values():
            named = NAMED_DATASETS.get(str(dataset.get("dataset_name")))
            if named is not None:
                further = named.if_absent_in_training if role == "train" else {}
                dataset |= named.if_absent | further | dataset
    _resolve_environments(environments)
    _resolve_vllm(policy)
    # NeMo-RL reads these from the estimator alone.
    for name in ("normalize_rewards", "use_leave_one_out_baseline"):
        if isinstance(grpo.get("adv_estimator"), dict) and name in grpo["adv_estimator"]:
            grpo.setdefault(name, grpo["adv_estimator"][name])
    if (section := section_of_auto(RESIDENCY, policy.get("residency"))) is not None:
        policy["residency"] = section
    _fill(next((spec.schema for name, spec in ALGORITHMS.items() if name in config), GRPOMasterConfig), config)


def _fill(annotation: Any, value: Any) -> None:
    """Fills in the absent keys of a section with this annotation, and of the sections in it."""
    for kind in alternatives(annotation):
        if get_origin(kind) in (list, dict) and isinstance(value, get_origin(kind)):
            for item in value if isinstance(value, list) else value.values():
                _fill(get_args(kind)[-1], item)
        elif is_typeddict(kind) and isinstance(value, dict) and is_kind(kind, value):
            for name, hint in hints_of(kind).items():
                absent = if_absent(hint)
                if absent is not None:
                    value.setdefault(name, copy.deepcopy(absent.value))
                if name in value:
                    _fill(hint, value[name])


def datasets_of(data: Mapping[str, Any], role: str) -> dict[str, dict[str, Any]]:
    """Returns the section of the training data, or the sections of the validation datasets, by their paths.

    Args:
        data: the section ``data`` of a recipe.
        role: the key in this section, ``train`` or ``validation``.
    """
    found, path = data[role] if role in data else None, f"data.{role}"
    sections = (
        {f"{path}.{number}": item for number, item in enumerate(found)} if isinstance(found, list) else {path: found}
    )
    return {path: section for path, section in sections.items() if isinstance(section, dict)}


def splits_validation_data(train: Mapping[str, Any]) -> bool:
    """Returns whether validation data is split off the training data, including by default.

    Args:
        train: the section ``data.train``.
    """
    named = NAMED_DATASETS.get(train["dataset_name"])
    is_never_split = named is not None and named.validation_share is None  # as in NeMo-RL
    return not is_never_split and bool(train.get("split_validation_size"))  # a class of the user's may have no such key


def _resolve_environments(environments: Mapping[str, Any]) -> None:
    for name, environment in environments.items():
        if not isinstance(environment, dict):
            continue
        if name in MATH_ENVIRONMENTS and "reward" not in environment:
            environment.setdefault("math_verify_impl", MATH_VERIFY_IMPL)
        if environment.get("math_verify_impl") is not None:
            environment |= IF_ABSENT_WITH_MATH_VERIFY | environment
        elif environment.get("reward") == "python":
            environment |= IF_ABSENT_WITH_PYTHON | environment


def _resolve_vllm(policy: Mapping[str, Any]) -> None:
    generation = policy["generation"] if isinstance(policy.get("generation"), dict) else {}
    if generation.get("backend") == "vllm" and isinstance(generation.get("vllm_kwargs") or {}, dict):
        generation["vllm_kwargs"] = {"max_num_seqs": MAX_NUM_SEQS} | (generation.get("vllm_kwargs") or {})
