"""Recipes that tests of the schema start from."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_offload_rl.config import RecipeError, load

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
DATA = Path(__file__).parent / "data"

ErrorOf = Callable[..., str]


@pytest.fixture
def error_of() -> ErrorOf:
    """What the user reads of a recipe, by default the tiny GRPO one, with overrides."""

    def read(*overrides: str, recipe: Path = CONFIGS / "grpo_tiny_cpu.yaml") -> str:
        with pytest.raises(RecipeError) as caught:
            load(recipe, overrides)
        return str(caught.value)

    return read
