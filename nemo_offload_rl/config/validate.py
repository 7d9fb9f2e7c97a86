"""Checking a recipe: upstream's other features, the schema, Megatron's fields, and the rules between keys."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import TypeAdapter, ValidationError

from nemo_offload_rl.config.hf_check import hf_config_problems
from nemo_offload_rl.config.ignored import ignored_overrides
from nemo_offload_rl.config.indentation import hint_at_level, hint_at_section, hint_at_value
from nemo_offload_rl.config.keys import find_key, nearest_key, short_section
from nemo_offload_rl.config.limits import MAX_PROBLEMS
from nemo_offload_rl.config.megatron_fields import SECTIONS, check_field, megatron_fields
from nemo_offload_rl.config.owned_fields import refuse
from nemo_offload_rl.config.problems import (
    Origin,
    Problem,
    RecipeError,
    is_number,
    nearest,
    show,
    show_choices,
    show_file,
)
from nemo_offload_rl.config.recipe import Recipe, read_recipe
from nemo_offload_rl.config.rules import NOTES, RULES, Rule
from nemo_offload_rl.config.rules.base import Conflict
from nemo_offload_rl.config.schema import ALGORITHMS, MasterConfig
from nemo_offload_rl.config.section_kinds import meaning_in_kind, unknown_in_kind
from nemo_offload_rl.config.upstream import OTHER_ALGORITHMS, OTHER_VALUES, screen, upstream_paths
from nemo_offload_rl.storage.regular_file import UnreadableFileError, open_regular_file

AlgorithmName = Literal["grpo", "sft"]
WrittenAt = Callable[[str], Origin]


@dataclass(frozen=True)
class ValidatedRecipe:
    """A recipe that fits the schema.

    Attributes:
        algorithm: the section that marks it.
        config: the keys that the schema and Megatron have, without those of upstream's other features.
        notes: what was accepted and is worth saying, one line each.
        recipe: the recipe as it was read, with every key.
        warm_start: the recipe that `warm_start` names.
    """

    algorithm: AlgorithmName
    config: MasterConfig
    notes: list[str]
    recipe: Recipe
    warm_start: "ValidatedRecipe | None" = None


def load(path: str | Path, overrides: Sequence[str] = ()) -> ValidatedRecipe:
    """Read and check a recipe.

    Raises:
        RecipeError: with every mistake found.
    """
    return validate(read_recipe(path, overrides))


def validate(recipe: Recipe) -> ValidatedRecipe:
    """Check a recipe, and the one that its `warm_start` names.

    Raises:
        RecipeError: with every mistake found, those of `recipe.problems` included.
    """
    algorithm, problem = _algorithm_of(recipe)
    if algorithm is None:
        raise RecipeError(show_file(recipe.path), [*recipe.problems, *([problem] if problem else [])])
    screened = screen(recipe.config)
    found = _Findings(recipe)
    for path, message in screened.problems:
        found.add(path, message)
    schema = ALGORITHMS[algorithm]
    for path, message in islice(_schema_problems(screened.config, schema, found.written_at), MAX_PROBLEMS + 1):
        found.add(path, message)
    for path, message in islice(_megatron_problems(screened.config, schema, found.written_at), MAX_PROBLEMS + 1):
        found.add(path, message)
    if isinstance(screened.config.get("policy"), dict):
        for path, message in islice(hf_config_problems(screened.config["policy"]), MAX_PROBLEMS + 1):
            found.add(path, message)
    for path, message in ignored_overrides(recipe, screened.config):
        found.add(path, message)
    found.add_broken(_broken(RULES, screened.config, found))
    warm_start, of_warm_start = _warm_start(recipe, screened.config, found)
    if found.problems or of_warm_start:
        raise RecipeError(show_file(recipe.path), [*found.without_consequences(), *of_warm_start])
    notes = screened.notes + [f"{path} {message}" for path, message in _broken(NOTES, screened.config, found)]
    _switch_off_lone_sequence_parallel(screened.config)
    return ValidatedRecipe(algorithm, cast(MasterConfig, screened.config), notes, recipe, warm_start)


class _Findings:
    """The problems of a recipe so far."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.problems: list[Problem] = list(recipe.problems[: MAX_PROBLEMS + 1])
        self._paths = {problem.path for problem in recipe.problems}

    def without_consequences(self) -> list[Problem]:
        """The problems, without those of values that were interpolated from a key with a problem of its own."""
        of_schema = {problem.path for problem in self.problems if problem not in self._recipe.problems}
        return [
            problem
            for problem in self.problems
            # What could not be resolved counts as a consequence of what the schema says alone, since two keys that
            # stand for each other are consequences of each other.
            if not any(
                _touches(of_schema if problem in self._recipe.problems else self._paths, source)
                for source in self._recipe.sources(problem.path)
            )
        ]

    def add(self, path: str, message: str) -> None:
        """A problem of a key that had none yet."""
        if path not in self._paths:
            self._append(path, message)

    def add_broken(self, broken: list[tuple[str, str]]) -> None:
        """What the rules say, also several of one key; nothing of a key that had a problem before."""
        with_problem = frozenset(self._paths)
        for path, message in dict.fromkeys(broken):
            if path not in with_problem:
                self._append(path, message)

    def _append(self, path: str, message: str) -> None:
        self._paths.add(path)
        written = self._recipe.written.get(path)
        source = f" (from {written!r})" if written and "found" in message else ""
        self.problems.append(Problem(path, self._recipe.origin(path), message + source))

    def written_at(self, path: str) -> Origin:
        """Where a key was written."""
        return self._recipe.origin(path)

    def touches(self, path: str) -> bool:
        """Whether a problem lies at the path, in it or around it."""
        return _touches(self._paths, path)


