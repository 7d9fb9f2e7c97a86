"""docs/add-a-target.md is right: what it says to write works, and nothing else has to change."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs" / "add-a-target.md"


def steps() -> list[tuple[str, str, str]]:
    """The page's blocks of code in order: the file that was named last before each, its language, its text."""
    found, path = [], ""
    for named, language, code in re.findall(r"`(\w+/[\w/]+\.py)`|^```(\w+)\n(.*?)^```", PAGE.read_text(), re.S | re.M):
        if named:
            path = named
        else:
            found.append((path, language, code))
    return found


def apply(change: str, path: Path) -> None:
    """Change a file as a diff without line numbers says: the lines that were there have to be there once."""
    lines = change.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] != "+")
    after = "".join(line[1:] for line in lines if line[0] != "-")
    text = path.read_text()
    assert text.count(before) == 1, f"{path.name} has {text.count(before)} times:\n{before}"
    path.write_text(text.replace(before, after))


def run(copy: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=copy, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of the package in which everything has been done that the page says."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ("nemo_offload_rl", "examples"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    for path, language, code in steps():
        if language == "diff":
            apply(code, folder / path)
        else:
            assert not (folder / path).exists()
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(code)
    return folder


def test_the_page_has_a_mechanism_a_test_and_changes_to_the_files_that_it_lists():
    paths = {path for path, _, _ in steps()}
    assert paths == {
        "nemo_offload_rl/residency/table.py",
        "nemo_offload_rl/residency/my_average.py",
        "nemo_offload_rl/residency/targets.py",
        "nemo_offload_rl/config/schema/residency.py",
        "tests/unit/residency/test_my_average.py",
    }


def test_the_test_of_the_page_passes_in_a_changed_copy_of_the_package(copy):
    assert "3 passed" in run(copy, "pytest", "-q", "-p", "no:cacheprovider", "tests")


def test_without_the_line_in_the_table_the_test_of_the_page_fails(copy, tmp_path):
    shutil.copytree(copy, tmp_path / "copy")
    shutil.copy(REPOSITORY / "nemo_offload_rl/residency/targets.py", tmp_path / "copy/nemo_offload_rl/residency")
    with pytest.raises(AssertionError, match="2 failed, 1 passed"):
        run(tmp_path / "copy", "pytest", "-q", "-p", "no:cacheprovider", "tests")


def test_the_code_of_the_page_is_in_the_projects_style(copy):
    paths = ["nemo_offload_rl/residency", "nemo_offload_rl/config/schema/residency.py", "tests"]
    run(copy, "ruff", "check", "--no-cache", *paths)
    run(copy, "ruff", "format", "--no-cache", "--check", *paths)
