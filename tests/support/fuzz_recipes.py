"""Mutates recipes and overrides: each must be refused with a message, or accepted without any part being ignored."""

import contextlib
import copy
import io
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from support.fuzz_run import PropertyError
from support.fuzz_values import EXTREMES, any_value, misspelt, value_like

from nemo_offload_rl import cli
from nemo_offload_rl.config import RecipeError, load, resolve_absent_keys
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.installed.megatron_fields import SECTIONS, megatron_fields
from nemo_offload_rl.config.keys.tree import is_valid_key, schema_keys
from nemo_offload_rl.config.recipe import load_recipe
from nemo_offload_rl.config.source.yaml_source import as_yaml
from nemo_offload_rl.config.upstream.features import OFF_ONLY, SWITCHED_OFF, WITHOUT_EFFECT, upstream_paths
from nemo_offload_rl.config.validate import ValidatedRecipe

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"
BASES = ("grpo_tiny_cpu.yaml", "sft_tiny_cpu.yaml", "grpo_math_1B_megatron.yaml")
# Sections whose keys are named by the user or by another library, so that the schema does not list them.
FREE = (
    "policy.hf_config", "policy.hf_config_overrides", "policy.tokenizer.chat_template_kwargs",
    "policy.megatron_cfg.env_vars", "env",
)  # fmt: skip
MOVED = "model_overrides."  # whose fields become fields of the section around it
PLAN_SHARE = 0.5  # share of accepted recipes that are planned: a plan takes ten times as long as all other checks

Path_ = tuple[str, ...]


