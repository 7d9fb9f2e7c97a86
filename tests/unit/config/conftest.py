"""Recipes that tests of the schema start from."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_offload_rl.config import RecipeError, load

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
DATA = Path(__file__).parent / "data"

ErrorOf = Callable[..., str]
Installed = Callable[..., None]


def each_of(broken: Mapping[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Parametrizes by the `overrides` that break rules, and the `message` of each; `broken` has those of each rule."""
    cases = [case for cases in broken.values() for case in cases]
    return pytest.mark.parametrize(("overrides", "message"), cases, ids=lambda value: str(value)[-60:])


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
