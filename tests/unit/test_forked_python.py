"""Tests that `forked_python()` runs scripts as Python itself does, except for modules imported already."""

import os
import subprocess

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
        [forked_python(), "-m", "asked", what], cwd=tmp_path, env=os.environ | {"ASKED": "yes"}, input="to stdin",
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == status
    if what != "die":  # with its unflushed output; a worker of Ray that is forked with Ray imported never starts
        assert done.stdout == f"['{what}'] __main__ {tmp_path} yes to stdin [True, False]\n"
        assert done.stderr.startswith("to stderr\n")
    assert ("ValueError: on purpose" in done.stderr) == (what == "raise")