def _touches(paths: Iterable[str], path: str) -> bool:
    return any(
        other == path or other.startswith(f"{path}.") or path.startswith(f"{other}.") for other in paths if other
    )


def _algorithm_of(recipe: Recipe) -> tuple[AlgorithmName | None, Problem | None]:
    marked = [name for name in ALGORITHMS if name in recipe.config]
    if len(marked) == 1:
        return cast(AlgorithmName, marked[0]), None
    sections = show_choices(ALGORITHMS)
    if marked:
        message = f"a recipe has one of the sections {sections}, found {' and '.join(marked)}; delete one"
        return None, Problem(marked[-1], recipe.origin(marked[-1]), message)
    for other, title in OTHER_ALGORITHMS.items():
        if other in recipe.config:
            message = f"{title} is not supported here; a recipe has one of {sections}"
            return None, Problem(other, recipe.origin(other), message)
    close = next((name for key in recipe.config if (name := nearest(key, ALGORITHMS))), None)
    suggestion = f"; did you mean {close}?" if close else ""
    message = f"no section says which algorithm to run; a recipe has one of {sections}{suggestion}"
    return None, Problem("", recipe.origin(""), message)


@cache
def _adapter(schema: type) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def _schema_problems(config: dict[str, Any], schema: type, written_at: WrittenAt) -> Iterator[tuple[str, str]]:
    try:
        _adapter(schema).validate_python(config)
    except ValidationError as errors:
        for error in errors.errors(include_url=False):
            path, value = _locate(config, error["loc"])
            if error["type"] == "extra_forbidden":
                yield from _unknown_keys(schema, config, path, value, written_at)
            else:
                if error["type"].startswith("union_tag"):
                    path = f"{path}.dataset_name"
                message = _describe(schema, config, path, value, dict(error))
                hint = hint_at_section if error["type"] in _SECTION_EXPECTED else hint_at_value
                yield path, message + ("" if error["type"] == "missing" else hint(path, value, written_at(path)))


