"""Checks a recipe against the schema and Megatron's fields, and says what is wrong with each key and what to do.

Also reads `policy.megatron_cfg.model_overrides`, NeMo-RL's place for fields of the model that have no key of their own.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from nemo_offload_rl.config.installed.declared_fields import SECTIONS, check_field, megatron_fields
from nemo_offload_rl.config.key_table.row import PASSES, Kind
from nemo_offload_rl.config.key_table.table import (
    OTHER_ALGORITHMS,
    OTHER_DATASETS,
    accepted_paths,
    nemo_rl_paths,
    row_of,
)
from nemo_offload_rl.config.keys.tree import (
    find_key,
    key_comments,
    kind_of,
    kinds_of,
    nearest_key,
    schema_keys,
    unknown_in_kind,
)
from nemo_offload_rl.config.problems import did_you_mean, show, show_choices, unquoted
from nemo_offload_rl.config.schema.value_types import TAGS

_UNCHECKED = "policy.unchecked_megatron_fields"

ABSENT: Any = object()
"""Returned by `value_at` for a key that the recipe does not have."""


@cache
def _adapter(schema: type) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def schema_problems(config: dict[str, Any], schema: type) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with a recipe according to its schema: paths of keys, each with a message."""
    try:
        _adapter(schema).validate_python(config)
    except ValidationError as errors:
        for error in errors.errors(include_url=False):
            path, value = _locate(config, error["loc"])
            if error["type"] == "extra_forbidden":
                yield from _unknown_keys(schema, config, path, value)
            else:
                path = f"{path}.dataset_name" if error["type"].startswith("union_tag") else path
                yield path, _describe(schema, config, path, value, dict(error))


def _locate(config: dict[str, Any], loc: tuple[Any, ...]) -> tuple[str, Any]:
    """Converts the location of a pydantic error to a path of the recipe and the value there (None if it is missing)."""
    node: Any = config
    parts = []
    for index, item in enumerate(loc):
        if item in TAGS:
            continue
        if isinstance(node, dict) and item not in node and index < len(loc) - 1:
            continue  # the tag of a union, such as data.train.arithmetic.num_digits
        if isinstance(node, dict) and item not in node and item == node.get("dataset_name"):
            continue
        parts.append(str(item))
        node = node[item] if (isinstance(node, dict) and item in node) or isinstance(node, list) else None
    return ".".join(parts), node


