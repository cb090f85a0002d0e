"""A store is whole or absent, reads back what was written, and says what is wrong with it."""

import itertools
import json
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.store import Store, StoreError, columns_of
from experiments.tasks.clicks.writer import StoreWriter
from experiments.tasks.splits import Split, chronological_split
from samplers.shards import Shards

ROOT = Path(__file__).resolve().parents[4]


def random_columns(rows, seed=0, schema=DISPLAY_ADS):
    rng = np.random.default_rng(seed)
    features = len(schema.categories)
    return {
        "label": rng.integers(0, 2, rows, dtype=np.uint8),
        "integers": rng.normal(size=(rows, len(schema.integers))).astype(np.float32),
        "integers_missing": rng.random((rows, len(schema.integers))) < 0.3,
        "categories": rng.integers(0, 1000, (rows, features), dtype=np.int32),
    }


def write(out, columns, *, block=50, schema=DISPLAY_ADS, **options):
    with StoreWriter(out, schema, hash_seed=3, **options) as writer:
        for begin in range(0, len(columns["label"]), block):
            writer.append({k: v[begin : begin + block] for k, v in columns.items()})
        return writer.finish(splits=chronological_split(writer.num_rows), source={"by": "test"})


def contents(directory):
    return sorted(p.name for p in directory.iterdir())


@pytest.mark.parametrize("rows", [6, 9, 10, 11, 200])
@pytest.mark.parametrize("rows_per_shard", [1 << 26, 64, 7])
@pytest.mark.parametrize("block", [1000, 13])
def test_what_is_written_is_read_back_wherever_shards_and_blocks_end(
    tmp_path, rows, rows_per_shard, block
):
    columns = random_columns(rows)
    store = write(tmp_path / "s", columns, block=block, rows_per_shard=rows_per_shard)
    store.verify()
    assert store.num_rows == rows
    assert list(store.splits) == ["train", "validation", "test"]
    assert contents(tmp_path) == ["s"]
    for split, (begin, end) in store.splits.items():
        loaded = store.load(split)
        blocks = list(store.blocks(split, rows=5))
        assert all(len(b["label"]) <= 5 for b in blocks)
        for name, column in columns.items():
            np.testing.assert_array_equal(loaded[name], column[begin:end])
            assert loaded[name].dtype == column.dtype
            with pytest.raises((ValueError, TypeError)):
                loaded[name][:1] = 0  # read-only
            joined = [b[name] for b in blocks] or [column[:0]]
            np.testing.assert_array_equal(np.concatenate(joined), column[begin:end])


def test_splits_are_80_10_10_in_order_and_cover_every_row():
    for rows in (*range(1, 50), 45_840_617):
        ranges = list(chronological_split(rows).values())
        assert ranges[0][0] == 0
        assert ranges[-1][1] == rows
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
        sizes = [(end - begin) / rows for begin, end in ranges]
        assert np.allclose(sizes, [0.8, 0.1, 0.1], atol=1 / rows)
    asked = {"train": (0, 700), "validation": (700, 900), "test": (900, 1000)}
    assert chronological_split(1000, (0.7, 0.2, 0.1)) == asked  # 0.7 + 0.2 in binary is < 0.9


@pytest.mark.parametrize(
    "fractions",
    [
        (0.8, 0.1, 0.2),
        (1.0, 0.0, 0.0),
        (1.2, -0.1, -0.1),
        (math.nan, 0.5, 0.5),
        (math.inf, 0.5, 0.5),
    ],
)
def test_fractions_that_leave_rows_over_or_a_part_empty_are_refused(fractions):
    with pytest.raises(ValueError, match="greater than 0 and add up to 1, not"):
        Split("random", fractions)
    Split("random", (0.7, 0.2, 0.1))


