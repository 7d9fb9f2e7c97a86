import errno
import fcntl
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from support.waiting import wait_until

from nemo_offload_rl.storage.lock import LOCK_FILE, FolderLock, LockedError, Owner

WHAT = "checkpointing.checkpoint_dir"

TAKE = (
    "import sys; from pathlib import Path; from nemo_offload_rl.storage.lock import FolderLock; "
    "lock = FolderLock(Path(sys.argv[1]), 'it'); lock.acquire(); print('taken', flush=True); sys.stdin.read()"
)


def in_another_process(folder: Path) -> subprocess.Popen:
    """Starts a process that takes the lock and holds it until its input ends or it is killed."""
    command = [sys.executable, "-c", TAKE, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "taken\n"
    return process


def test_the_folder_is_left_as_it_was_with_what_the_run_has_written(tmp_path):
    folder = tmp_path / "new" / "folder"
    with FolderLock(folder, WHAT) as lock:
        assert (folder / LOCK_FILE).is_file()
        with pytest.raises(LockedError, match=f"in use by process {os.getpid()}"):
            FolderLock(folder, WHAT).acquire()
    assert not (tmp_path / "new").exists()
    lock.release()  # a second call does nothing
    with FolderLock(folder, WHAT):
        (folder / "step_1").mkdir()
    assert [path.name for path in folder.iterdir()] == ["step_1"]
    (folder / LOCK_FILE).write_text('{"host": "a"')  # has no owner
    with FolderLock(folder, WHAT, pytest.fail):
        pass


def test_a_lock_beside_the_folder_holds_while_the_folder_is_replaced(tmp_path):
    folder = tmp_path / "logs" / "warm_start"
    with FolderLock(folder, "warm_start", is_beside=True):
        assert not folder.exists()
        folder.mkdir()
        folder.rmdir()
        with pytest.raises(LockedError, match=f"{folder} is in use by process"):
            FolderLock(folder, "warm_start", is_beside=True).acquire()
        with FolderLock(folder, "run folder"):
            pass
    assert not (tmp_path / "logs").exists()


def test_a_second_process_is_told_who_has_the_folder(tmp_path):
    first = in_another_process(tmp_path)
    with pytest.raises(LockedError, match=f"in use by process {first.pid} of host {socket.gethostname()} .since 20"):
        FolderLock(tmp_path, WHAT).acquire()
    first.communicate("")
    with FolderLock(tmp_path, WHAT):  # the process has ended
        pass


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    first, lines = in_another_process(tmp_path), []
    first.kill()
    first.communicate()
    assert (tmp_path / LOCK_FILE).is_file()
    with FolderLock(tmp_path, WHAT, lines.append):
        pass
    [line] = lines  # and none about waiting: flock shows it at once
    assert line.startswith(f"Taking over the lock {tmp_path / LOCK_FILE}: its owner, process {first.pid} of host")


def sign(folder: Path, owner: Owner) -> None:
    (folder / LOCK_FILE).write_text(json.dumps(asdict(owner)))


def test_a_process_id_that_is_used_again_is_no_owner(tmp_path):
    sign(tmp_path, replace(Owner.this_process(), since="2020-01-01 00:00:00"))
    lines = []
    with FolderLock(tmp_path, WHAT, lines.append):
        assert "since 2020" in lines[0]


ELSEWHERE = replace(Owner.this_process(), host="pod-1", pid=7, kernel="another machine")


def test_a_run_that_ended_under_another_host_name_is_taken_over_once_it_has_been_silent(tmp_path):
    sign(tmp_path, ELSEWHERE)
    lines, start = [], time.monotonic()
    with FolderLock(tmp_path, WHAT, lines.append, silent_s=0.5) as lock:
        assert time.monotonic() - start >= 0.5
        assert lock._is_mine(lock._descriptor)
    said, taken = lines
    assert said.startswith(f"{WHAT}: {tmp_path} is locked by process 7 of host pod-1 (since 20")
    assert "0.5 s for a sign of life" in said
    assert taken.startswith("Taking over the lock ")
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_run_that_lives_on_another_machine_is_seen_by_its_beats(tmp_path):
    sign(tmp_path, ELSEWHERE)
    ended = threading.Event()

    def beat():
        while not ended.wait(0.2):
            os.utime(tmp_path / LOCK_FILE)

    threading.Thread(target=beat).start()
    with pytest.raises(LockedError, match="in use by process 7 of host pod-1"):
        FolderLock(tmp_path, WHAT, silent_s=5).acquire()
    ended.set()
    assert Owner(**json.loads((tmp_path / LOCK_FILE).read_text())) == ELSEWHERE


def test_the_lock_beats_until_it_is_released(tmp_path):
    with FolderLock(tmp_path, WHAT, beat_s=0.05):
        before = (tmp_path / LOCK_FILE).stat().st_mtime_ns
        wait_until(lambda: (tmp_path / LOCK_FILE).stat().st_mtime_ns > before)


def test_a_run_that_ends_while_it_is_watched_makes_way(tmp_path):
    sign(tmp_path, ELSEWHERE)
    end = threading.Timer(0.3, (tmp_path / LOCK_FILE).unlink)
    end.start()
    with FolderLock(tmp_path, WHAT, silent_s=5) as lock:
        assert lock._is_mine(lock._descriptor)


def test_a_lock_that_was_taken_over_is_told_and_left_to_its_new_owner(tmp_path, caplog):
    with FolderLock(tmp_path, WHAT, beat_s=0.05):  # as after a pause of the machine that was longer than silent_s
        sign(tmp_path, ELSEWHERE)
        wait_until(lambda: caplog.messages)
    assert caplog.messages == [f"The lock {tmp_path / LOCK_FILE} was removed, or taken over by another run."]
    assert Owner(**json.loads((tmp_path / LOCK_FILE).read_text())) == ELSEWHERE


def test_of_two_machines_that_take_over_at_once_the_last_to_sign_wins(tmp_path):
    sign(tmp_path, ELSEWHERE)
    before = (tmp_path / LOCK_FILE).read_text()

    def sign_next():
        while (tmp_path / LOCK_FILE).read_text() in (before, ""):
            time.sleep(0.01)
        sign(tmp_path, replace(ELSEWHERE, host="pod-2"))

    threading.Thread(target=sign_next).start()
    with pytest.raises(LockedError, match="in use by process 7 of host pod-2"):
        FolderLock(tmp_path, WHAT, silent_s=0.2).acquire()


@pytest.fixture
def no_flock(monkeypatch):
    """Simulates a file system without flock."""

    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_without_flock_a_process_that_lives_has_the_folder(tmp_path, no_flock):
    refused = pytest.raises(LockedError, match=f"in use by process {os.getpid()} of host")
    with FolderLock(tmp_path, WHAT, beat_s=0.1), refused:
        FolderLock(tmp_path, WHAT, silent_s=5).acquire()
    assert not (tmp_path / LOCK_FILE).exists()


def test_without_flock_the_lock_of_a_killed_process_is_taken_over(tmp_path, no_flock):
    sign(tmp_path, replace(Owner.this_process(), since="2020-01-01 00:00:00"))
    with FolderLock(tmp_path, WHAT, silent_s=0.2) as lock:
        assert lock._is_mine(lock._descriptor)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LockedError, match=r"checkpoint_dir.*file/folder"):
        FolderLock(tmp_path / "file" / "folder", WHAT).acquire()


def _compete(folder: Path, start, results, done) -> None:
    lock = FolderLock(folder, WHAT)
    start.wait()
    try:
        lock.acquire()
        results.put("won")
        done.wait()
        lock.release()
    except LockedError as error:
        results.put(str(error))


@pytest.mark.parametrize("is_stale", [False, True])
def test_of_several_starts_at_once_exactly_one_wins(tmp_path, is_stale):
    context = multiprocessing.get_context("fork")
    for turn in range(5):
        folder = tmp_path / f"{turn}"
        if is_stale:
            folder.mkdir()
            sign(folder, replace(Owner.this_process(), pid=2**22 + 1))  # above the largest process id
        start, done, results = context.Event(), context.Event(), context.Queue()
        given = (folder, start, results, done)
        processes = [context.Process(target=_compete, args=given) for _ in range(4)]
        for process in processes:
            process.start()
        start.set()
        told = [results.get(timeout=20) for _ in processes]
        done.set()
        for process in processes:
            process.join()
        assert told.count("won") == 1, told
        winner = {process.pid for process in processes}
        assert all(any(f"process {pid} of host" in text for pid in winner) for text in told if text != "won"), told