def _unknown_keys(schema: type, config: dict[str, Any], path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yields the problem of an unknown key; for a section that only upstream has, the problems of its unknown keys."""
    if isinstance(value, dict) and any(name.startswith(f"{path}.") for name in nemo_rl_paths()):
        for name, item in value.items():
            yield from _unknown_keys(schema, config, f"{path}.{name}", item)
        return
    if path in OTHER_ALGORITHMS:
        yield path, f"{OTHER_ALGORITHMS[path]} is not supported here; delete the section"
        return
    section, _, name = path.rpartition(".")
    message = unknown_in_kind(schema, section, value_at(config, section), name)
    close = nearest_key(schema, path, accepted_paths())
    names = [key.name for key in schema_keys(schema).values() if key.path.rpartition(".")[0] == section]
    listed = "" if close or not 0 < len(names) <= 4 else f"; {section} has {', '.join(names)}"
    yield path, message or f"unknown key{f'; nearest valid key: {close}' if close else listed}"


# The type of a pydantic error: what is expected, with names from its context.
_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a section (a mapping)",
    "model_attributes_type": "a section (a mapping)",
    "string_too_short": "text that is not empty",
    "finite_number": "a finite number",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
}


def _describe(schema: type, config: dict[str, Any], path: str, value: Any, error: dict[str, Any]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        section, _, name = path.rpartition(".")
        kind, key = kind_of(schema, section, value_at(config, section)), find_key(schema, path)
        meaning = key_comments(kind).get(name) if kind is not None else key.comment if key is not None else ""
        return f"missing (its meaning: {meaning})" if meaning else "missing"
    if kind == "union_tag_not_found":
        return f"missing; it is {show_choices(kinds_of(schema, path.rpartition('.')[0]))}"
    if kind == "union_tag_invalid":
        kinds = kinds_of(schema, path.rpartition(".")[0])
        remedies = [OTHER_DATASETS[mark] for mark in kinds if mark in OTHER_DATASETS]
        built_in = [mark for mark, own in kinds.items() if "data_path" not in own.__annotations__]
        by_name = f"by name there are {show_choices(built_in)}"
        return f"{show(context['tag'])} is not supported here; {'; '.join(remedies)}; {by_name}"
    other = row_of(path, Kind.OTHER_VALUE)
    if other is not None and (kind == "literal_error" or value is None):
        return other.refusal(value)
    if kind == "literal_error":
        return _wrong_choice(value, str(context["expected"]))
    found = f"found {show(value)}"
    if kind not in _EXPECTED:
        return f"{error['msg'][0].lower()}{error['msg'][1:]}; {found}"
    hint = unquoted(value) if kind in ("int_type", "float_type") else ""
    if kind == "bool_type" and value in ("true", "false"):
        hint = "; write it without quotes"
    if value is None and path in getattr(schema, "__optional_keys__", ()):
        hint = f"; the override ~{path} deletes it"
    if kind == "list_type" and (value is None or isinstance(value, str)):
        hint = f"; write [{value or ''}]"
    return f"must be {_EXPECTED[kind].format(**context)}; {found}{hint}"


def _wrong_choice(value: Any, choices: str) -> str:
    names = [choice.strip("'") for choice in choices.replace(" or ", ", ").split(", ")]
    shown = choices.lower() if choices in ("True", "False") else choices
    return f"must be {shown}; found {show(value)}{did_you_mean(value, names)}"


def megatron_problems(config: dict[str, Any], schema: type) -> Iterator[tuple[str, str]]:
    """Yields problems of Megatron's fields: unknown names, wrong types, and fields that a recipe may not set."""
    for section in SECTIONS:
        values = value_at(config, section)
        if not isinstance(values, dict):
            continue
        fields = megatron_fields(section)
        for name, value in values.items():
            path = f"{section}.{name}"
            key = find_key(schema, path)
            if key is None and name not in fields:
                yield from _unknown_keys(schema, config, path, value)
                continue
            row = row_of(path, Kind.FIXED)
            refusal = row.refusal(value) if row is not None and not row.allows(value) else None
            wrong_type = check_field(section, name, value) if key is None else None
            if wrong_type and not (refusal and value not in (None, False)):
                yield path, wrong_type
            elif refusal:
                yield path, refusal
    if value_at(config, _UNCHECKED) is not True:
        for path, value in unchecked_fields(config, schema):
            yield (
                path,
                f"is a field of Megatron whose effect was not checked here (found {show(value)}); delete it, or set "
                f"{_UNCHECKED} to true to pass it on as it is",
            )


def unchecked_fields(config: dict[str, Any], schema: type) -> Iterator[tuple[str, Any]]:
    """Yields Megatron's fields that no key of the schema and no row of the table is about, and their values."""
    for section in SECTIONS:
        for name in megatron_fields(section):
            path = f"{section}.{name}"
            value = value_at(config, path)
            if value is not ABSENT and row_of(path, Kind.FIXED, *PASSES) is None and find_key(schema, path) is None:
                yield path, value


def value_at(config: Mapping[str, Any], path: str) -> Any:
    """Returns the value at a key's full path; `ABSENT` if there is none."""
    node: Any = config
    for name in path.split("."):
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        else:
            return ABSENT
    return node


_SECTION = "policy.megatron_cfg"
_PATH = f"{_SECTION}.model_overrides"


def move_model_overrides(config: dict[str, Any], schema: type) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Moves the fields of `model_overrides` into `megatron_cfg`, where they mean the same and are checked.

    Args:
        config: the recipe's config, modified in place.
        schema: the schema of its algorithm.

    Returns:
        The full path in the recipe of each moved field, by its path in `megatron_cfg`; and a path with a message for
        each field that has a key of its own.
    """
    written_as: dict[str, str] = {}
    problems: list[tuple[str, str]] = []
    policy = config["policy"] if isinstance(config.get("policy"), dict) else {}
    section = policy["megatron_cfg"] if isinstance(policy.get("megatron_cfg"), dict) else {}
    fields = section.get("model_overrides")
    if not isinstance(fields, dict):  # absent, null, or reported by the schema
        return written_as, problems
    section["model_overrides"] = {}
    for name, value in fields.items():
        path, own = f"{_PATH}.{name}", f"{_SECTION}.{name}"
        if name in section or own in nemo_rl_paths() or find_key(schema, own) is not None:
            problems.append((path, f"has a key of its own, {own}; set that, and delete this one"))
        elif value is None:
            problems.append((path, "must have a value; delete it, which leaves the model's own value"))
        else:
            section[name] = value
            written_as[own] = path
    return written_as, problems