@pytest.mark.parametrize("shards", [1, 2, 4, 7])
@pytest.mark.parametrize("rows_per_shard", [1000, 11])
def test_shards_of_a_split_are_its_rows_and_nobody_reads_those_of_others(
    tmp_path, shards, rows_per_shard
):
    columns = random_columns(100)
    store = write(tmp_path / "s", columns, rows_per_shard=rows_per_shard)
    begin, end = store.splits["train"]
    parts = Shards(end - begin, shards)
    rng = np.random.default_rng(0)
    for shard in range(shards):
        own = parts.examples(shard)
        loaded = store.load("train", own)
        for name, column in columns.items():
            mine = column[begin + own.start : begin + own.stop]
            np.testing.assert_array_equal(loaded[name], mine)
            some = rng.integers(0, len(own), (3, 5))
            np.testing.assert_array_equal(loaded[name][some], mine[some])
            np.testing.assert_array_equal(loaded[name][2:9], mine[2:9])
            whole = store.load("train")[name][own.start : own.stop]
            np.testing.assert_array_equal(whole, mine)
            assert whole.shape == loaded[name].shape == mine.shape
    if rows_per_shard == 11:
        for file in (tmp_path / "s").glob("00007.*"):
            file.unlink()  # its rows are the last ones
        np.testing.assert_array_equal(
            store.load("train", range(20, 60))["label"], columns["label"][20:60]
        )


@pytest.mark.parametrize("gone", ["00002.*", "00002.label*", "0000[01].*"])
def test_rows_of_files_on_other_hosts_count_and_are_never_read_as_anything(tmp_path, gone):
    columns = random_columns(100)
    whole = write(tmp_path / "s", columns, rows_per_shard=11)
    missing = sorted((tmp_path / "s").glob(gone))
    for file in missing:
        file.unlink()
    with pytest.raises(StoreError, match=r"is incomplete: 0000\d\..* is missing"):
        Store.open(whole.path)
    store = Store.open(whole.path, in_part=True)
    assert store.digest == whole.digest
    store.verify()
    loaded = store.load("train")
    for name, column in columns.items():
        lost = {int(file.name[:5]) for file in missing if f".{name}." in file.name}
        for first in range(0, 77, 11):
            rows = range(first, first + 11)
            if first // 11 not in lost:
                assert loaded[name].lacks(rows) == ""
                np.testing.assert_array_equal(loaded[name][first : first + 11], column[rows])
                np.testing.assert_array_equal(loaded[name][np.array(rows)], column[rows])
                continue
            assert loaded[name].shape == column[:80].shape
            assert "is missing" in loaded[name].lacks(range(first - 1 if first else 0, first + 1))
            for read in (
                lambda rows=rows, x=loaded[name]: x[np.array([40, rows[3]])],
                lambda first=first, x=loaded[name]: np.asarray(x[first : first + 2]),
                lambda x=loaded[name]: np.asarray(x),
                lambda rows=rows, name=name: store.load("train", rows)[name][np.array([0])],
                lambda: list(store.blocks("train")),
            ):
                with pytest.raises(StoreError, match=r"is incomplete: 0000\d\..* is missing"):
                    read()


def test_a_file_that_is_here_is_verified_where_others_are_not_and_none_is_read_that_came_later(
    tmp_path,
):
    path = write(tmp_path / "s", random_columns(100), rows_per_shard=11).path
    late, harmed = path / "00002.label.npy", path / "00003.label.npy"
    content = late.read_bytes()
    late.unlink()
    store = Store.open(path, in_part=True)
    late.write_bytes(content)
    for read in (
        lambda: store.load("train")["label"][np.array([25])],
        lambda: list(store.blocks("train")),
    ):
        with pytest.raises(StoreError, match="is missing"):
            read()
    harmed.write_bytes(harmed.read_bytes()[:-1] + b"\7")
    with pytest.raises(StoreError, match=r"00003.label.npy is damaged: its checksum"):
        store.verify()
    harmed.write_bytes(content[:-1])
    with pytest.raises(StoreError, match="wrong size"):
        Store.open(path, in_part=True)


def test_rows_that_a_split_has_not_are_refused_in_one_line(tmp_path):
    store = write(tmp_path / "s", random_columns(100), rows_per_shard=30)
    for rows in (range(70, 81), range(-1, 3), range(0, 10, 2)):
        with pytest.raises(StoreError, match="has 80 rows, and not range"):
            store.load("train", rows)
    column = store.load("train")["label"]
    for rows in (np.array([80]), np.array([-1]), slice(0, 10, 2)):
        with pytest.raises(IndexError):
            column[rows]


