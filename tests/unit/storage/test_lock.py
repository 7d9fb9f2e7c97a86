import errno
import fcntl
import json
import multiprocessing
import os
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nemo_offload_rl.storage.lock import LOCK_FILE, FolderLock, LockedError, Owner

WHAT = "checkpointing.checkpoint_dir"

TAKE = (
    "import sys; from pathlib import Path; from nemo_offload_rl.storage.lock import FolderLock; "
    "lock = FolderLock(Path(sys.argv[1]), 'it'); lock.acquire(); print('taken', flush=True); sys.stdin.read()"
)


def in_another_process(folder: Path) -> subprocess.Popen:
    """Starts a process that takes the lock and holds it until its input ends or it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "taken\n"
    return process


def test_the_folder_is_left_as_it_was(tmp_path):
    with FolderLock(tmp_path / "new" / "folder", WHAT) as lock:
        assert (tmp_path / "new" / "folder" / LOCK_FILE).is_file()
        assert lock.notice is None
    assert not (tmp_path / "new").exists()
    lock.release()  # a second call does nothing


def test_what_the_run_has_written_stays(tmp_path):
    with FolderLock(tmp_path / "new", WHAT):
        (tmp_path / "new" / "step_1").mkdir()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["step_1"]


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


def test_a_lock_in_this_process_counts_as_well(tmp_path):
    with FolderLock(tmp_path, WHAT), pytest.raises(LockedError, match=f"in use by process {os.getpid()}"):
        FolderLock(tmp_path, WHAT).acquire()


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path):
    first = in_another_process(tmp_path)
    first.kill()
    first.communicate()
    assert (tmp_path / LOCK_FILE).is_file()
    with FolderLock(tmp_path, WHAT) as lock:
        assert f"its owner, process {first.pid} of host" in lock.notice
        assert "Taking over the lock " in lock.notice


def sign(folder: Path, owner: Owner) -> None:
    (folder / LOCK_FILE).write_text(json.dumps(asdict(owner)))


def test_a_process_id_that_is_used_again_is_no_owner(tmp_path):
    here = Owner.this_process()
    for other in (replace(here, start_ticks=here.start_ticks - 1), replace(here, boot="another boot")):
        sign(tmp_path, other)
        with FolderLock(tmp_path, WHAT) as lock:
            assert lock.taken_over_from == other


def test_a_process_that_lives_is_an_owner_also_where_the_system_holds_no_lock(tmp_path):
    sign(tmp_path, Owner.this_process())
    with pytest.raises(LockedError, match="in use by process"):
        FolderLock(tmp_path, WHAT).acquire()


def test_the_lock_of_another_host_is_removed_by_hand(tmp_path):
    sign(tmp_path, replace(Owner.this_process(), host="elsewhere", pid=7))
    with pytest.raises(
        LockedError,
        match=r"process 7 of host elsewhere .*cannot see whether that run is still alive.*remove the lock: ",
    ) as caught:
        FolderLock(tmp_path, WHAT).acquire()
    assert str(caught.value).endswith(f"rm {tmp_path / LOCK_FILE}")


def test_a_file_without_an_owner_is_taken(tmp_path):
    (tmp_path / LOCK_FILE).write_text('{"host": "a"')
    with FolderLock(tmp_path, WHAT) as lock:
        assert lock.notice is None


@pytest.fixture
def no_flock(monkeypatch):
    """Simulates a file system without flock."""

    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_without_flock_the_process_that_makes_the_file_has_the_folder(tmp_path, no_flock):
    with FolderLock(tmp_path, WHAT), pytest.raises(LockedError, match="in use by process"):
        FolderLock(tmp_path, WHAT).acquire()
    assert not (tmp_path / LOCK_FILE).exists()
    sign(tmp_path, replace(Owner.this_process(), start_ticks=1))
    with pytest.raises(LockedError, match=f"has no flock.*remove the lock: rm {tmp_path / LOCK_FILE}"):
        FolderLock(tmp_path, WHAT).acquire()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        LockedError, match=r"checkpointing\.checkpoint_dir: the folder .*file/folder cannot be used: Not a"
    ):
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
    num_processes = 4
    for turn in range(5):
        folder = tmp_path / f"{turn}"
        if is_stale:
            folder.mkdir()
            sign(folder, replace(Owner.this_process(), start_ticks=1))
        start, done, results = context.Event(), context.Event(), context.Queue()
        processes = [
            context.Process(target=_compete, args=(folder, start, results, done)) for _ in range(num_processes)
        ]
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
