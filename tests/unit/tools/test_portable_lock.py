import subprocess
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
TOOL = REPOSITORY / "tools" / "portable_lock.py"

# A made-up scheme, so that no host is named here either.
WITH_ADDRESSES = """version = 1

[[package]]
name = "absl-py"
version = "2.5.1"
source = { registry = "mirror://somewhere/simple" }
sdist = { url = "mirror://somewhere/ab/absl_py-2.5.1.tar.gz", hash = "sha256:aa", size = 3 }
wheels = [
    { url = "mirror://somewhere/cd/absl_py-2.5.1-py3-none-any.whl#frag", hash = "sha256:bb" },
]
"""


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, check=False)


def test_strip_keeps_versions_and_hashes_and_no_address(tmp_path):
    lock, original = tmp_path / "uv.lock", tmp_path / "original.lock"
    lock.write_text(WITH_ADDRESSES)
    original.write_text(WITH_ADDRESSES)
    assert run("check", lock).returncode == 1
    assert run("strip", lock).returncode == 0
    assert run("check", lock).returncode == 0
    (package,) = tomllib.loads(lock.read_text())["package"]
    assert package["source"] == {"registry": "registry"}
    assert package["sdist"] == {"path": "absl_py-2.5.1.tar.gz", "hash": "sha256:aa", "size": 3}
    assert package["wheels"] == [{"path": "absl_py-2.5.1-py3-none-any.whl", "hash": "sha256:bb"}]
    assert run("same", lock, original).returncode == 0
    stripped = lock.read_text()
    assert run("strip", lock).returncode == 0
    assert lock.read_text() == stripped
    original.write_text(WITH_ADDRESSES.replace("sha256:bb", "sha256:cc"))
    done = run("same", lock, original)
    assert done.returncode == 1 and "absl-py" in done.stderr
    done = run("check", REPOSITORY / "uv.lock")
    assert done.returncode == 0, done.stderr


def test_the_documentations_table_of_sizes_is_the_planners():
    done = subprocess.run([sys.executable, REPOSITORY / "tools" / "residency_page.py", "check"], check=False)
    assert done.returncode == 0
