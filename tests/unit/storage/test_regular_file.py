"""Tests that a file that a user names is read, or that the reason why not is said."""

import os
from pathlib import Path

import pytest

from nemo_offload_rl.storage.disk import UnreadableFileError, read_regular_file

MEMORY = Path("/proc/self/mem")  # a regular file whose first page cannot be read


def test_the_contents_are_read_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert read_regular_file(path, 3) == b"abc"
    with pytest.raises(UnreadableFileError, match="has more than 2 bytes, the limit for this file"):
        read_regular_file(path, 2)


@pytest.mark.skipif(not MEMORY.exists(), reason="only Linux has this file")
def test_an_error_while_reading_is_said_as_one_of_opening_is() -> None:
    with pytest.raises(UnreadableFileError, match=r"^cannot be read: input/output error$") as caught:
        read_regular_file(MEMORY, 10)
    assert not caught.value.is_absent


def test_other_kinds_of_files_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, message in {tmp_path / "fifo": "is a FIFO, not a file", tmp_path: "is a folder, not a file"}.items():
        with pytest.raises(UnreadableFileError, match=message) as caught:
            read_regular_file(path, 10)
        assert not caught.value.is_absent
    with pytest.raises(UnreadableFileError, match="does not exist") as caught:
        read_regular_file(tmp_path / "none", 10)
    assert caught.value.is_absent
