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


def test_a_process_that_is_started_without_streams_prints_nothing(tmp_path):
    without = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", PRINTS]
    path = {"PYTHONPATH": str(ROOT)}
    assert subprocess.run(without, cwd=tmp_path, env=os.environ | path, check=False).returncode == 7


# A process that shares the pipe may have set O_NONBLOCK, so that a full pipe is an error.
FILLS_A_PIPE = """
import os
from nemo_offload_rl.storage.output import lasting_output
reader, writer = os.pipe()
os.dup2(writer, 1)
for descriptor in (reader, 1):
    os.set_blocking(descriptor, False)
with lasting_output():
    for step in range(20000):
        print(f"step {step}", flush=True)
    os.read(reader, 1 << 20)
    print("end", flush=True)
assert os.read(reader, 1 << 20).endswith(b"end\\n")
"""


def test_a_reader_that_is_slow_gets_what_is_printed_later(tmp_path):
    buffered = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    subprocess.run([sys.executable, "-c", FILLS_A_PIPE], cwd=tmp_path, env=os.environ | buffered, check=True)
