"""Writes docs/recipe-keys.md from the schema's comments and the tables of fields that are refused.

`make docs` runs it; the page is not committed.
"""

import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

import annotated_types

from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.installed.declared_fields import SECTIONS
from nemo_offload_rl.config.key_table.row import PASSES, Kind
from nemo_offload_rl.config.key_table.table import OTHER_DATASETS, rows_of
from nemo_offload_rl.config.keys.tree import Key, key_comments, schema_keys
from nemo_offload_rl.config.problems import show_choices

PAGE = Path(__file__).parent.parent / "docs" / "recipe-keys.md"

INTRO = """# Every key of a recipe

<!-- Written by tools/keys_page.py from the schema's comments: change those, not this page. -->

A recipe is YAML. [Recipes](recipes.md) tells how they inherit and how the command line changes them; `nemo-offload-rl
validate RECIPE` prints one with everything resolved, or everything that is wrong with it. What a recipe does not set,
it inherits from the files in its `defaults:`. The keys marked *optional* may be absent, and their text says what
absence means.
"""

MEGATRON = """## Megatron's own fields

`policy.megatron_cfg`, its `optimizer` and its `distributed_data_parallel_config` also take fields of the Megatron
config that they stand for, by their own names, with the types of the installed Megatron:
"""

PASSING = """
These fields pass; others are refused, unless `policy.unchecked_megatron_fields` is true. A test file shows the effect
of the first ones, the next ones are constants that Megatron reads, and the last ones need what our machines lack:

| field | test or meaning |
|---|---|
"""

FIXED = """
These fields may only have the values given here, since this package sets them itself or does not support them yet:

| field | only values | why |
|---|---|---|
"""

ON_CPU = """
Without a GPU these get the first of the values given here, and a line of the log says so:

| field | values | why |
|---|---|---|
"""

SIZES = """
With other values of these the plan does not know the model's sizes:

| field | values | why |
|---|---|---|
"""

NEMO_RL = """## NeMo-RL's other keys

NeMo-RL's recipes load here. A key of theirs that belongs to a feature this package lacks is accepted where its value
leaves that feature off, and refused, by name, where it turns something on.

| key | only values | why |
|---|---|---|
"""

WITHOUT = """
These are accepted with any value, since here there is nothing that they could change:

| key | why |
|---|---|
"""

OTHER = """
Values that NeMo-RL has for keys of ours, and this package has not:

| key | why |
|---|---|
"""


def page() -> str:
    """The page's text."""
    sections: list[str] = []
    described: set[type] = set()
    for algorithm, spec in ALGORITHMS.items():
        keys = schema_keys(spec.schema)
        for path, typed_dict in _sections(keys):
            if typed_dict not in described:
                sections.append(_section(path, typed_dict, keys, algorithm, described))
                described.add(typed_dict)
                if "dataset_name" not in get_type_hints(typed_dict):  # whose kinds each name all of their keys
                    described.update(_all_bases(typed_dict))
    parts = [INTRO, *map(_contents, ALGORITHMS), *sections, MEGATRON, _megatron_sources()]
    parts += [PASSING + _table(*PASSES, with_values=False)]
    parts += [FIXED + _table(Kind.FIXED), ON_CPU + _table(Kind.OFF_ON_CPU), SIZES + _table(Kind.UNKNOWN_SIZES)]
    parts += [NEMO_RL + _table(Kind.OFF_ONLY), WITHOUT + _table(Kind.NO_EFFECT, Kind.NOT_IN_USE, with_values=False)]
    parts += [OTHER + _table(Kind.OTHER_VALUE, with_values=False) + _other_datasets()]
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def _contents(algorithm: str) -> str:
    keys = schema_keys(ALGORITHMS[algorithm].schema)
    names = [f"`{path}`" + ("" if key.required else " (optional)") for path, key in keys.items() if "." not in path]
    return f"A recipe with `{algorithm}` has the sections {', '.join(names)}."


def _sections(keys: Mapping[str, Key]) -> Iterator[tuple[str, type]]:
    """Every section and its TypedDict; the alternatives of a union follow each other."""
    for path, key in keys.items():
        for member in _members(key.annotation):
            if is_typeddict(member):
                yield path, member