class _Dumper(yaml.SafeDumper):
    """Dumps strings in quotes, so that none is read as a number, and without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


@dataclass
class Case:
    """Describes a recipe before it is written.

    Attributes:
        tree: the recipe as a mapping; None where its text was mutated and the mapping is not known.
        text: the file's text.
        overrides: those of the command line.
        given: values that overrides set, by path and in order; `DELETED` for a key that they delete.
    """

    tree: dict[str, Any] | None
    text: str
    overrides: list[str] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)


DELETED = object()
_bases: dict[str, dict[str, Any]] = {}


def prepare(folder: Path) -> None:
    for name in BASES:
        recipe = load_recipe(CONFIGS / name)
        tree = copy.deepcopy(recipe.config)
        for path, text in recipe.written.items():
            *sections, last = path.split(".")
            section = tree
            for key in sections:
                section = section[key]
            section[last] = text
        _bases[name] = tree
    load(CONFIGS / BASES[0], ["grpo.seed=1"])
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        cli.main(["plan", str(CONFIGS / BASES[0])])


def run_case(rng: random.Random, folder: Path) -> bool:
    case = rng.choices([_mutated_tree, _inheriting, _mutated_text, _structure, _overridden], [5, 2, 3, 1, 4])[0](rng)
    path = folder / "recipe.yaml"
    path.write_bytes(case.text.encode("utf-8", "surrogatepass"))
    try:
        validated = load(path, case.overrides)
    except RecipeError as error:
        _check_message(str(error))
        return False
    _check_nothing_ignored(case, validated)
    _check_round_trip(validated, folder)
    if rng.random() < PLAN_SHARE:
        _check_plan(path, case.overrides)
    return True


# How a recipe is mutated.


def _paths(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _paths(item, (*path, key))


def _get(tree: Any, path: Path_) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _mutate(rng: random.Random, tree: dict[str, Any]) -> None:
    path = rng.choice(list(_paths(tree)))
    section, key = _get(tree, path[:-1]), path[-1]
    sections = [(), *(other for other in _paths(tree) if isinstance(_get(tree, other), dict))]
    elsewhere = _get(tree, rng.choice(sections))
    kind = rng.choice(
        [
            "alike",
            "alike",
            "alike",
            "alike",
            "value",
            "value",
            "value",
            "delete",
            "misspell",
            "move",
            "copy",
            "add",
            "upstream",
        ]
    )
    if kind == "alike":
        section[key] = value_like(rng, section[key])
    elif kind == "value":
        section[key] = any_value(rng, section[key])
    elif kind == "delete":
        del section[key]
    elif kind == "misspell":
        section[misspelt(rng, key)] = section.pop(key)
    elif kind == "move":
        elsewhere[key] = section.pop(key)
    elif kind == "copy":
        elsewhere[key] = copy.deepcopy(section[key])
    else:
        _put(tree, _known_path(rng, upstream=kind == "upstream"), any_value(rng, rng.choice([1, 1.0, True, "x", []])))


def _known_path(rng: random.Random, *, upstream: bool) -> Path_:
    if upstream:
        names = upstream_paths()
    else:
        section = rng.choice(list(SECTIONS))
        fields = [f"{section}.{name}" for name in megatron_fields(section)]
        names = rng.choice([fields, list(schema_keys(rng.choice(list(ALGORITHMS.values())).schema))])
    return tuple(rng.choice(list(names)).replace("*", "arithmetic").split("."))


def _put(tree: dict[str, Any], path: Path_, value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(tree.get(key), dict):
            tree[key] = {}
        tree = tree[key]
    tree[path[-1]] = value


def _tree(rng: random.Random) -> dict[str, Any]:
    tree = copy.deepcopy(_bases[rng.choice(BASES)])
    if rng.random() < 0.8:
        tree.pop("warm_start", None)
    if "warm_start" in tree:
        tree["warm_start"]["recipe"] = str(CONFIGS / tree["warm_start"]["recipe"])
    return tree


def _dump(tree: Any) -> str:
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=1000)


def _mutated_tree(rng: random.Random) -> Case:
    tree = _tree(rng)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        _mutate(rng, tree)
    return Case(tree, _dump(tree))


def _inheriting(rng: random.Random) -> Case:
    """Returns a file with some values of its own that inherits from an example."""
    name = rng.choice(BASES)
    own: dict[str, Any] = {}
    for _ in range(rng.choice([1, 2, 4])):
        path = rng.choice(list(_paths(_bases[name])))
        _put(own, path, any_value(rng, _get(_bases[name], path)))
    expected = _merged(_bases[name], own) if not _has_key(own, "_override_") else None
    defaults: Any = rng.choice([str(CONFIGS / name), [str(CONFIGS / name)], [str(CONFIGS / name)] * 3])
    if rng.random() < 0.2:
        defaults, expected = rng.choice([*EXTREMES, "recipe.yaml", ["recipe.yaml"], {"a": 1}, [[]]]), None
    return Case(expected, _dump({"defaults": defaults} | own))


def _merged(base: Any, own: Any) -> Any:
    if not isinstance(own, dict) or not isinstance(base, dict):
        return own
    return base | {key: _merged(base[key], item) if key in base else item for key, item in own.items()}


def _has_key(value: Any, name: str) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (isinstance(value, dict) and name in value) or any(_has_key(item, name) for item in items)


_TOKENS = (
    "&a ", "*a", "<<: *a", "!!python/object:os.system ", "!!python/name:os.system", "!!binary ", "!!int ", "!!str ",
    "!!set ", "!x ", "? ", ": ", "- ", "[", "]", "{", "}", "'", '"', "|\n", ">\n", "#", "%YAML 1.2\n---\n", "---\n",
    "...\n", "\t", "\r", "\x00", "\x85", "\ufeff", "\ud800", "\U0001f600", "${", "}", "@", "`", "~", "=", "<<: ",
    "defaults: recipe.yaml\n", "[" * 2000, "{a: " * 500, "- " * 500, "x" * 20000, "9" * 5000,
)  # fmt: skip


def _mutated_text(rng: random.Random) -> Case:
    text = _dump(_tree(rng)) if rng.random() < 0.5 else (CONFIGS / rng.choice(BASES)).read_text()
    for _ in range(rng.choice([1, 1, 3])):
        lines = text.splitlines(keepends=True)
        line = rng.randrange(len(lines))
        place = rng.randrange(len(text))
        kind = rng.choice(["token", "token", "drop", "repeat", "indent", "cut", "swap"])
        if kind == "token":
            text = text[:place] + rng.choice(_TOKENS) + text[place:]
        elif kind == "drop":
            text = text[:place] + text[place + rng.choice([1, 5]) :]
        elif kind == "cut":
            text = text[: max(place, 1)]
        else:
            if kind == "repeat":
                lines.insert(rng.randrange(len(lines)), lines[line])
            elif kind == "indent":
                lines[line] = rng.choice([" ", "  ", "\t"]) + lines[line]
            else:
                lines[line], lines[-1] = lines[-1], lines[line]
            text = "".join(lines)
    return Case(None, text)


def _structure(rng: random.Random) -> Case:
    """Adds a few lines that expand to a huge structure to a valid recipe."""
    size = rng.choice([3, 30, 300])
    many = rng.choice([5, 50, 3000])
    name = rng.choice(["x", "policy", "policy.hf_config_overrides", "env"])
    bombs: list[Callable[[], str]] = [
        lambda: "".join(f"a{n + 1}: &a{n + 1} [{f'*a{n}, ' * size}]\n" for n in range(many)),
        lambda: "".join(f"a{n + 1}: &a{n + 1} {{x: *a{n}, y: *a{n}}}\n" for n in range(many)),
        lambda: "".join(f"a{n + 1}: &a{n + 1} {{<<: [*a{n}, *a{n}], z{n}: 1}}\n" for n in range(many)),
        lambda: "".join(f"a{n + 1}: ${{a{n}}}${{a{n}}}\n" for n in range(many)),
        lambda: "".join(f"a{n + 1}: {{x: '${{a{n}}}', y: '${{a{n}}}'}}\n" for n in reversed(range(many))),
        lambda: "".join(f"a{n + 1}: ${{mul:${{a{n}}},${{a{n}}}}}\n" for n in reversed(range(many))),
        lambda: f"a1: {'${mul:' * many}1{',2}' * many}\n",
        lambda: f"a1: {'${a.' * many}b{'}' * many}\n",
        lambda: f"a1: '${{mul:{'[' * many}{']' * many},1}}'\n",
        lambda: f"{name.rpartition('.')[2]}: {'{a: ' * many}1{'}' * many}\n",
        lambda: f"a1: {'[' * many}{']' * many}\n",
        lambda: f"a1: [{'x, ' * many * size}]\n",
        lambda: "".join(f"{' ' * n}a{n}:\n" for n in range(many)),
        lambda: "".join(f"grpo_{n}: {n}\n" for n in range(many * 3)),
        lambda: f"defaults: [{', '.join(['recipe.yaml', str(CONFIGS / BASES[0])] * size)}]\n",
        lambda: f"defaults: [{', '.join([str(CONFIGS / BASES[0])] * many)}]\n",
    ]
    text = "a0: &a0 " + rng.choice(["x", "[x, x]", "{x: 1}", "9", "${a1}"]) + "\n" + rng.choice(bombs)()
    return Case(None, text if "defaults" in text else text + _dump(_tree(rng)))


_ODD_OVERRIDES = (
    "", "=", "a", "+", "~", "++", "+a", "a=", "=1", "grpo", "grpo=", "~grpo", "~policy.hf_config=3", "grpo.seed=1,2",
    "grpo.seed=choice(1,2)", "grpo.seed=range(1,1000000000)", "grpo.seed=interval(0,1)", "grpo.seed=glob(*)",
    "grpo.seed=sort(3,1)", "grpo.seed=shuffle(1,2)", "grpo.seed=tag(a,1)", "grpo.seed=int(3.7)", "grpo.seed=int(x)",
    "grpo.seed=str(3)", "grpo.seed=float('nan')", "grpo@x=1", "grpo/seed=1", "grpo.seed@x:y=1", "grpo..seed=1",
    ".grpo.seed=1", "grpo.seed.=1", "+grpo.seed=1", "grpo.seed='", 'grpo.seed="', "grpo.seed='1'", "grpo.seed=${",
    "grpo.seed=${policy}", "grpo.seed=${mul:2,3}", "policy.hf_config={a: 1, a: 2}", "policy.hf_config={1: 2}",
    "+policy.hf_config={a.b: 2}", "grpo={_override_: true}", "grpo={_override_: false}", "grpo._override_=true",
    "+grpo._override_=true", "policy={}", "grpo=null", "grpo=[]", "grpo.seed=[1,", "grpo.seed={a", "grpo.seed=(",
    "+defaults=x", "defaults=x", "+a.b.c.d.e.f=1", "+policy.model_name.x=1", "grpo.seed=9999999999999999999999",
    "grpo.seed=1e400", "grpo.seed=-0", "grpo.seed=nan", "grpo.seed=\x00", "grpo.seed=\u2028", "grpo.seed=\ud800",
    "grpo.seed=é", "++é=1", "grpo.seed= 3 ", " grpo.seed=3", "grpo.seed =3", "grpo.seed=\\,", "grpo.seed=a\\ b",
    "hydra.run.dir=x", "--config=x", "-x", "grpo.seed=" + "[" * 500, "grpo.seed=" + "(" * 500, "+x=" + "{a:" * 31,
    "grpo.seed=" + "9" * 4500, "grpo.seed=" + "x" * 20_000, "grpo.seed=" + "int(" * 20 + "1" + ")" * 20,
    "+" + "a." * 500 + "b=1", "+" + "a." * 31 + "b=1",
)  # fmt: skip


def _overridden(rng: random.Random) -> Case:
    tree = _tree(rng)
    if rng.random() < 0.3:
        _mutate(rng, tree)
    case = Case(tree, _dump(tree))
    for _ in range(rng.choice([1, 1, 2, 5])):
        if rng.random() < 0.2:
            case.overrides.append(rng.choice(_ODD_OVERRIDES))
            case.tree = None  # the mutated text's meaning is not known here
            continue
        path = rng.choice(list(_paths(tree)))
        if not all(re.fullmatch(r"[A-Za-z_]\w*", key) for key in path):
            continue
        name = ".".join(path)
        if rng.random() < 0.1:
            case.overrides.append(f"~{name}")
            _forget(case, name)
            case.given[name] = DELETED
            continue
        value = rng.choice([value_like, any_value])(rng, _get(tree, path))
        if (written := _as_override(value)) is None:
            continue
        case.overrides.append(f"{rng.choice(['', '', '++'])}{name}={written}")
        _forget(case, name)
        case.given[name] = value
    if case.given:
        case.tree = None
    return case


def _forget(case: Case, name: str) -> None:
    for other in list(case.given):
        if other == name or other.startswith(f"{name}.") or name.startswith(f"{other}."):
            del case.given[other]


def _as_override(value: Any) -> str | None:
    """Returns the value in Hydra's grammar, or None if it is not simple."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value) if not isinstance(value, int) or abs(value) < 10**100 else None
    if isinstance(value, str) and "'" not in value and "\\" not in value and "${" not in value:
        return f"'{value}'"
    if isinstance(value, list) and all(isinstance(item, int | None) for item in value):
        return "[" + ",".join("null" if item is None else str(item).lower() for item in value) + "]"
    return None


