"""Recipes that tests of the schema start from."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nemo_offload_rl.config import Recipe, RecipeError, ValidatedRecipe, load
from nemo_offload_rl.config.rules import RULES

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
DATA = Path(__file__).parent / "data"

ErrorOf = Callable[..., str]
Installed = Callable[..., None]


def each_of(broken: Mapping[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Parametrizes by the `overrides` that break rules, and the `message` of each; `broken` has those of each rule."""
    cases = [case for cases in broken.values() for case in cases]
    return pytest.mark.parametrize(("overrides", "message"), cases, ids=lambda value: str(value)[-60:])


def names_of(topic: ModuleType) -> set[str]:
    """Returns the names of a topic's rules."""
    functions = [rule.check for rule in RULES if hasattr(rule.check, "__name__")]
    return {check.__name__ for check in functions if check.__module__ == topic.__name__}


@pytest.fixture(autouse=True, scope="session")
def warm_starts_of_examples_are_checked_once() -> Iterator[None]:
    """The tiny GRPO recipe names an SFT recipe that no test changes; checking it is half of the time of a `load`."""
    module = sys.modules[load.__module__]
    read_recipe, validate = module.read_recipe, module.validate
    read: dict[tuple[Path, tuple[str, ...], tuple[str, ...]], Recipe] = {}
    checked: dict[int, ValidatedRecipe] = {}

    def read_once(path: str | Path, overrides: Sequence[str] = (), given_in: Sequence[str] | None = None) -> Recipe:
        if given_in is None or Path(path).parent != CONFIGS:  # no warm start, or one that a test wrote
            return read_recipe(path, overrides, given_in)
        key = Path(path), tuple(overrides), tuple(given_in)
        if key not in read:
            read[key] = read_recipe(path, overrides, given_in)
        return read[key]

    def validate_once(recipe: Recipe) -> ValidatedRecipe:
        if not any(recipe is known for known in read.values()):
            return validate(recipe)
        if id(recipe) not in checked:
            checked[id(recipe)] = validate(recipe)
        return checked[id(recipe)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "read_recipe", read_once)
        patch.setattr(module, "validate", validate_once)
        yield


@pytest.fixture
def one_problem_of(error_of: ErrorOf) -> ErrorOf:
    """What the user reads of a recipe that breaks one rule, and no other."""

    def read(*overrides: str) -> str:
        error = error_of(*overrides)
        assert ": 1 problem\n" in error
        return error

    return read


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Makes distributions seem to be installed, each in the version that is given for its name."""

    def pretend(**versions: str) -> None:
        for name, version in versions.items():
            info = tmp_path / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return pretend


@pytest.fixture
def error_of() -> ErrorOf:
    """What the user reads of a recipe, by default the tiny GRPO one, with overrides."""

    def read(*overrides: str, recipe: Path = CONFIGS / "grpo_tiny_cpu.yaml") -> str:
        with pytest.raises(RecipeError) as caught:
            load(recipe, overrides)
        return str(caught.value)

    return read
