"""The keys that a recipe may have, as a tree of paths: their comments, kinds of sections, and values where absent."""

import ast
import copy
import inspect
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.installed.declared_fields import SECTIONS, megatron_fields
from nemo_offload_rl.config.key_table.row import PASSES
from nemo_offload_rl.config.key_table.table import rows_of
from nemo_offload_rl.config.problems import KEYS_ALIKE, nearest, show, show_choices
from nemo_offload_rl.config.schema import GRPOMasterConfig
from nemo_offload_rl.config.schema.residency import ResidencyConfig
from nemo_offload_rl.config.schema.value_types import IfAbsent
from nemo_offload_rl.named_datasets import NAMED_DATASETS

ANY_NAME = "*"  # placeholder for a name that the user chooses, as in `env.*.reward`


@dataclass(frozen=True)
class Key:
    """Describes a key of the recipe schema.

    Attributes:
        path: the key's full path, with `*` for a name that the user chooses.
        owner: the TypedDict that declares it, or None below `*`.
        annotation: its type, without Required and NotRequired.
        required: whether a recipe that has the section must have the key.
    """

    path: str
    owner: type | None
    annotation: Any
    required: bool

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def comment(self) -> str:
        """The comment above the key in the schema's source, as one line."""
        return key_comments(self.owner)[self.name] if self.owner is not None else ""


@cache
def schema_keys(root: type) -> Mapping[str, Key]:
    """Returns all keys of an algorithm's schema, by path, sections before their keys."""
    return types.MappingProxyType({key.path: key for key in _walk(root, "")})


@cache
def hints_of(typed_dict: type) -> dict[str, Any]:
    """Returns the annotations of all keys of a TypedDict, those that it inherits included."""
    return get_type_hints(typed_dict, include_extras=True)


def _walk(annotation: Any, path: str) -> Iterator[Key]:
    for alternative in alternatives(annotation):
        if is_typeddict(alternative):
            for name, hint in hints_of(alternative).items():
                child = f"{path}.{name}" if path else name
                required = name in alternative.__required_keys__
                yield Key(child, _declaring_class(alternative, name), _without_markers(hint), required)
                yield from _walk(hint, child)
        elif get_origin(alternative) is dict and is_typeddict(get_args(alternative)[1]):
            child = f"{path}.{ANY_NAME}"
            yield Key(child, None, get_args(alternative)[1], False)
            yield from _walk(get_args(alternative)[1], child)


def _without_markers(annotation: Any) -> Any:
    while get_origin(annotation) in (Required, NotRequired):
        annotation = get_args(annotation)[0]
    return annotation


