"""Recipes that tests of the schema start from."""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from nemo_offload_rl.config import Recipe, RecipeError, ValidatedRecipe, load
from nemo_offload_rl.config.installed import declared_fields

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
DATA = Path(__file__).parent / "data"
MEGATRON = "policy.megatron_cfg"

MESSAGES = DATA / "messages.json"
WRITES = "WRITE_MESSAGES" in os.environ
VLLM_SOURCE = """
class EngineArgs:
    async_scheduling: bool | None = None
    enable_chunked_prefill: bool | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    moe_backend: MoEBackend = "auto"
"""

GOLDEN: dict[str, dict[str, str]] = json.loads(MESSAGES.read_text())
"""What users read: by rule or kind of mistake, and then by recipe and overrides, the message.

Groups that begin with `accepted` have the notes of valid recipes, and those named for tests what these ask `error_of`.
A new case gets `null`; `make messages` writes its text.
"""

Golden = Callable[[str, str, str], None]
ErrorOf = Callable[..., str]
Installed = Callable[..., None]


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
def installed_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the installed vLLM, if there is one, by a source with a few arguments."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text(VLLM_SOURCE)
    monkeypatch.setattr(declared_fields, "source_folder", lambda: tmp_path)


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> Iterator[Golden]:
    """Checks a message, or notes, against the golden file; `make messages` writes it anew."""
    runs = {getattr(item, "originalname", "") for item in request.session.items} if WRITES else set()
    known = {group: {} if group in runs else cases for group, cases in GOLDEN.items()}

    def check(group: str, case: str, found: str) -> None:
        cases = known.setdefault(group, {})
        if WRITES:
            cases[case] = found
        assert found == cases.get(case), f"not the text in {MESSAGES.name}; see CONTRIBUTING.md"

    yield check
    if WRITES:
        used = {group: cases for group, cases in known.items() if cases}
        MESSAGES.write_text(json.dumps(used, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


@pytest.fixture
def error_of(request: pytest.FixtureRequest, tmp_path: Path, golden: Golden) -> ErrorOf:
    """What the user reads of a recipe, by default the tiny GRPO one, with overrides; the golden file has it, too."""

    seen: Counter[str] = Counter()

    def shown(text: str) -> str:
        return text.replace(str(tmp_path), "TMP").replace(f"{CONFIGS}/", "").replace("examples/configs/", "")

    def read(*overrides: str, recipe: Path = CONFIGS / "grpo_tiny_cpu.yaml", group: str | None = None) -> str:
        with pytest.raises(RecipeError) as caught:
            load(recipe, overrides)
        error = str(caught.value)
        key = shown(" ".join([str(recipe), *overrides]))
        seen[key] += 1
        if seen[key] > 1:  # of a file that the test has changed meanwhile
            key += f" ({seen[key]})"
        golden(group or request.node.name.partition("[")[0], key, shown(error))
        return error

    return read
