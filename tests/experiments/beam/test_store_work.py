"""Whoever parses, in whatever order, and whoever dies: one store, that of one process."""

import errno
import gzip
import json
import os
import random
from dataclasses import replace

import pytest

from experiments.beam.prepare import FaultyFiles, prepare
from experiments.tasks.clicks.encoding import Format
from experiments.tasks.clicks.store import StoreError
from experiments.tasks.streams import DataError
from tests.experiments.beam.conftest import (
    FORMATS,
    OF_USERS,
    TABLE,
    Workers,
    contents,
)


@pytest.fixture(
    scope="module", params=["criteo-search", pytest.param("criteo-display", marks=pytest.mark.long)]
)
def one_process(request, raw_files, tmp_path_factory):
    """A format's name, its files, and the store that one process makes of them."""
    files = raw_files[request.param]
    out = tmp_path_factory.mktemp("local") / "store"
    FORMATS[request.param].prepare(files, out)
    return request.param, files, out


@pytest.mark.parametrize("range_bytes", [7_000, 1 << 26])
def test_the_store_is_bit_for_bit_that_of_one_process(one_process, tmp_path, range_bytes):
    name, files, local = one_process
    out = tmp_path / "store"
    store = prepare(files, out, FORMATS[name], Workers(range_bytes), range_bytes=range_bytes)
    store.verify()
    assert contents(out) == contents(local)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_gzip_files_and_unterminated_files_are_read_alike(one_process, tmp_path):
    name, files, local = one_process
    changed = [tmp_path / file.name for file in files]
    members = files[0].read_bytes().partition(b"\n")
    changed[0].write_bytes(b"".join(map(gzip.compress, members)))
    changed[1].write_bytes(files[1].read_bytes().rstrip(b"\n"))
    changed[2].write_bytes(files[2].read_bytes().replace(b"\n", b"\r\n"))
    out = tmp_path / "store"
    prepare(changed, out, FORMATS[name], Workers(), range_bytes=20_000)
    assert contents(out) == contents(local)


@pytest.mark.parametrize("table", [TABLE, OF_USERS])
def test_tables_are_tasks_by_the_file(table, table_files, tmp_path):
    table.prepare(table_files, tmp_path / "a")
    prepare(table_files, tmp_path / "b", table, Workers(), range_bytes=10)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


class Dying(Workers):
    """Die in the midst of writing, each task once or several times."""

    def __init__(self, seed, monkeypatch):
        super().__init__(seed)
        self.left = 0
        self.deaths = 0
        for owner, name in [(Format, "columns_of"), (os, "fsync"), (os, "rename")]:
            monkeypatch.setattr(owner, name, self.mortal(getattr(owner, name)))

    def mortal(self, function):
        def call(*arguments, **options):
            if self.left > 0:
                self.left -= 1
                if self.left == 0:
                    self.deaths += 1
                    raise KeyboardInterrupt  # nothing that code would handle
            return function(*arguments, **options)

        return call

    def attempt(self, function, task):
        while True:
            self.left = self.random.randrange(8)
            try:
                return function(task)
            except KeyboardInterrupt:
                continue
            finally:
                self.left = 0


def test_workers_that_die_lose_and_double_nothing(one_process, tmp_path, monkeypatch):
    name, files, local = one_process
    workers = Dying(3, monkeypatch)
    prepare(files, tmp_path / "store", FORMATS[name], workers, range_bytes=20_000)
    assert workers.deaths > 10
    assert contents(tmp_path / "store") == contents(local)


def test_a_runner_that_loses_a_range_is_refused(one_process, tmp_path):
    name, files, _ = one_process

    class Losing(Workers):
        def every(self, function, tasks):
            return super().every(function, tasks[1:])

    with pytest.raises(StoreError, match="without writing 00000-0000000"):
        prepare(files, tmp_path / "store", FORMATS[name], Losing(), range_bytes=20_000)
    assert not list(tmp_path.iterdir())


def test_a_command_that_died_leaves_nothing_in_the_way(one_process, tmp_path):
    name, files, local = one_process
    work = tmp_path / ".store.partial" / "work-0123"
    work.mkdir(parents=True)
    (work / "00000-0000000").mkdir()
    prepare(files, tmp_path / "store", FORMATS[name], Workers(), range_bytes=20_000)
    assert contents(tmp_path / "store") == contents(local)