def test_a_split_in_one_shard_is_memory_mapped_without_a_copy(tmp_path):
    store = write(tmp_path / "s", random_columns(100))
    for column in store.load("test").values():
        assert not column.flags.owndata
        base = column
        while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
            base = base.base
        assert isinstance(base, np.memmap)


def test_the_digest_names_the_rows(tmp_path):
    columns = random_columns(40)
    one, two = write(tmp_path / "1", columns), write(tmp_path / "2", columns, block=7)
    assert one.digest == two.digest
    columns["label"][39] ^= 1
    assert write(tmp_path / "3", columns).digest != one.digest


@pytest.mark.parametrize("occupant", ["store", "file", "empty directory", "dangling link"])
def test_an_existing_path_is_refused_and_untouched(tmp_path, occupant):
    out = tmp_path / "s"
    match occupant:
        case "store":
            before = write(out, random_columns(20)).digest
        case "file":
            out.write_text("mine")
        case "empty directory":
            out.mkdir()
        case "dangling link":
            out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="exists already"):
        write(out, random_columns(30))
    assert contents(tmp_path) == ["s"]
    if occupant == "store":
        assert Store.open(out).digest == before


def test_an_error_while_writing_leaves_nothing(tmp_path):
    def interrupted():
        with StoreWriter(tmp_path / "s", DISPLAY_ADS, hash_seed=0) as writer:
            writer.append(random_columns(10))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert contents(tmp_path) == []


@pytest.mark.parametrize("wrong", ["dtype", "width", "length"])
def test_columns_that_do_not_fit_the_schema_are_refused(tmp_path, wrong):
    columns = random_columns(10)
    match wrong:
        case "dtype":
            columns["integers"] = columns["integers"].astype(np.float64)
        case "width":
            columns["categories"] = columns["categories"][:, 1:]
        case "length":
            columns["integers_missing"] = columns["integers_missing"][1:]
    with pytest.raises(ValueError, match="must be"):
        write(tmp_path / "s", columns)
    assert contents(tmp_path) == []


def test_two_writers_of_one_name_exclude_each_other(tmp_path):
    with StoreWriter(tmp_path / "s", DISPLAY_ADS, hash_seed=0) as first:
        first.append(random_columns(10))
        with pytest.raises(StoreError, match="another process is writing"):
            write(tmp_path / "s", random_columns(5))
        store = first.finish(splits=chronological_split(10), source={})
    assert store.num_rows == 10
    store.verify()


def test_a_writer_that_finished_leaves_the_next_one_alone(tmp_path):
    second = StoreWriter(tmp_path / "s", DISPLAY_ADS, hash_seed=0)
    with StoreWriter(tmp_path / "s", DISPLAY_ADS, hash_seed=0) as first:
        first.append(random_columns(10))
        first.finish(splits=chronological_split(10), source={})
        shutil.rmtree(tmp_path / "s")
        second.__enter__()
        second.append(random_columns(20))
    assert second.finish(splits=chronological_split(20), source={}).num_rows == 20
    second.__exit__(None, None, None)
    assert contents(tmp_path) == ["s"]


def test_foreign_files_where_leftovers_would_be_are_not_removed(tmp_path):
    (tmp_path / ".s.partial").mkdir()
    (tmp_path / ".s.partial" / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match=r"thesis\.tex is in the way"):
        write(tmp_path / "s", random_columns(5))
    assert (tmp_path / ".s.partial" / "thesis.tex").read_text() == "years of work"


KILLED = """
import os, signal, sys
sys.path[:0] = [{root!r}, {tests!r}]
from test_store import random_columns
from experiments.tasks import splits
from experiments.tasks.clicks import schema, writer as module
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
with module.StoreWriter({out!r}, schema.DISPLAY_ADS, hash_seed=0) as writer:
    for i in range(3):
        writer.append(random_columns(1000, i))
        if {moment!r} == "while writing rows" and i == 1: die()
    if {moment!r} == "before the manifest": module.json.dumps = die
    if {moment!r} == "before the rename": module.os.rename = die
    writer.finish(splits=splits.chronological_split(3000), source={{}})
"""


