"""Tests which processes and folders are removed after a driver has ended, also if it was killed."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from support.waiting import wait_until

from nemo_offload_rl.placement import reaper
from nemo_offload_rl.placement.reaper import MARK, Reaper
from nemo_offload_rl.placement.signals import ending_signals_blocked

# A driver with Ray's leftovers: a session folder, and a grandchild in its own group whose parent is gone.
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
code = "import subprocess; "
code += "print(subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=-3, stderr=-3).pid)"
started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
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


def start(root: Path) -> tuple[subprocess.Popen, psutil.Process]:
    command = [sys.executable, "-c", DRIVER, str(root)]
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return driver, psutil.Process(int(driver.stdout.readline()))


def say(driver: subprocess.Popen, how: str) -> None:
    driver.stdin.write(f"{how}\n")
    driver.stdin.flush()


def session_folders(root: Path) -> list[str]:
    return sorted(path.name.split("_")[1] for path in root.iterdir())


def wait_until_gone(process: psutil.Process) -> None:
    psutil.wait_procs([process], timeout=20)
    assert not process.is_running()


@pytest.mark.parametrize("how", ["", "fork"])
def test_a_killed_driver_leaves_neither_processes_nor_its_session_folder(tmp_path, how):
    driver, grandchild = start(tmp_path)
    say(driver, how)
    assert grandchild.is_running()
    if how:
        time.sleep(0.2)
    driver.kill()
    driver.wait()
    wait_until_gone(grandchild)
    wait_until(lambda: session_folders(tmp_path) == ["yesterday"])  # another driver's; ours and its link are removed


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


@contextmanager
def sleeping(mark: str = "", **streams) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(["sleep", "1000"], env=os.environ | {MARK: mark}, **streams)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_marked_processes_and_those_that_write_into_a_session_folder_are_killed(tmp_path):
    mark, folder = f"{os.getpid()}-{uuid.uuid4().hex}", tmp_path / "session_today_1"
    folder.mkdir()
    # The writer is like Ray's agents, whose titles overwrite their environment; the reader is like a user.
    with (folder / "log").open("w") as written, (folder / "log").open() as read, ExitStack() as ended:
        marked, another = (ended.enter_context(sleeping(one)) for one in (mark, "1-another"))
        writer, reader = ended.enter_context(sleeping(stdout=written)), ended.enter_context(sleeping(stdin=read))
        reaper._kill_left(os.getpid(), f"{MARK}={mark}", [str(folder)])
        assert [one.wait() for one in (marked, writer)] == [-signal.SIGKILL] * 2
        assert another.poll() is None and reader.poll() is None


def test_a_process_that_has_ended_is_none_of_those_that_are_left(tmp_path):
    with sleeping("gone") as process:
        pass
    assert reaper._open_if_left(process.pid, f"{MARK}=gone".encode(), [str(tmp_path)]) is None
    assert not reaper._has_mark(process.pid, b"any") and not reaper._writes_into(process.pid, [str(tmp_path)])


def test_session_folders_of_the_driver_alone_are_deleted_with_the_link_to_them(tmp_path):
    for name in ("session_before_7", "session_now_7", "session_now_8"):
        (tmp_path / name).mkdir()
    folders = reaper._session_folders(tmp_path, "session_*_7", [str(tmp_path / "session_before_7")])
    assert folders == [str(tmp_path / "session_now_7")]
    link = tmp_path / "session_latest"
    for target, is_left in (("session_now_8", True), ("session_now_7", False)):  # another driver's, and ours
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / target)
        reaper._delete_sessions(tmp_path, folders)
        assert link.is_symlink() is is_left
    assert session_folders(tmp_path) == ["before", "now"]


@pytest.mark.parametrize("said", [b"", b"keep"])
def test_a_driver_that_closes_its_end_has_said_what_it_wants(said):
    outer, (read, write) = os.dup(0), os.pipe()
    os.dup2(read, 0)
    try:
        assert reaper._wait_for_driver(os.getpid()) == b""  # a process that is not this one's parent counts as gone
        os.write(write, said)
        os.close(write)
        assert reaper._wait_for_driver(os.getppid()) == said
    finally:
        os.dup2(outer, 0)
        os.close(outer)
        os.close(read)


def test_a_driver_does_not_wait_long_for_what_does_not_end(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(reaper, "_FINISH_TIMEOUT_S", 0.1)
    slow = Reaper(str(tmp_path))
    try:
        slow._process.send_signal(signal.SIGSTOP)
        slow.finish(keep_logs=False)
        assert "Some of Ray's processes have not ended within 0 s of SIGKILL." in caplog.text
    finally:
        slow._process.kill()
        slow._process.wait()


def test_what_belongs_to_another_driver_is_left_alone(tmp_path):
    with sleeping("1-another") as another:
        Reaper(str(tmp_path)).finish(keep_logs=False)
        assert another.poll() is None
        assert MARK not in os.environ


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