def with_faults(files, folder, seed, count):
    """Copies of `files` with `count` bad lines, and where these are."""
    rng = random.Random(seed)
    lines = [file.read_bytes().split(b"\n")[:-1] for file in files]
    places = [(f, n) for f, found in enumerate(lines) for n in range(len(found))]
    bad = sorted(rng.sample(places, count))
    copies = [folder / file.name for file in files]
    for f, n in bad:
        damaged = [b"x", lines[f][n] + b"\t", b"7" + lines[f][n], b"\xff"]
        lines[f][n] = rng.choice([*damaged, b""])
    for copy, found in zip(copies, lines, strict=True):
        copy.write_bytes(b"\n".join(found) + b"\n")
    return copies, [(copies[f], n + 1) for f, n in bad]


@pytest.mark.parametrize("range_bytes", [9_000, 1 << 26])
@pytest.mark.parametrize("seed", range(2))
def test_first_bad_line_of_each_file_is_named(one_process, tmp_path, range_bytes, seed):
    name, files, _ = one_process
    copies, places = with_faults(files, tmp_path, seed, 8)
    first = {path: line for path, line in reversed(places)}
    with pytest.raises(FaultyFiles) as found:
        prepare(copies, tmp_path / "store", FORMATS[name], Workers(seed), range_bytes=range_bytes)
    assert {fault.source: fault.line for fault in found.value.faults} == first
    with pytest.raises(DataError) as alone:
        FORMATS[name].prepare(copies, tmp_path / "store")
    assert str(found.value.faults[0]) == str(alone.value)
    assert sorted(tmp_path.iterdir()) == sorted(copies)


def test_faults_of_whole_files_are_named_beside_line_faults(one_process, tmp_path):
    name, files, _ = one_process
    empty, cut, bad = tmp_path / "empty.txt", tmp_path / "cut.gz", tmp_path / "bad.txt"
    empty.write_bytes(b"\n\n")
    cut.write_bytes(gzip.compress(files[0].read_bytes())[:-100])
    bad.write_bytes(b"x\n")
    with pytest.raises(DataError, match=r"empty\.txt: is empty"):
        prepare([cut, empty], tmp_path / "s", FORMATS[name], Workers())
    with pytest.raises(FaultyFiles) as found:
        prepare([cut, bad], tmp_path / "s", FORMATS[name], Workers(), range_bytes=1)
    problems = [str(fault).removeprefix(f"{tmp_path}/") for fault in found.value.faults]
    assert problems[0].startswith("cut.gz: the gzip file is incomplete")
    assert problems[1].startswith("bad.txt, line 1: found 1 column")
    assert len(problems) == 2


def test_faults_of_tables_are_named(table_files, tmp_path):
    bad, empty = tmp_path / "bad.csv", tmp_path / "empty.csv"
    bad.write_text("y,c,x\n1,a,2\n1,a,q\n")
    empty.write_text("y,c,x\n")
    for files, fault in (([bad, table_files[0]], (bad, 3, "x")), ([empty], (empty, None, None))):
        with pytest.raises(FaultyFiles) as found:
            prepare(files, tmp_path / "s", TABLE, Workers())
        assert [(f.source, f.line, f.column) for f in found.value.faults] == [fault]


def test_a_piece_that_is_damaged_is_no_part_of_a_store(one_process, tmp_path):
    name, files, _ = one_process

    class Cutting(Workers):
        def every(self, function, tasks):
            done = super().every(function, tasks)
            for file in sorted(tmp_path.glob(".store.partial/work-*/00000-0000000/label")):
                file.write_bytes(file.read_bytes()[:-1])
            return done

    with pytest.raises(StoreError, match=r"has [\d,]+ bytes, expected"):
        prepare(files, tmp_path / "store", FORMATS[name], Cutting())
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line_and_leaves_nothing(one_process, tmp_path, monkeypatch):
    name, files, _ = one_process

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StoreError, match="the disk is full"):
        prepare(files, tmp_path / "store", FORMATS[name], Workers())
    assert not list(tmp_path.iterdir())


def test_a_hash_seed_reaches_the_workers_and_the_manifest(one_process, tmp_path):
    name, files, local = one_process
    seeded = replace(FORMATS[name], hash_seed=5)
    seeded.prepare(files, tmp_path / "a")
    prepare(files, tmp_path / "b", seeded, Workers())
    assert contents(tmp_path / "a") == contents(tmp_path / "b") != contents(local)
    assert json.loads((tmp_path / "b" / "manifest.json").read_text())["hash_seed"] == 5
