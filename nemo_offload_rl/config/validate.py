"""Checks a recipe (upstream's other features, the schema, Megatron's fields, the rules), and resolves it for a CPU."""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

from nemo_offload_rl.config.algorithms import ALGORITHMS, AlgorithmSpec
from nemo_offload_rl.config.key_table.row import Kind
from nemo_offload_rl.config.key_table.table import OTHER_ALGORITHMS, not_allowed
from nemo_offload_rl.config.keys.schema_problems import (
    ABSENT,
    megatron_problems,
    move_model_overrides,
    schema_problems,
    unchecked_fields,
    value_at,
)
from nemo_offload_rl.config.keys.tree import resolve_absent_keys, share_dataset_keys
from nemo_offload_rl.config.megatron import DeviceSplit, checked_split, data_parallel_size
from nemo_offload_rl.config.model.hf_check import hf_config_problems
from nemo_offload_rl.config.problems import (
    MAX_PROBLEMS,
    Problem,
    RecipeError,
    did_you_mean,
    show,
    show_choices,
    show_file,
)
from nemo_offload_rl.config.recipe import Recipe, read_recipe
from nemo_offload_rl.config.rules import ADAPTATIONS, NOTES, RULES, Rule
from nemo_offload_rl.config.rules.adaptations import SEQUENCE_PARALLEL
from nemo_offload_rl.config.rules.base import COLOCATED, CP, EP, ETP, GPUS, NODES, OPTIMIZER, PP, SECTION, SPEC, TP
from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.config.source.yaml_source import ENVIRONMENT, leaves
from nemo_offload_rl.config.upstream import remove_upstream_keys
from nemo_offload_rl.storage.disk import UnreadableFileError, open_regular_file

_OVERRIDES = "warm_start.overrides"
# What a warm start takes from the run beside its ranks.
_SHARED = (TP, PP, CP, EP, ETP, SEQUENCE_PARALLEL, "policy.precision", f"{OPTIMIZER}.bf16")
# Samples of a warm start's step and validation batch, and those of their micro-batches.
_BATCHES = tuple(
    (f"{section}global_batch_size", f"{section}micro_batch_size") for section in ("policy.train_", "sft.val_")
)


@dataclass(frozen=True)
class ValidatedRecipe:
    """Holds a recipe that the schema and the rules accept.

    Attributes:
        algorithm: the section that identifies its algorithm, a key of `ALGORITHMS`.
        config: the keys of the schema and of Megatron, without those of upstream's other features.
        notes: what the user should know about accepted settings, one line each.
        recipe: the recipe as it was read, with every key, and with the values of absent keys filled in.
        warm_start: the recipe that `warm_start` names.
    """

    algorithm: str
    config: MasterConfig
    notes: list[str]
    recipe: Recipe
    warm_start: "ValidatedRecipe | None" = None


def load(path: str | Path, overrides: Sequence[str] = ()) -> ValidatedRecipe:
    """Reads and checks a recipe.

    Raises:
        RecipeError: lists every mistake.
    """
    return validate(read_recipe(path, overrides))


def validate(recipe: Recipe) -> ValidatedRecipe:
    """Checks a recipe, and the one that its `warm_start` names.

    Raises:
        RecipeError: lists every mistake, including `recipe.problems`.
    """
    algorithm = _algorithm_of(recipe)
    config = copy.deepcopy(recipe.config)
    upstream_problems, notes = remove_upstream_keys(config)
    spec = ALGORITHMS[algorithm]
    written_as, override_problems = move_model_overrides(config, spec.schema)
    found = _Findings(recipe, written_as | share_dataset_keys(config))
    policy = config["policy"] if isinstance(config.get("policy"), dict) else {}
    checks = (schema_problems(config, spec.schema), megatron_problems(config, spec.schema), hf_config_problems(policy))
    for problems in (upstream_problems, override_problems, *(islice(check, MAX_PROBLEMS + 1) for check in checks)):
        for path, message in problems:
            found.add(path, message)
    resolve_absent_keys(config)
    notes += _adapt(spec, config, found)
    found.add_broken(_broken(RULES, spec, config, found))
    warm_start, of_warm_start = _warm_start(recipe, spec, config, found)
    if found.problems or of_warm_start:
        raise RecipeError(show_file(recipe.path), [*found.without_consequences(), *of_warm_start])
    notes += [
        f"{found.in_recipe(path)} is passed on to Megatron unchecked"
        for path, _ in unchecked_fields(config, spec.schema)
    ]
    notes += [f"{path} {message}" for path, message in _broken(NOTES, spec, config, found)]
    resolve_absent_keys(recipe.config)  # the command `validate` prints them
    return ValidatedRecipe(algorithm, cast(MasterConfig, config), notes, recipe, warm_start)