# Checks of an accepted recipe.


def _check_message(message: str) -> None:
    lines = message.splitlines()
    if not lines[0].startswith("recipe ") or len(lines) < 2 or len(message) > 200_000:
        raise PropertyError(f"a message of a form of its own: {message[:500]!r}")
    for word in ("Traceback", "object at 0x", "Error("):
        if word in message:
            raise PropertyError(f"a message with {word!r}: {message[:2000]!r}")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields leaf values, empty sections and empty lists, by path."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}.{index}")
    else:
        yield path, value


def _same(value: Any, other: Any) -> bool:
    if type(value) is not type(other):
        return False
    if isinstance(value, float):
        return repr(value) == repr(other)
    return bool(value == other)


_ABSENT = object()


def _at(config: Any, path: str) -> Any:
    for key in path.split("."):
        if isinstance(config, list) and key.isdigit() and int(key) < len(config):
            config = config[int(key)]
        elif isinstance(config, dict) and key in config:
            config = config[key]
        else:
            return _ABSENT
    return config


def _check_nothing_ignored(case: Case, validated: ValidatedRecipe) -> None:
    config = validated.recipe.config
    resolved = copy.deepcopy(config)
    for path in (path for path, value in case.given.items() if value is DELETED):
        section, _, name = path.rpartition(".")
        if isinstance(found := _at(resolved, section) if section else resolved, dict):
            found.pop(name, None)
    resolve_absent_keys(resolved)  # a deleted key has the value that an absent one has
    for path, value in _leaves(case.tree) if case.tree is not None else ():
        if isinstance(value, str) and ("${" in value or value == "???"):
            continue
        if not _same(_at(config, path), value):
            raise PropertyError(f"{path} is {value!r} in the file and {_at(config, path)!r} in the recipe")
    for path, value in case.given.items():
        found = _at(config, path)
        if value is DELETED and not _same(found, _at(resolved, path)):
            raise PropertyError(f"{path} was deleted, and is {found!r}")
        if value is not DELETED and not (value == "???" or _same(found, value)):
            raise PropertyError(f"{path} was set to {value!r}, and is {found!r}")
    notes = "\n".join(validated.notes)
    used = dict(_leaves(validated.config))
    moved = {path.replace(MOVED, ""): path for path, _ in _leaves(config) if MOVED in path}
    used = {moved.get(path, path): value for path, value in used.items() if not (moved and f"{path}.".endswith(MOVED))}
    for path, value in _leaves(config):
        if path in used and _same(used[path], value):
            _check_known(path)
        elif not _is_screened(path, value, notes) and f"{path} " not in notes:
            raise PropertyError(f"{path}: {value!r} is accepted, and neither used nor in a note")
    for path in used:
        if _at(config, path) is _ABSENT:
            raise PropertyError(f"{path} is in no file")