def _locate(config: dict[str, Any], loc: tuple[Any, ...]) -> tuple[str, Any]:
    """Where pydantic found something, as a path of the recipe, and the value there (None where the key is missing)."""
    node: Any = config
    parts = []
    for index, item in enumerate(loc):
        if isinstance(node, dict) and item not in node and index < len(loc) - 1:
            continue  # the tag of a union, such as data.train.arithmetic.num_digits
        if isinstance(node, dict) and item not in node and item == node.get("dataset_name"):
            continue
        parts.append(str(item))
        node = node[item] if (isinstance(node, dict) and item in node) or isinstance(node, list) else None
    return ".".join(parts), node


def _unknown_keys(
    schema: type, config: dict[str, Any], path: str, value: Any, written_at: WrittenAt
) -> Iterator[tuple[str, str]]:
    """An unknown key; or, of a section that only upstream has, its unknown keys."""
    upstream = upstream_paths()
    if isinstance(value, dict) and any(name.startswith(f"{path}.") for name in upstream):
        for name, item in value.items():
            yield from _unknown_keys(schema, config, f"{path}.{name}", item, written_at)
        return
    if path in OTHER_ALGORITHMS:
        yield path, f"{OTHER_ALGORITHMS[path]} is not supported here; delete the section"
        return
    section, _, name = path.rpartition(".")
    message = unknown_in_kind(schema, section, _value(config, section), name)
    yield path, message or _unknown_key(schema, path, written_at(path))


def _unknown_key(schema: type, path: str, origin: Origin) -> str:
    """What is said of it; of a short section, all of its keys, unless one of them is spelt nearly so."""
    section = path.rpartition(".")[0]
    suggestion = nearest_key(schema, path, upstream_paths())
    message = "unknown key" + (f"; nearest valid key: {suggestion}" if suggestion else "")
    if hint := hint_at_level(path, suggestion, origin):
        return message + hint
    names = short_section(schema, section)
    is_sibling = suggestion is not None and suggestion.rpartition(".")[0] == section
    return message if is_sibling or not names else f"{message}; {section} has {', '.join(names)}"


_SECTION_EXPECTED = ("dict_type", "model_attributes_type")
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
}
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