def check_rules(algorithm: str, config: MasterConfig) -> None:
    """Checks the rules between the keys of a validated recipe again, after some of its values were replaced.

    Args:
        algorithm: the section that identifies its algorithm, a key of `ALGORITHMS`.
        config: the recipe's config, with values of the keys' types.

    Raises:
        RecipeError: lists every rule that is broken.
    """
    sections = cast(dict[str, Any], config)
    found = _Findings(Recipe(Path(), sections, {}), {})
    found.add_broken(_broken(RULES, ALGORITHMS[algorithm], sections, found))
    if found.problems:
        raise RecipeError(f"of {algorithm}", found.problems)


class _Findings:
    """Collects the problems of a recipe.

    Args:
        recipe: the recipe.
        written_as: the paths in the recipe of keys that are checked under other paths, by these.
    """

    def __init__(self, recipe: Recipe, written_as: Mapping[str, str]) -> None:
        self._recipe = recipe
        self._written_as = written_as
        self.problems: list[Problem] = list(recipe.problems[: MAX_PROBLEMS + 1])
        self._paths = {problem.path for problem in recipe.problems}
        self._paths |= {path for path, written in written_as.items() if _touches(self._paths, written)}

    def without_consequences(self) -> list[Problem]:
        """Returns the problems, except for values interpolated from a key that has a problem itself."""
        of_schema = {problem.path for problem in self.problems if problem not in self._recipe.problems}
        return [
            problem
            for problem in self.problems
            # An unresolved value counts as a consequence only of the schema's problems, since two keys that refer to
            # each other would be consequences of each other.
            if not any(
                _touches(of_schema if problem in self._recipe.problems else self._paths, source)
                for source in self._recipe.sources(problem.path)
            )
        ]

    def add(self, path: str, message: str) -> None:
        """Adds a problem of a key, unless the key already has one."""
        if path not in self._paths:
            self._append(path, message)

    def add_broken(self, broken: list[tuple[str, str]]) -> None:
        """Adds the problems of rules, possibly several for one key, except for keys that had a problem before."""
        with_problem = frozenset(self._paths)
        for path, message in dict.fromkeys(broken):
            if path not in with_problem:
                self._append(path, message)

    def _append(self, path: str, message: str) -> None:
        self._paths.add(path)
        path = self.in_recipe(path)
        self._paths.add(path)
        written = self._recipe.written.get(path)
        source = f" (from {written!r})" if written and "found" in message else ""
        if written and f"{{{ENVIRONMENT}:" in written:
            message = message.replace("write it without quotes", "a variable is text: give the value as an override")
        self.problems.append(Problem(path, self._recipe.origin(path), message + source))

    def in_recipe(self, path: str) -> str:
        """Returns the path in the recipe of a key that is checked under another one."""
        return self._written_as.get(path, path)

    def touches(self, path: str) -> bool:
        """Returns whether a problem lies at the path, inside it or in a section around it."""
        return _touches(self._paths, path)


def _touches(paths: Iterable[str], path: str) -> bool:
    return any(
        other == path or other.startswith(f"{path}.") or path.startswith(f"{other}.") for other in paths if other
    )


def _algorithm_of(recipe: Recipe) -> str:
    """Returns the algorithm that a recipe's sections name.

    Raises:
        RecipeError: there is none, or several.
    """
    marked = [name for name in ALGORITHMS if name in recipe.config]
    if len(marked) == 1:
        return marked[0]
    sections, other = show_choices(ALGORITHMS), next((name for name in OTHER_ALGORITHMS if name in recipe.config), None)
    path = marked[-1] if marked else other or ""
    if marked:
        message = f"a recipe has one of the sections {sections}, found {' and '.join(marked)}; delete one"
    elif other is not None:
        message = f"{OTHER_ALGORITHMS[other]} is not supported here; a recipe has one of {sections}"
    else:
        hint = next((hint for key in recipe.config if (hint := did_you_mean(key, ALGORITHMS))), "")
        message = f"no section says which algorithm to run; a recipe has one of {sections}{hint}"
    raise RecipeError(show_file(recipe.path), [*recipe.problems, Problem(path, recipe.origin(path), message)])


