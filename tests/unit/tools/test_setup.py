"""Tests tools/setup.sh with a fake uv that only records how it was called."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]

STAND_IN = f"""#!/bin/bash
case "$1 $2" in
"--version "*) echo "uv 99.0.0"; exit ;;
esac
[[ -z ${{UV_PYTHON+set}} ]] || echo "UV_PYTHON is set" >> "$CALLS"
echo "$*" >> "$CALLS"
case "$1 $2" in
"python find") [[ -z $FAKE_NO_PYTHON ]] && echo "{sys.executable}" ;;
"python install") exit 1 ;;
"venv "*) mkdir -p .venv/bin && ln -sfn "{sys.executable}" .venv/bin/python ;;
esac
"""


class Checkout:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a b"
        for name in ("pyproject.toml", "uv.lock", "tools/setup.sh", "tools/uv-bootstrap.txt"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, self.folder / name)
        self._calls = folder / "calls"
        self._bin = folder / "bin"
        self._bin.mkdir()
        (self._bin / "uv").write_text(STAND_IN)
        (self._bin / "uv").chmod(0o755)
        self.uv_link = self.folder / ".venv" / "bin" / "uv"
        without_uv = [folder for folder in os.environ["PATH"].split(":") if not Path(folder, "uv").exists()]
        self.path = ":".join([str(self._bin), *without_uv])

    def setup(self, *arguments: str, status: int = 0, **environment: str) -> tuple[str, list[str]]:
        """Runs the script, which ends with this status; returns what it says and the calls of uv."""
        self._calls.write_text("")
        done = subprocess.run(
            [self.folder / "tools" / "setup.sh", *arguments],
            env={"PATH": self.path, "CALLS": str(self._calls), "HOME": str(self._bin)} | environment, cwd="/",
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr, self._calls.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_the_first_call_installs_with_hashes_and_the_second_does_nothing(checkout):
    _, calls = checkout.setup(UV_PYTHON="/usr/bin/python3")  # is not passed on
    assert [call.split()[:2] for call in calls] == [
        ["python", "find"], ["venv", "--quiet"], ["export", "--frozen"], ["pip", "sync"], ["pip", "install"],
    ]  # fmt: skip
    assert "--require-hashes build/requirements.txt" in calls[3]
    assert "--no-deps --editable ." in calls[4]  # only the project: its dependencies are installed already
    assert checkout.setup() == ("", [])
    with (checkout.folder / "uv.lock").open("a") as lock:
        lock.write("# changed\n")
    _, calls = checkout.setup()  # without a new environment
    assert [call.split()[0] for call in calls] == ["export", "pip", "pip"]


def test_extras_and_groups_stay(checkout):
    checkout.setup()
    _, calls = checkout.setup("--extra", "te")
    assert "--extra te" in calls[0]
    assert checkout.setup()[1] == []
    _, calls = checkout.setup("--group", "docs")
    assert "--extra te --group docs" in calls[0]
    assert checkout.setup("--extra", "te")[1] == []


def test_the_environment_first_on_path_leaves_uv_a_link_to_the_real_one(checkout):
    """Sets PATH as an activated environment does: its first uv is the link that the first call made."""
    checkout.setup()
    real = checkout.uv_link.readlink()
    in_environment = f"{checkout.uv_link.parent}:{checkout.path}"
    _, calls = checkout.setup("--group", "docs", PATH=in_environment)
    assert [call.split()[0] for call in calls] == ["export", "pip", "pip"]
    assert checkout.uv_link.readlink() == real
    # Only the environment is on PATH.
    checkout.setup("--group", "test", PATH=f"{checkout.uv_link.parent}:/usr/bin:/bin")
    assert checkout.uv_link.readlink() == real
    checkout.uv_link.unlink()
    checkout.uv_link.symlink_to(checkout.uv_link)  # a link to itself is mended
    checkout.setup(PATH=in_environment)
    assert checkout.uv_link.resolve(strict=True).read_text() == STAND_IN


def test_without_python_it_says_what_to_do_and_leaves_no_stamp(checkout):
    said, calls = checkout.setup(FAKE_NO_PYTHON="1", status=1)
    assert "Python 3.12 is needed" in said and "pyenv install 3.12" in said
    assert not any(call.startswith(("venv", "pip")) for call in calls)
    checkout.setup()