def if_absent(annotation: Any) -> IfAbsent | None:
    """Returns the value of an absent key with this annotation; None if the key then has none."""
    marks = getattr(_without_markers(annotation), "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, IfAbsent)), None)


def alternatives(annotation: Any) -> Iterator[Any]:
    """Yields the types that a value may have: the members of a union, without Annotated."""
    annotation = _without_markers(annotation)
    if get_origin(annotation) is Annotated:
        yield from alternatives(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from alternatives(member)
    else:
        yield annotation


def _declaring_class(typed_dict: type, name: str) -> type:
    for base in types.get_original_bases(typed_dict):
        if is_typeddict(base) and name in hints_of(base):
            return _declaring_class(base, name)
    return typed_dict


@cache
def key_comments(typed_dict: type) -> dict[str, str]:
    """Returns the comment above each key that a TypedDict declares, as one line, with the value of an absent key."""
    lines = inspect.getsource(typed_dict).splitlines()
    [definition] = ast.parse("\n".join(lines)).body
    assert isinstance(definition, ast.ClassDef)
    comments = {}
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            block: list[str] = []
            for line in reversed(lines[: statement.lineno - 1]):
                if not line.strip().startswith("#"):
                    break
                block.insert(0, line.strip().removeprefix("#").strip())
            text, absent = " ".join(block), if_absent(hints_of(typed_dict)[statement.target.id])
            if absent is not None and "bsent: " not in text:  # that of a section is in words
                text += f" Absent: {absent.value if isinstance(absent.value, str) else show(absent.value)}."
            comments[statement.target.id] = text
    return comments


def find_key(root: type, path: str) -> Key | None:
    """Returns the schema's key for a path in a recipe; names that the user chooses match `*`."""
    return schema_keys(root).get(_with_any_name(root, path))


def _with_any_name(root: type, path: str) -> str:
    keys = schema_keys(root)
    parts = path.split(".")
    for index in range(1, len(parts)):
        if f"{'.'.join(parts[:index])}.{ANY_NAME}" in keys:
            parts[index] = ANY_NAME
    return ".".join(parts)


def is_valid_key(path: str) -> bool:
    """Returns whether a path is a key of any algorithm's schema or a Megatron field."""
    section, _, name = path.replace("megatron_cfg.model_overrides.", "megatron_cfg.").rpartition(".")
    if section in SECTIONS and name in megatron_fields(section):
        return True
    return any(find_key(spec.schema, path) for spec in ALGORITHMS.values())


def nearest_key(root: type, path: str, also: tuple[str, ...] = ()) -> str | None:
    """Returns the full path of the valid key that an unknown one most likely means; never one that is refused.

    Args:
        root: the algorithm's schema.
        path: the unknown key.
        also: further paths that are accepted, suggested in the same section only.
    """
    section, _, name = path.rpartition(".")
    pattern = _with_any_name(root, path).rpartition(".")[0]
    paths = list(schema_keys(root))
    paths += [row.key for row in rows_of(*PASSES)]
    siblings = [key.rpartition(".")[2] for key in (*paths, *also) if key.rpartition(".")[0] in (section, pattern)]
    close = nearest(name, siblings, cutoff=KEYS_ALIKE)
    if close:
        return f"{section}.{close}" if section else close
    return next((key for key in paths if key.rpartition(".")[2] == name and ANY_NAME not in key), None)


MARK = "dataset_name"


def is_kind(kind: type, section: Mapping[str, Any]) -> bool:
    """Returns whether a section is of a kind; also true if no key tells kinds apart."""
    return MARK not in kind.__annotations__ or section.get(MARK) in _marks(kind)


def _marks(kind: type) -> tuple[str, ...]:
    mark = hints_of(kind)[MARK]
    return get_args(mark) if get_origin(mark) is Literal else ()


def kind_of(root: type, section: str, value: Any) -> type | None:
    """Returns the TypedDict that a section's discriminating key selects.

    Args:
        root: the algorithm's schema.
        section: the section's path.
        value: the recipe's value at this path.

    Returns:
        The TypedDict; None for a section of one kind, or if the discriminating key is missing or wrong.
    """
    mark = value[MARK] if isinstance(value, Mapping) and MARK in value else None
    return kinds_of(root, section).get(mark) if isinstance(mark, str) else None


def kinds_of(root: type, section: str) -> dict[str, type]:
    """Returns the TypedDicts of a section by the value that selects each; empty for a section of one kind.

    Args:
        root: the algorithm's schema.
        section: the section's path, or the path of one item in a list of such sections.
    """
    before, _, last = section.rpartition(".")
    key = find_key(root, before if last.isdecimal() else section)
    if key is None:
        return {}
    kinds = [kind for kind in alternatives(key.annotation) if is_typeddict(kind) and MARK in kind.__annotations__]
    return {mark: kind for kind in kinds for mark in _marks(kind)}


def unknown_in_kind(root: type, section: str, value: Any, name: str) -> str | None:
    """Returns the message about a key that the section's kind lacks; None for a section without kinds.

    Args:
        root: the algorithm's schema.
        section: the section's path.
        value: the recipe's value at this path.
        name: the unknown key.
    """
    kind = kind_of(root, section, value)
    if kind is None:
        return None
    names = [key for key in _names(kind) if key != MARK]
    others = [mark for mark, other in kinds_of(root, section).items() if name in _names(other)]
    if others:
        return (
            f"is a key of {MARK} {show_choices(others)}, but {section}.{MARK} is {show(value[MARK])}, whose keys are "
            f"{', '.join(names)}; delete it (on the command line: ~{section}.{name})"
        )
    close = nearest(name, names, cutoff=KEYS_ALIKE)
    if close is not None:
        return f"unknown key; nearest valid key: {section}.{close}"
    return f"unknown key; {section} with {MARK} {show(value[MARK])} has {', '.join(names)}"


def _names(kind: type) -> list[str]:
    """Returns the keys of a kind: first its own, then those that every kind has."""
    return list(dict.fromkeys([*key_comments(kind), *hints_of(kind)]))


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