def _check_known(path: str) -> None:
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        prefix = ".".join(parts[:end])
        if prefix in FREE:
            return
        if not is_valid_key(prefix):
            # An item of a list, or part of a value that the schema accepts as a whole.
            if end > 1 and is_valid_key(".".join(parts[: end - 1])) and parts[end - 1].isdigit():
                return
            section = ".".join(parts[: end - 1])
            if section.rpartition(".")[0] in SECTIONS and is_valid_key(section):
                return  # one of Megatron's fields that is a mapping
            raise PropertyError(f"{path} is accepted, and {prefix} is no key")


def _is_screened(path: str, value: Any, notes: str) -> bool:
    """Returns whether an upstream key is off or without effect, and so is dropped silently or with a note."""
    for row in OFF_ONLY:
        if re.fullmatch(_pattern(row.path), path) and value in row.off:
            return True
        if re.fullmatch(_pattern(row.path), path) and value == {} and {} in row.off:
            return True
    for feature in SWITCHED_OFF:
        if re.match(_pattern(feature.section) + r"(\.|$)", path):
            return True
    for plain in WITHOUT_EFFECT:
        if found := re.match(_pattern(plain.path) + r"(?=\.|$)", path):
            return plain.silent or value in (None, {}, []) or found.group() in notes
    return value == {} and any(name.startswith(f"{path}.") for name in upstream_paths())