@pytest.mark.short("before the rename")
@pytest.mark.parametrize(
    "moment", ["while writing rows", "before the manifest", "before the rename"]
)
def test_a_killed_writer_leaves_no_store_and_the_next_one_replaces_its_leftovers(tmp_path, moment):
    out = tmp_path / "s"
    script = KILLED.format(
        root=str(ROOT), tests=str(Path(__file__).parent), out=str(out), moment=moment
    )
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert contents(tmp_path) == [".s.partial"]
    with pytest.raises(StoreError, match="does not exist"):
        Store.open(out)
    columns = random_columns(20, 9)
    store = write(out, columns)
    store.verify()
    assert contents(tmp_path) == ["s"]
    assert contents(out) == sorted(["manifest.json", *(f"00000.{c}.npy" for c in columns)])
    np.testing.assert_array_equal(store.load("train")["label"], columns["label"][:16])


# --- Opening -------------------------------------------------------------------------------------

SPLITS = {"train": [0, 80], "validation": [80, 90], "test": [90, 100]}


@pytest.fixture
def stored(tmp_path):
    write(tmp_path / "s", random_columns(100), rows_per_shard=60)
    return tmp_path / "s"


def manifest(**changes):
    """Changes entries of the manifest."""

    def change(path):
        file = path / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def text(content):
    return lambda path: (path / "manifest.json").write_text(content)


def shard(name, change):
    """Changes the bytes of a file of rows."""
    return lambda path: (path / name).write_bytes(change((path / name).read_bytes()))


def replaced_by_a_file(path):
    shutil.rmtree(path)
    path.write_text("")


INTEGERS = "00001.integers.npy"
DAMAGES = {
    "no directory": (shutil.rmtree, "does not exist"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "has no manifest.json"),
    "a file": (replaced_by_a_file, "is a file and no store: make one of it with `dpsgd prepare`"),
    "version": (manifest(version=1), "version 1, and this program reads version 2"),
    "format": (manifest(format="parquet"), "another format"),
    "rows": (manifest(num_rows=101), "do not add up"),
    "test from 85": (manifest(splits=SPLITS | {"test": [85, 100]}), "'test'.* share rows"),
    "train to 81": (manifest(splits=SPLITS | {"train": [0, 81]}), "'train'.* share rows"),
    "nothing": (text(""), "damaged manifest.json"),
    "half": (text("{"), "damaged manifest.json"),
    "a list": (text("[]"), "damaged manifest.json"),
    "few entries": (text('{"format": "dpsgd-columns", "version": 2}'), "damaged manifest.json"),
    "bytes too many": (shard(INTEGERS, lambda data: data + b"more"), "4 bytes too many"),
    "header": (shard(INTEGERS, lambda data: data.replace(b"}", b"(", 1)), "s.npy cannot be read"),
    "shape": (
        lambda path: np.save(path / INTEGERS, np.zeros((39, 13), np.float32)),
        r"shape \(39, 13\).*manifest says \(40, 13\)",
    ),
}


def refused(path, says):
    with pytest.raises(StoreError, match=says) as caught:
        Store.open(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("damage", "says"), DAMAGES.values(), ids=DAMAGES)
def test_what_is_no_store_is_refused_by_name_in_one_line(stored, damage, says):
    damage(stored)
    refused(stored, says)


@pytest.mark.parametrize("column", columns_of(DISPLAY_ADS))
def test_a_file_of_rows_that_is_missing_cut_short_or_changed_is_named(stored, column):
    name = f"00001.{column}.npy"
    file = stored / name
    content = file.read_bytes()
    for kept in (0, 60, 128, -1):
        file.write_bytes(content[:kept])
        refused(stored, name)
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(StoreError, match=f"{name} is damaged"):
        Store.open(stored).verify()
    file.unlink()
    refused(stored, f"{name} is missing")


def test_an_unknown_split_lists_the_known_ones(stored):
    with pytest.raises(StoreError, match="no split 'dev'; it has train, validation, test"):
        Store.open(stored).load("dev")


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot be written: (Not a directory|File exists)"):
        write(tmp_path / "file" / "s", random_columns(5))
    with pytest.raises(StoreError, match="cannot be written: File name too long"):
        write(tmp_path / ("s" * 300), random_columns(5))
