"""Tests that output which cannot be written does not end a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# More than the buffers hold; the last line is in the status, since the streams may be gone.
PRINTS = """
import logging, sys
from rich.console import Console
from nemo_offload_rl.storage.output import lasting_output
logging.basicConfig(filename="log", level=logging.INFO)
with lasting_output():
    for console in (Console(), Console(stderr=True)):
        for step in range(2000):
            console.print(f"step {step}")
    print("end", file=sys.stderr)
sys.exit(7)
"""


def _printed(folder, output):
    command = [sys.executable, "-c", PRINTS]
    path = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, stdout=output, stderr=output, cwd=folder, env=os.environ | path, check=False)


@pytest.mark.parametrize("closed", ["pipe", "terminal"])
def test_a_reader_that_is_gone_ends_nothing_and_the_log_says_so(closed, tmp_path):
    reader, writer = os.pipe() if closed == "pipe" else os.openpty()
    os.close(reader)
    assert _printed(tmp_path, writer).returncode == 7
    os.close(writer)
    reason = {"pipe": "Broken pipe", "terminal": "Input/output error"}[closed]
    said = "INFO:nemo_offload_rl.storage.output:The process goes on without its"
    assert (tmp_path / "log").read_text().splitlines() == [
        f"{said} {stream}, which cannot be written: {reason}." for stream in ("standard output", "standard error")
    ]


def test_a_full_disk_ends_nothing(tmp_path):
    with open("/dev/full", "w") as full:
        assert _printed(tmp_path, full).returncode == 7


def test_what_can_be_written_is_written(tmp_path):
    with open(tmp_path / "output", "w") as output:
        assert _printed(tmp_path, output).returncode == 7
    lines = (tmp_path / "output").read_text().splitlines()
    assert lines == [f"step {step}" for step in range(2000)] * 2 + ["end"]
