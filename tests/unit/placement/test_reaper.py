"""What ends when a driver has ended, also when it was killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nemo_offload_rl.placement.reaper import MARK, Reaper
from nemo_offload_rl.placement.signals import ending_signals_blocked

# A driver with what Ray makes: a session folder, and a grandchild in a group of its own whose parent is gone.
DRIVER = """
import os, subprocess, sys, time
from pathlib import Path
from nemo_offload_rl.placement.reaper import Reaper

root = Path(sys.argv[1])
(root / f"session_yesterday_{os.getpid()}").mkdir()
reaper = Reaper(str(root))
folder = root / f"session_today_{os.getpid()}"
folder.mkdir()
log = open(folder / "log", "w")  # Ray's driver writes there, too
(root / "session_latest").symlink_to(folder)
code = "import subprocess, sys; out = open(sys.argv[1], 'w') if sys.argv[1:] else -3; "
code += "print(subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=out, stderr=-3).pid)"
command, environment = [sys.executable, "-c", code], dict(os.environ)
if sys.argv[2] == "unmarked":  # as an agent of Ray's, whose title takes the place of its environment
    command.append(str(folder / "log"))
    environment.pop("NEMO_OFFLOAD_RL_DRIVER")
started = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
print(started.stdout.strip(), flush=True)
how = sys.stdin.readline().strip()
if how == "fork":  # a child that holds the pipe, and outlives the driver
    if os.fork() == 0:
        time.sleep(4)
        os._exit(0)
elif how:
    reaper.finish(keep_logs=how == "keep")
    print("ended", flush=True)
time.sleep(1000)
"""


def start(root: Path, kind: str = "marked") -> tuple[subprocess.Popen, psutil.Process]:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(root), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return driver, psutil.Process(int(driver.stdout.readline()))


def say(driver: subprocess.Popen, how: str) -> None:
    driver.stdin.write(f"{how}\n")
    driver.stdin.flush()


def session_folders(root: Path) -> list[str]:
    return sorted(path.name.split("_")[1] for path in root.iterdir())


def wait_until_gone(process: psutil.Process) -> None:
    psutil.wait_procs([process], timeout=20)
    assert not process.is_running()


@pytest.mark.parametrize(("how", "kind"), [("", "marked"), ("fork", "marked"), ("", "unmarked")])
def test_a_killed_driver_leaves_neither_processes_nor_its_session_folder(tmp_path, how, kind):
    driver, grandchild = start(tmp_path, kind)
    with open(next(tmp_path.glob(f"session_today_{driver.pid}")) / "log") as log:
        reader = subprocess.Popen(["sleep", "1000"], stdin=log)  # a user who looks at a log is not the driver's
    say(driver, how)
    assert grandchild.is_running()
    if how:
        time.sleep(0.2)
    driver.kill()
    driver.wait()
    wait_until_gone(grandchild)
    deadline = time.monotonic() + 20
    while session_folders(tmp_path) != ["yesterday"]:  # of another process, and the link to ours is gone
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert reader.poll() is None
    reader.kill()
    reader.wait()


@pytest.mark.parametrize(("how", "left"), [("delete", ["yesterday"]), ("keep", ["latest", "today", "yesterday"])])
def test_a_driver_waits_until_everything_is_gone_and_may_keep_the_logs(tmp_path, how, left):
    driver, grandchild = start(tmp_path)
    try:
        say(driver, how)
        assert driver.stdout.readline() == "ended\n"
        assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE
        assert session_folders(tmp_path) == left
    finally:
        driver.kill()
        driver.wait()


def test_what_belongs_to_another_driver_is_left_alone(tmp_path):
    others = subprocess.Popen(["sleep", "1000"], env=os.environ | {MARK: "1-another"})
    try:
        Reaper(str(tmp_path)).finish(keep_logs=False)
        assert others.poll() is None
        assert MARK not in os.environ
    finally:
        others.kill()
        others.wait()


def test_children_do_not_get_the_signals_that_end_a_run():
    with ending_signals_blocked():
        child = subprocess.Popen(["sleep", "1000"])
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
            child.send_signal(number)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=0.3)
    finally:
        child.kill()
        child.wait()