def _pattern(path: str) -> str:
    return re.escape(path).replace(r"\*", r"[^.]+")


def _check_round_trip(validated: ValidatedRecipe, folder: Path) -> None:
    """Checks that `validate` prints the same recipe."""
    text = as_yaml(validated.recipe.config)
    if "${" in text:
        return  # a text with interpolations that are resolved already, and would be resolved again
    path = folder / "printed.yaml"
    path.write_text(text, encoding="utf-8")
    if "warm_start" in validated.recipe.config and validated.warm_start is not None:
        (folder / validated.warm_start.recipe.path.name).symlink_to(validated.warm_start.recipe.path)
    again = dict(_leaves(load_recipe(path).config))
    for key, value in _leaves(validated.recipe.config):
        if not _same(again.get(key, _ABSENT), value):
            raise PropertyError(f"{key} is {value!r}, printed so that it is read as {again.get(key)!r}")


def _check_plan(path: Path, overrides: list[str]) -> None:
    """Checks that planning prints a plan or one sentence, never Python's own message about a bad value."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(["plan", str(path), *overrides])
        except SystemExit as error:  # of argparse, of an override that starts with a dash
            status = int(str(error.code))
    if status not in (0, 2) or (status == 0) != bool(out.getvalue()):
        raise PropertyError(f"plan ended with {status}: {out.getvalue()[-500:]} {err.getvalue()[-500:]}")
    if "Traceback" in err.getvalue() or re.search(r"\bnan\b", out.getvalue()):
        raise PropertyError(f"plan printed {err.getvalue()[-1000:]} {out.getvalue()[-1000:]}")
