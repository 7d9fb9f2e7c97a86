"""Reading a recipe: YAML with `defaults:` inheritance, command-line overrides and `${...}` interpolation."""

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_offload_rl.config.overrides import apply_overrides, merge
from nemo_offload_rl.config.problems import Origin, Problem, RecipeError, nearest, show_file
from nemo_offload_rl.config.yaml_source import Node, read_yaml

# NeMo-RL's arithmetic in recipes: "${mul:${a}, 2}".
RESOLVERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": max,
}

_REFERENCE = re.compile(r"\$\{(\.*)([A-Za-z_][\w.]*)\}")  # ${section.key} and ${.sibling}


@dataclass(frozen=True)
class Recipe:
    """A recipe with everything inherited, overridden and resolved, before it is checked against the schema.

    Attributes:
        path: the file.
        config: the resolved values.
        origins: where each key was written, by its full path.
        written: what was written where a value was interpolated, by its full path.
        problems: mistakes that left the rest of the recipe readable.
    """

    path: Path
    config: dict[str, Any]
    origins: dict[str, Origin]
    written: dict[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def origin(self, path: str) -> Origin:
        """Where a key was written, or the nearest section around it."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path.rpartition(".")[0]
        return Origin(show_file(self.path))

    def sources(self, path: str) -> list[str]:
        """The keys that a value was interpolated from."""
        if path not in self.written:
            return []
        sources = []
        for dots, name in _REFERENCE.findall(self.written[path]):
            section = path.split(".")[: -len(dots)] if dots else []
            sources.append(".".join([*section, name]))
        return sources


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: the YAML file.
        overrides: command-line overrides, applied after inheritance and before interpolation.

    Raises:
        RecipeError: with every mistake found; the schema is not looked at yet (see `validate`).
    """
    recipe = read_recipe(path, overrides)
    if recipe.problems:
        raise RecipeError(show_file(recipe.path), recipe.problems)
    return recipe


def read_recipe(path: str | Path, overrides: Sequence[str] = (), given_in: str | None = None) -> Recipe:
    """As `load_recipe`, but mistakes that leave the rest readable are returned in `problems` instead of raised.

    Args:
        path: the YAML file.
        overrides: as `load_recipe`.
        given_in: where the overrides come from, if not from the command line.
    """
    path = Path(path)
    problems: list[Problem] = []
    root = _inherit(path, (), problems)
    if root is None:
        raise RecipeError(show_file(path), problems)
    problems += apply_overrides(root, overrides, _is_known_key, given_in)
    config, written, unresolved = _resolve(root)
    return Recipe(path, config, root.origins(), written, (*problems, *unresolved))


def _is_known_key(path: str) -> bool:
    # Needed only to explain a mistake; loading the schema costs 0.1 s.
    from nemo_offload_rl.config.keys import is_valid_key

    return is_valid_key(path)


def _inherit(
    path: Path, chain: tuple[Path, ...], problems: list[Problem], named_at: Origin | None = None
) -> Node | None:
    """The file merged over what its `defaults` name; None where any of them cannot be read."""
    if not path.is_file():
        kind = "is a folder, not a recipe" if path.is_dir() else "there is no such recipe"
        if named_at is None:
            near = nearest(path.name, [item.name for item in path.parent.glob("*.yaml")])
            suggestion = f"; did you mean {show_file(path.parent / near)}?" if near else ""
            problems.append(Problem("", Origin(show_file(path)), f"{kind}{suggestion}"))
        else:
            problems.append(Problem("defaults", named_at, f"names {show_file(path)}, but {kind}"))
        return None
    if path.resolve() in [link.resolve() for link in chain]:
        cycle = " -> ".join(link.name for link in (*chain, path))
        problems.append(Problem("defaults", named_at, f"the recipe inherits from itself: {cycle}"))
        return None
    root, found = read_yaml(path)
    problems += found
    if root is None:
        return None
    defaults = root.value.pop("defaults", None)
    parents = _parents(defaults, problems) if defaults is not None else []
    bases = [_inherit(path.parent / name, (*chain, path), problems, origin) for name, origin in parents]
    merged = Node({}, root.origin)
    for base in bases:
        if base is None:
            return None
        merged = merge(merged, base)
    return merge(merged, root)


def _parents(defaults: Node, problems: list[Problem]) -> list[tuple[str, Origin]]:
    nodes = defaults.value if isinstance(defaults.value, list) else [defaults]
    parents = []
    for node in nodes:
        if isinstance(node.value, str) and node.value:
            parents.append((node.value, node.origin))
        else:
            message = f"is the name of a recipe, or a list of such names; found {node.plain()!r}"
            problems.append(Problem("defaults", node.origin, message))
    return parents


def _resolve(root: Node) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """Resolve every `${...}`: the plain values, what was written in their place, and what could not be resolved."""
    for name, function in RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, function)
    plain = root.plain()
    origins = root.origins()
    problems = [Problem(path, origins[path], message) for path, message in _drop_long_integers(plain)]
    written = {path: text for path, text in _leaves(plain) if isinstance(text, str) and ("${" in text or text == "???")}
    for path, text in written.items():
        try:
            OmegaConf.create([text])
        except OmegaConfBaseException as error:
            message = f"{text!r} is no interpolation such as ${{section.key}} ({_reason(error)})"
            problems.append(Problem(path, origins[path], message))
            _put(plain, path, None)
    tree = OmegaConf.create(plain)
    broken = {problem.path for problem in problems}
    for path, text in written.items():
        if path in broken:
            continue
        try:
            _put(plain, path, _value_at(tree, path))
        except OmegaConfBaseException as error:
            message = (
                "must be given a value; it is ???"
                if text == "???"
                else f"{text!r} cannot be resolved: {_reason(error)}"
            )
            problems.append(Problem(path, origins[path], message))
            continue
        for longer, message in _drop_long_integers(plain, path):
            problems.append(Problem(longer, origins[path], message))
    return plain, written, problems


def _drop_long_integers(plain: dict[str, Any], below: str = "") -> list[tuple[str, str]]:
    """Replaces integers that no library takes, and that are not even printed where they are longer still, by null.

    Args:
        plain: the recipe, which is changed.
        below: looks at what lies at this path only.

    Returns:
        The path of each, and what is wrong with it.
    """
    value = plain if not below else _at(plain, below)
    long = [
        path
        for path, leaf in _leaves(value, below)
        if isinstance(leaf, int) and not -(2**63) <= leaf < 2**64 and not isinstance(leaf, bool)
    ]
    for path in long:
        _put(plain, path, None)
    return [(path, "is an integer of more than 64 bits") for path in long]


def _reason(error: OmegaConfBaseException) -> str:
    return str(error).splitlines()[0].rstrip(".")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    prefix = f"{path}." if path else ""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{prefix}{index}")
    else:
        yield path, value


def _value_at(tree: DictConfig, path: str) -> Any:
    node: Any = tree
    for name in path.split("."):
        node = node[int(name)] if isinstance(node, ListConfig) else node[name]
    if OmegaConf.is_config(node):
        return OmegaConf.to_container(node, resolve=True)
    return node


def _at(plain: Any, path: str) -> Any:
    for name in path.split("."):
        plain = plain[int(name)] if isinstance(plain, list) else plain[name]
    return plain


def _put(plain: Any, path: str, value: Any) -> None:
    section, _, name = path.rpartition(".")
    plain = _at(plain, section) if section else plain
    plain[int(name) if isinstance(plain, list) else name] = value
