"""A file is whole or as it was before."""

import errno
import os
from pathlib import Path

import pytest

from dpsgd import files
from dpsgd.files import write_atomically


def half(file):
    file.write(b"new, and not")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("before", [None, b"old"])
def test_a_write_that_fails_half_way_leaves_what_was_there(tmp_path, before):
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        write_atomically(path, half)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == (
        [] if before is None else [before]
    )


def test_until_it_is_whole_a_file_is_what_it_was(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write(file):
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"

    write_atomically(path, write)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_second_writer_of_a_file_is_refused(tmp_path):
    path = tmp_path / "file"

    def write(file):
        file.write(b"first")
        with pytest.raises(BlockingIOError, match=r"another process is writing .*file"):
            write_atomically(path, lambda other: other.write(b"second"))

    write_atomically(path, write)
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_renamed_before_its_lock_is_left_as_it_is(tmp_path, monkeypatch):
    path, flock = tmp_path / "file", files.fcntl.flock

    def late(*arguments):
        monkeypatch.setattr(files.fcntl, "flock", flock)
        write_atomically(path, lambda file: file.write(b"theirs"))
        flock(*arguments)

    (tmp_path / ".file.unfinished").write_bytes(b"left by one that died")
    monkeypatch.setattr(files.fcntl, "flock", late)
    with pytest.raises(BlockingIOError, match="another process is writing"):
        write_atomically(path, lambda file: file.write(b"ours"))
    assert path.read_bytes() == b"theirs"
    assert list(tmp_path.iterdir()) == [path]


def test_the_root_folder_can_be_asked_whether_it_is_writable(monkeypatch):
    asked = []
    monkeypatch.setattr(files.tempfile, "mkdtemp", lambda **where: asked.append(where["dir"]))
    monkeypatch.setattr(files.os, "rmdir", lambda path: None)
    files.check_writable(Path("/"))
    assert asked == [Path("/")]