def _describe(schema: type, config: dict[str, Any], path: str, value: Any, error: dict[str, Any]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        section, _, name = path.rpartition(".")
        key = find_key(schema, path)
        meaning = meaning_in_kind(schema, section, _value(config, section), name) or (key.comment if key else "")
        return f"missing (its meaning: {meaning})" if meaning else "missing"
    if kind == "union_tag_not_found":
        return "missing; it is 'arithmetic', 'ResponseDataset' or 'HFDataset'"
    if kind == "union_tag_invalid":
        return f"{show(context['tag'])} is not supported here; {OTHER_VALUES[path]}; built in is 'arithmetic'"
    if kind == "literal_error":
        return _wrong_choice(path, value, str(context["expected"]))
    found = f"found {show(value)}"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"must be {words} {context[name]}; {found}"
    if kind not in _EXPECTED:
        return f"{error['msg'][0].lower()}{error['msg'][1:]}; {found}"
    hint = "; write it without quotes" if _is_quoted(kind, value) else ""
    if kind == "list_type" and (value is None or isinstance(value, str)):
        hint = f"; write [{value or ''}]"
    return f"must be {_EXPECTED[kind]}; {found}{hint}"


def _is_quoted(kind: str, value: Any) -> bool:
    """Whether text is what was asked for, in quotes."""
    if not isinstance(value, str):
        return False
    return (
        value in ("true", "false") if kind == "bool_type" else kind in ("int_type", "float_type") and is_number(value)
    )


def _wrong_choice(path: str, value: Any, choices: str) -> str:
    remedy = OTHER_VALUES.get(path)
    if remedy is not None:
        return f"{show(value)} is not supported here; {remedy}"
    names = [choice.strip("'") for choice in choices.replace(" or ", ", ").split(", ")]
    close = nearest(value, names) if isinstance(value, str) else None
    return f"must be {choices.lower() if choices in ('True', 'False') else choices}; found {show(value)}" + (
        f"; did you mean {close}?" if close else ""
    )


def _megatron_problems(config: dict[str, Any], schema: type, written_at: WrittenAt) -> Iterator[tuple[str, str]]:
    """Fields of Megatron's configs: unknown names, wrong types, and those that a recipe may not set."""
    for section in SECTIONS:
        values = _value(config, section)
        if not isinstance(values, dict):
            continue
        fields = megatron_fields(section)
        for name, value in values.items():
            path = f"{section}.{name}"
            key = find_key(schema, path)
            if key is None and name not in fields:
                yield path, _unknown_key(schema, path, written_at(path))
                continue
            refusal = refuse(section, name, value)
            wrong_type = check_field(section, name, value) if key is None else None
            if wrong_type and not (refusal and value not in (None, False)):
                yield path, wrong_type
            elif refusal:
                yield path, f"{refusal}; found {show(value)}"


def _broken(rules: Sequence[Rule], config: dict[str, Any], found: _Findings) -> list[tuple[str, str]]:
    """What the rules say, of those whose keys are there and without problems."""
    broken: list[tuple[str, str]] = []
    for rule in rules:
        values = []
        for read in rule.reads:
            path = read.removesuffix("?")
            value = _value(config, path)
            if found.touches(path) or (value is _ABSENT and not read.endswith("?")):
                break
            values.append(None if value is _ABSENT else value)
        else:
            verdict = rule.check(*values)
            if isinstance(verdict, str):
                broken.append((rule.reads[0].removesuffix("?"), verdict))
            elif isinstance(verdict, Conflict):
                where = found.written_at(verdict.also)
                broken.append((verdict.path, f"{verdict.message} ({verdict.also} is written at {where})"))
            elif verdict is not None:
                broken.append(verdict)
    return broken


_ABSENT = object()


def _value(config: dict[str, Any], path: str) -> Any:
    node: Any = config
    for name in path.split("."):
        if not isinstance(node, dict) or name not in node:
            return _ABSENT
        node = node[name]
    return node


def _warm_start(
    recipe: Recipe, config: dict[str, Any], found: _Findings
) -> tuple[ValidatedRecipe | None, tuple[Problem, ...]]:
    """The recipe that `warm_start` names, and its problems; problems of `warm_start` itself are added to `found`."""
    name = _value(config, "warm_start.recipe")
    if name is _ABSENT or found.touches("warm_start"):
        return None, ()
    origin = recipe.origin("warm_start.recipe")
    folder = Path(origin.file).parent if origin.file else recipe.path.parent
    path = folder / name
    try:
        open_regular_file(path).close()
    except UnreadableFileError as error:
        reason = f"there is no recipe {show_file(path)}" if error.is_absent else f"{show_file(path)} {error}"
        found.add("warm_start.recipe", reason)
        return None, ()
    overrides = _value(config, "warm_start.overrides")
    try:
        read = read_recipe(path, [] if overrides is _ABSENT else overrides, "warm_start.overrides")
        if _algorithm_of(read)[0] == "grpo":  # not looked into: it may have a warm start in its turn, for ever
            found.add("warm_start.recipe", "must be an sft recipe; found one of grpo")
            return None, ()
        warm_start = validate(read)
    except RecipeError as error:
        return None, error.problems
    for key, message in _warm_start_mismatches(warm_start, config):
        found.add(key, message)
    return warm_start, ()


def _warm_start_mismatches(warm_start: ValidatedRecipe, config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    other = cast(dict[str, Any], warm_start.config)
    if _value(other, "sft.export_hf") is not True:
        yield "warm_start.recipe", "its sft.export_hf must be true, since GRPO starts from that folder"
    for path in ("policy.hf_config", "policy.tokenizer.name"):
        ours, theirs = _value(config, path), _value(other, path)
        if ours is not _ABSENT and ours != theirs:
            yield path, f"must be as in the warm_start recipe, which GRPO goes on from; there it is {show(theirs)}"


def _switch_off_lone_sequence_parallel(config: dict[str, Any]) -> None:
    megatron = config["policy"]["megatron_cfg"]
    if megatron["tensor_model_parallel_size"] == 1:
        megatron["sequence_parallel"] = False
