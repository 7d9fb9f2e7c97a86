"""The keys that a recipe may have: the schema's TypedDicts as a tree of paths, with their comments."""

import ast
import inspect
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, NotRequired, Required, Union, get_args, get_origin, get_type_hints, is_typeddict

from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.installed.declared_fields import SECTIONS, megatron_fields
from nemo_offload_rl.config.key_table.row import PASSES
from nemo_offload_rl.config.key_table.table import rows_of
from nemo_offload_rl.config.problems import KEYS_ALIKE, nearest, show
from nemo_offload_rl.config.schema.value_types import IfAbsent

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
