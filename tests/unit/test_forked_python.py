"""Tests that `forked_python()` runs scripts as Python itself does, except for modules imported already."""

import json
import os
import subprocess
import sys

import pytest
import torch
from support.forked_python import forked_python

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not live through a fork")

MODULE = """
import os, signal, sys
are_imported = [name in sys.modules for name in ("megatron.bridge", "ray")]
print(sys.argv[1:], __name__, os.getcwd(), os.environ["ASKED"], sys.stdin.read(), are_imported)
print("to stderr", file=sys.stderr)
if sys.argv[1] == "die":
    os.kill(os.getpid(), signal.SIGTERM)
if sys.argv[1] == "raise":
    raise ValueError("on purpose")
sys.exit(3)
"""


@pytest.mark.parametrize(("what", "status"), [("exit", 3), ("raise", 1), ("die", -15)])
def test_a_module_has_arguments_streams_folder_environment_and_status_of_its_own(tmp_path, what, status):
    (tmp_path / "asked.py").write_text(MODULE)
    done = subprocess.run(
        [forked_python(), "-m", "asked", what],
        cwd=tmp_path,
        env=os.environ | {"ASKED": "yes"},
        input="to stdin",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == status
    if what != "die":  # with its unflushed output; a worker of Ray that is forked with Ray imported never starts
        assert done.stdout == f"['{what}'] __main__ {tmp_path} yes to stdin [True, False]\n"
        assert done.stderr.startswith("to stderr\n")
    assert ("ValueError: on purpose" in done.stderr) == (what == "raise")


@pytest.mark.parametrize("asked", [{}, {"command_prefix": ["nice"]}, {"env_vars": {"ASKED": "${HOME}"}}])
def test_a_worker_of_ray_is_forked_with_its_variables_and_by_ray_where_it_asks_for_more(tmp_path, asked):
    (tmp_path / "default_worker.py").write_text(
        "import os, sys; print(sys.argv[1:], os.environ['ASKED'], 'megatron.bridge' in sys.modules)"
    )
    context = {"command_prefix": [], "env_vars": {"ASKED": "yes"}, "py_executable": forked_python()} | asked
    rays_own = tmp_path / "setup_worker.py"
    rays_own.write_text("print('started by Ray')")
    options = ["--node=a", "--language=PYTHON", f"--serialized-runtime-env-context={json.dumps(context)}"]
    done = subprocess.run(
        [forked_python(), rays_own, tmp_path / "default_worker.py", *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout == ("started by Ray\n" if asked else "['--node=a'] yes True\n")


def test_code_is_run_by_python_itself():
    code = "import sys; print(sys.executable)"
    done = subprocess.run([forked_python(), "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == sys.executable
