"""A file is whole or as it was before."""

import errno
import os

import pytest

from dpsgd.runs.files import write_atomically


def half(file):
    file.write(b"new, and not")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("before", [None, b"old"])
def test_a_write_that_fails_half_way_leaves_what_was_there(tmp_path, before):
    path = tmp_path / "file"
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(OSError, match="No space left"):
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