def _broken(
    rules: Sequence[Rule], spec: AlgorithmSpec, config: dict[str, Any], found: _Findings
) -> list[tuple[str, str]]:
    """Returns the problems found by the rules whose keys are present and without problems."""
    broken: list[tuple[str, str]] = []
    for rule in rules:
        values = _read(rule.reads, spec, config, found)
        if values is None:
            continue
        result = rule.check(*values)
        if isinstance(result, str):
            broken.append((rule.reads[0].replace(SECTION, spec.name).removesuffix("?"), result))
        elif result is not None:
            broken.append(result)
    return broken


def _adapt(spec: AlgorithmSpec, config: dict[str, Any], found: _Findings) -> list[str]:
    """Applies the adaptations to the config; returns the lines that tell the user about them."""
    lines = []
    for adaptation in ADAPTATIONS:
        values = _read(adaptation.reads, spec, config, found)
        adapted = None if values is None else adaptation.check(*values)
        if adapted is None:
            continue
        path = adapted.path.replace(SECTION, spec.name)
        section, _, name = path.rpartition(".")
        value_at(config, section)[name] = adapted.value
        if adapted.line is not None:
            lines.append(f"{path} {adapted.line}")
    return lines


def _read(reads: Sequence[str], spec: AlgorithmSpec, config: dict[str, Any], found: _Findings) -> list[Any] | None:
    """Returns the values that a rule reads; None if a key is absent or has a problem."""
    values: list[Any] = []
    for read in (one.replace(SECTION, spec.name) for one in reads):
        if read == SPEC:
            values.append(spec)
            continue
        path = read.removesuffix("?")
        value = value_at(config, path)
        if found.touches(path) or (value is ABSENT and not read.endswith("?")):
            return None
        values.append(None if value is ABSENT else value)
    return values


def _warm_start(
    recipe: Recipe, spec: AlgorithmSpec, config: dict[str, Any], found: _Findings
) -> tuple[ValidatedRecipe | None, tuple[Problem, ...]]:
    """Returns the recipe that `warm_start` names, and its problems; adds problems of `warm_start` itself to `found`."""
    name = value_at(config, "warm_start.recipe")
    if name is ABSENT or found.touches("warm_start"):
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
    overrides = value_at(config, _OVERRIDES)
    places = [f"{recipe.origin(f'{_OVERRIDES}.{number}')}: {_OVERRIDES}" for number in range(len(overrides))]
    sizes: dict[str, Any] = {}
    try:
        read = read_recipe(path, overrides, places)
        other = _algorithm_of(read)
        if other != "sft":  # not checked further: its own warm start could lead back here forever
            found.add("warm_start.recipe", f"must be an sft recipe; found one of {other}")
            return None, ()
        of_run = _of_run(spec, config, found)
        of_run |= _micro_batches(read, of_run)
        sizes = {key: size for key, size in of_run.items() if value_at(read.config, key) != size}
        for key, size in sizes.items():
            if read.origin(key).override is not None:
                found.add(_OVERRIDES, f"sets {key}, but a warm start uses that of the run ({size}); delete it")
                return None, ()
        # Read again, since other keys may be interpolated from the sizes.
        added = [f"++{key}={str(size).lower()}" for key, size in sizes.items()]
        warm_start = validate(read_recipe(path, [*overrides, *added], [*places, *[_OVERRIDES] * len(sizes)]))
    except RecipeError as error:
        own = _problems_of(read) if sizes else error.problems
        why = " and ".join(f"{key} {size}" for key, size in sizes.items())
        suffix = f"; the warm start trains on the run's ranks ({why})"
        return None, tuple(one if one in own else replace(one, message=one.message + suffix) for one in error.problems)
    for key, message in _warm_start_mismatches(warm_start, config):
        if not found.touches(key):
            found.add(key, message)
    return warm_start, ()


