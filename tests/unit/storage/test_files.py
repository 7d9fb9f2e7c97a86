"""Tests checksums, manifests and full disks; test_lock.py tests locks."""

import contextlib
import errno
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import xxhash

from nemo_offload_rl.storage import disk, manifest
from nemo_offload_rl.storage.manifest import PIECE_BYTES, FileSum, HashingFile, file_sum, find_damage, write_manifest


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 7])
def test_a_file_is_hashed_as_it_is_written(tmp_path, size):
    content = os.urandom(size)
    path = tmp_path / "file"
    with path.open("wb", buffering=0) as raw:
        file = HashingFile(raw)
        assert file.write(content[: size // 3]) == size // 3
        file.write(memoryview(content)[size // 3 :])
        file.sync()
    assert path.read_bytes() == content
    assert file.error is None
    assert file.sum(2) == file_sum(path, 2) == FileSum(size, xxhash.xxh3_128(content).hexdigest(), 2)


def test_an_error_is_kept_and_nothing_is_written_after_it():
    with open("/dev/full", "wb", buffering=0) as raw:
        file = HashingFile(raw)
        assert file.write(b"abc") == 3
        file.write(b"def")
        file.sync()
    assert file.error.errno == errno.ENOSPC
    assert file.size == 6


@pytest.fixture
def folder(tmp_path):
    """Writes two files, one of which a rank would have written."""
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "weights").write_bytes(b"weights")
    (tmp_path / "state").write_bytes(b"state")
    return tmp_path


def test_each_file_of_a_rank_is_checked_by_one_rank_whatever_their_number(folder):
    known = {f"file_{rank}": FileSum(rank, "", rank) for rank in range(5)}
    for rank in range(5):
        (folder / f"file_{rank}").write_bytes(bytes(rank))
    written = write_manifest(folder, known)
    assert written == manifest.read_manifest(folder)
    for world_size in (1, 2, 5, 8):
        shares = [set(written.of_rank(rank, world_size)) for rank in range(world_size)]
        assert sorted(name for share in shares for name in share) == sorted(known)
    assert set(written.of_rank(4, 8)) == {"file_4"}  # only its own, which it will read
    assert set(written.of_driver()) == {"policy/weights", "state"}


def test_a_manifest_is_not_written_over_what_was_cut_off_meanwhile(folder):
    with pytest.raises(manifest.DamagedError, match="weights has 7 bytes, expected 9, right after"):
        write_manifest(folder, {"policy/weights": FileSum(9, "", 0)})
    with pytest.raises(manifest.DamagedError, match="gone is missing right after"):
        write_manifest(folder, {"gone": FileSum(9, "", 0)})
    with pytest.raises(manifest.DamagedError, match=r"manifest\.json is missing"):
        manifest.read_manifest(folder)


def test_damage_is_found_file_by_file(folder):
    files = write_manifest(folder, {}).files
    assert find_damage(folder, files) == []
    (folder / "state").write_bytes(b"stabe")
    (line,) = find_damage(folder, files)
    assert line.startswith("state has changed since it was written (xxh3_128 ")
    (folder / "policy" / "weights").unlink()
    assert find_damage(folder, files)[0] == "policy/weights is missing"
    with pytest.raises(manifest.DamagedCheckpointError, match=r"weights is missing \(and 1 more of its files are dam"):
        manifest.require_whole(folder)


def test_a_manifest_with_any_bit_flipped_is_refused(folder):
    write_manifest(folder, {})
    path = folder / "manifest.json"
    content = path.read_bytes()
    whole, num_let_through = manifest.read_manifest(folder), 0
    for index in range(0, len(content), 3):
        path.write_bytes(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
        with contextlib.suppress(manifest.UnreadableError):
            assert manifest.read_manifest(folder) == whole  # the bit was in a blank between two entries
            num_let_through += 1
    assert num_let_through < len(content) / 30
    path.write_text(json.dumps(json.loads(content) | {"algorithm": "md5"}))
    with pytest.raises(manifest.UnreadableError, match="md5 checksums, but this version reads only xxh3_128"):
        manifest.read_manifest(folder)


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    disk.write_whole(path, "first")
    (tmp_path / "file.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space"):
        disk.write_whole(path, "second")
    assert path.read_text() == "first"
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_a_sentence_that_can_travel_and_other_errors_stay_what_they_are(tmp_path):
    error = pickle.loads(pickle.dumps(disk.DiskFullError("a/b", "No space left on device", 18_200_000_000, 512)))
    assert str(error) == "a/b cannot be written: No space left on device (18.2 GB needed, 512 bytes free)"
    of_quota = disk.DiskFullError("a/b", "Disk quota exceeded", None, None)
    assert str(of_quota) == "a/b cannot be written: Disk quota exceeded"
    with pytest.raises(FileNotFoundError), disk.translate_disk_full(tmp_path):
        (tmp_path / "absent").read_text()
    told = pytest.raises(disk.DiskFullError, match=r"No space left on device .* free")
    with told, disk.translate_disk_full(tmp_path):
        Path("/dev/full").write_text("x")
    assert disk.free_bytes(tmp_path / "new" / "folder") > 0  # of the disk that the path will be on
    disk.require_free(tmp_path, 10, 10)
    disk.require_free(tmp_path, 10, None)
    with pytest.raises(disk.DiskFullError, match=r"No space left on device \(11 bytes needed, 10 bytes free\)"):
        disk.require_free(tmp_path, 11, 10)
    # Libraries in Rust have the system's error in their text.
    found = disk.system_error(Exception("I/O error: No space left on device (os error 28)"), tmp_path)
    assert (found.errno, found.strerror) == (errno.ENOSPC, "No space left on device")
    assert disk.system_error(Exception("not this"), tmp_path) is None


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_a_file_gets_the_mode_that_the_users_umask_gives(tmp_path, umask, mode):
    path = tmp_path / "file"
    path.touch(0o600)
    before = os.umask(umask)
    try:
        disk.as_by_umask(path)
        assert os.umask(umask) == umask  # unchanged
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    weights = ("model-00001.safetensors", "model.safetensors.index.json")
    for name in (*weights, "generation_config.json", "tokenizer.json", "NOTES.md"):
        (folder / name).write_text("old")
    return folder


def replace(folder):
    with disk.replacing(folder, disk.HF_FILES) as new:
        (new / "model.safetensors").write_text("new")


def texts(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_folder_is_replaced_once_the_new_one_is_complete(tmp_path, model):
    (tmp_path / "model.partial").mkdir()
    (tmp_path / "model.partial" / "left by a killed process").touch()
    with disk.replacing(model, disk.HF_FILES) as new:
        (new / "model.safetensors").write_text("new")
        (new / "tokenizer.json").write_text("new")
        assert texts(model)["tokenizer.json"] == "old"
    assert texts(model) == {"model.safetensors": "new", "tokenizer.json": "new", "NOTES.md": "old"}
    assert os.listdir(tmp_path) == ["model"]
    replace(tmp_path / "further" / "one")
    assert texts(tmp_path / "further" / "one") == {"model.safetensors": "new"}


def test_a_folder_stays_as_it_was_where_the_new_one_fails(tmp_path, model):
    before = texts(model)
    with pytest.raises(FileNotFoundError), disk.replacing(model, disk.HF_FILES) as new:
        (new / "absent").rename(new / "model.safetensors")
    assert texts(model) == before
    assert os.listdir(tmp_path) == ["model"]


def test_folders_that_users_have_named_after_it_stay(tmp_path, model):
    copies = [tmp_path / name for name in ("old_model", "tmp_model", ".model", "model.old", "model.bak")]
    for copy in copies:
        shutil.copytree(model, copy)
    before = texts(model)
    for _ in range(2):  # a folder that is there, and one that is not
        replace(model)
        assert [texts(copy) for copy in copies] == [before] * len(copies)
        shutil.rmtree(model)


def test_a_kill_between_the_renames_loses_no_folder(tmp_path, model):
    model.rename(tmp_path / "model.replaced")  # what such a kill leaves, beside model.partial
    with pytest.raises(OSError, match="no space"), disk.replacing(model, disk.HF_FILES):
        raise OSError("no space")
    assert texts(tmp_path / "model.replaced")["model-00001.safetensors"] == "old"
    replace(model)
    assert texts(model) == {"model.safetensors": "new", "tokenizer.json": "old", "NOTES.md": "old"}
    assert os.listdir(tmp_path) == ["model"]


def test_a_file_is_read_up_to_a_limit_and_what_cannot_be_read_is_told_without_waiting(tmp_path):
    path, fifo = tmp_path / "file", tmp_path / "fifo"
    path.write_bytes(b"abc")
    os.mkfifo(fifo)
    assert disk.read_regular_file(path, 3) == b"abc"
    for unreadable, message in [
        (path, "has more than 2 bytes, the limit for this file"),
        (Path("/proc/self/mem"), r"^cannot be read: input/output error$"),  # a regular file without a first page
        (fifo, "is a FIFO, not a file"),
        (tmp_path, "is a folder, not a file"),
        (tmp_path / "none", "does not exist"),
    ]:
        with pytest.raises(disk.UnreadableFileError, match=message) as caught:
            disk.read_regular_file(unreadable, 2)
        assert caught.value.is_absent is (unreadable.name == "none")
