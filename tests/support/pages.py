"""Applies a documentation page's code blocks, which are the whole of a change, to a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Returns the page's code blocks in order: the file named last before each, its language, its text."""
    found, path = [], ""
    pattern = r"`(\w+/[\w/]+\.(?:py|yaml))`|^```(\w+)\n(.*?)^```"
    for named, language, code in re.findall(pattern, page.read_text(), re.S | re.M):
        if named:
            path = named
        else:
            found.append((path, language, code))
    return found


def copy_with_changes(page: Path, folder: Path) -> None:
    for name in ("nemo_offload_rl", "examples"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    for path, language, code in blocks(page):
        if language == "diff":
            _apply(code, folder / path)
        else:
            assert not (folder / path).exists()
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(code)


def _apply(change: str, path: Path) -> None:
    """Changes a file as a diff without line numbers describes; the removed lines must occur exactly once."""
    lines = change.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] != "+")
    after = "".join(line[1:] for line in lines if line[0] != "-")
    text = path.read_text()
    assert text.count(before) == 1, f"{path.name} has {text.count(before)} times:\n{before}"
    path.write_text(text.replace(before, after))


def run_in(copy: Path, *arguments: str) -> str:
    """Runs `python ...` with the copy of the package; returns its output, or raises with it."""
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    streams = {"capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *arguments], cwd=copy, env=environment, timeout=400, **streams)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