def _problems_of(recipe: Recipe) -> Sequence[Problem]:
    try:
        validate(recipe)
    except RecipeError as error:
        return error.problems
    return ()


def _of_run(spec: AlgorithmSpec, config: dict[str, Any], found: _Findings) -> dict[str, Any]:
    """Returns keys, with values, that a warm start takes from the run: ranks, how the model is divided, precision."""
    values = _read((GPUS, NODES, COLOCATED), spec, config, found)
    split = None if values is None else checked_split(*values)
    if not isinstance(split, DeviceSplit):  # reported already
        return {}
    shared = (key for key in _SHARED if not found.touches(key))
    of_model = {key: value for key in shared if (value := value_at(config, key)) is not ABSENT}
    return {GPUS: split.policy_per_node, NODES: split.policy_nodes} | of_model


def _micro_batches(read: Recipe, of_run: Mapping[str, Any]) -> dict[str, int]:
    """Returns smaller micro-batches of a warm start where a data-parallel rank's samples do not fill the recipe's."""
    if not of_run.keys() >= {GPUS, NODES, TP, PP, CP}:  # the run's own have problems
        return {}
    ranks = data_parallel_size(of_run[GPUS] * of_run[NODES], *(of_run[key] for key in (TP, PP, CP)))
    out = {}
    for samples, micro_batch in _BATCHES:
        whole, part = value_at(read.config, samples), value_at(read.config, micro_batch)
        are_sizes = all(isinstance(size, int) and size > 0 for size in (whole, part))
        if ranks and are_sizes and whole % ranks == 0 and read.origin(micro_batch).override is None:
            out[micro_batch] = math.gcd(whole // ranks, part)
    return out


def _warm_start_mismatches(warm_start: ValidatedRecipe, config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    other = cast(dict[str, Any], warm_start.config)
    if value_at(other, "sft.export_hf") is not True:
        yield "warm_start.recipe", "its sft.export_hf must be true, since the run starts from the exported folder"
    limit = value_at(other, "checkpointing.checkpoint_must_save_by")
    if limit is not None:
        yield (
            "warm_start.recipe",
            f"its checkpointing.checkpoint_must_save_by ({limit}) must be null, since a warm start saves no "
            "checkpoints",
        )
    for path in ("policy.hf_config", "policy.tokenizer.name"):
        ours, theirs = value_at(config, path), value_at(other, path)
        here, there = (dict(leaves(one, path)) for one in (ours, theirs))
        different = next((key for key in here | there if here.get(key, ABSENT) != there.get(key, ABSENT)), None)
        if ours is not None and different is not None:
            yield (
                different,
                f"is {_shown(here, different)}, but must be the same as in the warm_start recipe, which trains the "
                f"initial weights; there it is {_shown(there, different)}",
            )


def _shown(values: Mapping[str, Any], key: str) -> str:
    return show(values[key]) if key in values else "absent"


def for_machine(config: Any, *, has_gpus: bool) -> tuple[Any, list[str]]:
    """Resolves a recipe for a machine: without GPUs, switches off every setting that needs one.

    Args:
        config: a validated recipe's config, which is not modified. Its precision is kept.
        has_gpus: whether the ranks have GPUs.

    Returns:
        The config that ranks on this machine run with, and one line for each setting that was switched off.
    """
    if has_gpus:
        return config, []
    adapted = copy.deepcopy(config)
    lines = []
    for row, path, _ in not_allowed(adapted, Kind.OFF_ON_CPU):
        section, _, name = path.rpartition(".")
        value_at(adapted, section)[name] = row.values[0]
        state = "off" if row.values[0] in (False, "none") else row.values[0]
        lines.append(f"{path} is {state} on this machine: it {row.why}")
    optimizer = adapted["policy"]["megatron_cfg"]["optimizer"]
    if optimizer["optimizer"] == "sgd" and optimizer["use_distributed_optimizer"]:
        optimizer["use_distributed_optimizer"] = False
        lines.append(
            f"{OPTIMIZER}.use_distributed_optimizer is off on this machine: it supports sgd only with the CPU optimizer"
        )
    return adapted, lines