def _all_bases(typed_dict: type) -> list[type]:
    """The TypedDicts that one extends, theirs included; each after those that extend it."""
    bases = [base for base in types.get_original_bases(typed_dict) if is_typeddict(base)]
    return bases + [further for base in bases for further in _all_bases(base)]


def _section(path: str, typed_dict: type, keys: Mapping[str, Key], algorithm: str, described: set[type]) -> str:
    title = path.replace("*", "NAME")
    hints = get_type_hints(typed_dict, include_extras=True)
    if "dataset_name" in hints:
        names = _choices(hints["dataset_name"]) or ["package.module.Class"]
        title += f"` with `dataset_name: {', '.join(names)}"
    bases = _all_bases(typed_dict)
    if "dataset_name" in hints:
        hints = {name: hints[name] for name in dict.fromkeys([*key_comments(typed_dict), *hints])}
    if "dataset_name" in hints or path in ALGORITHMS:  # each names all of its keys
        described = set()
    inherited = {name for base in described.intersection(bases) for name in get_type_hints(base)}
    lines = [f"## `{title}`", "", "| key | value | meaning |", "|---|---|---|"]
    if described.intersection(bases):
        lines[0] = f"## `{title}` with `{algorithm}`: further keys"
        hints = {name: hint for name, hint in hints.items() if name not in inherited}
    for name, hint in hints.items():
        annotation = get_args(hint)[0] if get_origin(hint) is NotRequired else hint
        marks = "" if name in vars(typed_dict)["__required_keys__"] else " *optional*"
        marks += _only_some(f"{path}.{name}") if bases and path not in ALGORITHMS else ""
        owner = next(base for base in reversed([typed_dict, *bases]) if name in get_type_hints(base))
        comment = key_comments(owner)[name]
        lines.append(f"| `{name}`{marks} | {_cell(_words(annotation))} | {_cell(comment)} |")
    return "\n".join(lines)


def _only_some(path: str) -> str:
    """The algorithms that have a key, where it is not all of them."""
    names = [algorithm for algorithm, spec in ALGORITHMS.items() if path in schema_keys(spec.schema)]
    return "" if len(names) == len(ALGORITHMS) else f" *{' and '.join(names)} only*"


def _choices(annotation: Any) -> list[str]:
    """The values of a Literal; none for another annotation."""
    return list(get_args(annotation)) if get_origin(annotation) is Literal else []


def _members(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in _members(part)]
    return [annotation]


_PLAIN = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "null", Any: "any value"}


def _words(annotation: Any) -> str:
    """A type in words."""
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [bound for item in arguments[1:] for bound in _bounds(item)]
        return " ".join([_words(arguments[0]), ", ".join(bounds)]).strip()
    if origin is Literal:
        return show_choices(arguments).replace("'", "`")
    if origin in (Union, types.UnionType):
        words = list(dict.fromkeys(_words(argument) for argument in arguments))
        return " or ".join(words)
    if origin is list:
        return f"list of {_words(arguments[0])}"
    return "section"


def _bounds(item: Any) -> Iterator[str]:
    for bound in getattr(item, "metadata", [item]):
        match bound:
            case annotated_types.Ge(ge=value):
                yield f">= {_show(value)}"
            case annotated_types.Gt(gt=value):
                yield f"> {_show(value)}"
            case annotated_types.Le(le=value):
                yield f"<= {_show(value)}"
            case annotated_types.Lt(lt=value):
                yield f"< {_show(value)}"


def _show(bound: Any) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _megatron_sources() -> str:
    return "\n".join(f"- `{section}`: {source.title}" for section, source in SECTIONS.items()) + "\n"


def _other_datasets() -> str:
    return f"| `data.*.dataset_name` | {'; '.join(OTHER_DATASETS.values())} |\n"


def _table(*kinds: Kind, with_values: bool = True) -> str:
    """The rows of some kinds; those that differ in nothing but the key are one line."""
    lines: dict[str, list[str]] = {}
    for row in rows_of(*kinds):
        values = f"{_cell(show_choices(row.values)) if row.values else 'none'} | " if with_values else ""
        text = _cell(row.why + (f"; {row.shown_remedy}" if row.remedy else ""))
        lines.setdefault(values + text, []).append(f"`{row.key}`")
    return "".join(f"| {', '.join(keys)} | {line} |\n" for line, keys in lines.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
