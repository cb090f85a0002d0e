"""A store is whole or absent, reads back what was written, and says what is wrong with it."""

import itertools
import json
import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.store import Store, StoreError, columns_of, file_names
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.clicks.writer import StoreWriter
from experiments.tasks.splits import Split, chronological_split, random_split
from tests.experiments.tasks.clicks.slow import GOLDEN, WORD, split_mix

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


def write(out, columns, *, block=50, order="chronological"):
    blocks = (
        {name: column[begin : begin + block] for name, column in columns.items()}
        for begin in range(0, len(columns["label"]), block)
    )
    return StoreWriter(out, DISPLAY_ADS, hash_seed=3).write(blocks, Split(order), {"by": "test"})


def contents(directory):
    return sorted(p.name for p in directory.iterdir())


@pytest.mark.parametrize("rows", [10, 11, 200])
@pytest.mark.parametrize("block", [1000, 13])
@pytest.mark.parametrize("order", ["chronological", "random"])
def test_rows_are_read_back_by_split_and_block(tmp_path, rows, block, order):
    columns = random_columns(rows)
    if order == "random" and rows < 200:
        with pytest.raises(StoreError, match=r"would have no \w+ rows"):
            write(tmp_path / "s", random_columns(3), order=order)
        assert contents(tmp_path) == []
        return
    store = write(tmp_path / "s", columns, block=block, order=order)
    store.verify()
    assert store.num_rows == rows
    assert list(store.splits) == ["train", "validation", "test"]
    assert contents(tmp_path) == ["s"]
    by_split = random_split(columns, 0)
    if order == "chronological":
        ranges = chronological_split(rows).items()
        by_split = {name: {x: c[a:b] for x, c in columns.items()} for name, (a, b) in ranges}
    for split, expected in by_split.items():
        loaded, blocks = store.load(split), list(store.blocks(split, rows=5))
        assert all(len(block["label"]) <= 5 for block in blocks)
        for name, column in expected.items():
            np.testing.assert_array_equal(loaded[name], column)
            assert loaded[name].dtype == column.dtype
            with pytest.raises((ValueError, TypeError)):
                loaded[name][:1] = 0  # read-only
            np.testing.assert_array_equal(np.concatenate([b[name] for b in blocks]), column)
            base = loaded[name]
            while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
                base = base.base
            assert isinstance(base, np.memmap)


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


def test_random_split_is_80_10_10_by_row_numbers_alone():
    """Binomial counts, within six standard deviations: a false alarm has a probability of 1e-8."""
    num_rows = 200_000
    whole = random_split({"label": np.arange(num_rows)}, 0)
    for part, share in {"train": 0.8, "validation": 0.1, "test": 0.1}.items():
        rows = whole[part]["label"]
        assert (np.diff(rows) > 0).all()
        assert abs(len(rows) - share * num_rows) < 6 * np.sqrt(num_rows * share * (1 - share))
    assert sum(len(part["label"]) for part in whole.values()) == num_rows
    expected = {"test": [], "validation": [], "train": []}
    for i in range(1000):
        x = split_mix((i + 1) * GOLDEN & WORD)
        part = "test" if x < 2**64 // 10 else "validation" if x < 2**64 // 5 else "train"
        expected[part].append(i)
    for part, rows in expected.items():
        assert whole[part]["label"][: len(rows)].tolist() == rows
    rest = random_split({"label": np.arange(777, num_rows)}, 777)
    for part in whole:
        rows = whole[part]["label"]
        np.testing.assert_array_equal(rest[part]["label"], rows[rows >= 777])


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
def test_fractions_that_do_not_cover_all_rows_are_refused(fractions):
    with pytest.raises(ValueError, match="positive and add up to 1, got"):
        Split("random", fractions)
    Split("random", (0.7, 0.2, 0.1))


def test_digest_identifies_the_rows(tmp_path):
    columns = random_columns(40)
    one, two = write(tmp_path / "1", columns), write(tmp_path / "2", columns, block=7)
    assert one.digest == two.digest
    columns["label"][39] ^= 1
    assert write(tmp_path / "3", columns).digest != one.digest


OCCUPANTS = {
    "store": lambda out: write(out, random_columns(20)),
    "file": lambda out: out.write_text("mine"),
    "empty directory": Path.mkdir,
    "dangling link": lambda out: out.symlink_to("nowhere"),
}


@pytest.mark.parametrize("occupy", OCCUPANTS.values(), ids=OCCUPANTS)
def test_an_existing_path_is_refused_and_untouched(tmp_path, occupy):
    store = occupy(tmp_path / "s")
    with pytest.raises(StoreError, match="exists already"):
        write(tmp_path / "s", random_columns(30))
    assert contents(tmp_path) == ["s"]
    assert not isinstance(store, Store) or Store.open(tmp_path / "s").digest == store.digest


WRONG = {
    "integers": lambda column: column.astype(np.float64),
    "categories": lambda column: column[:, 1:],
    "integers_missing": lambda column: column[1:],
}


@pytest.mark.parametrize("name", WRONG)
def test_columns_that_do_not_fit_the_schema_are_refused(tmp_path, name):
    columns = random_columns(10)
    with pytest.raises(ValueError, match="must be"):
        write(tmp_path / "s", columns | {name: WRONG[name](columns[name])})
    assert contents(tmp_path) == []


def finished(writer, rows):
    writer.append(random_columns(rows), "train")
    writer.divide(chronological_split(rows))
    return writer.complete({})


def test_two_writers_of_one_name_exclude_each_other(tmp_path):
    with StoreWriter(tmp_path / "s", DISPLAY_ADS, hash_seed=0) as first:
        with pytest.raises(StoreError, match="another process is writing"):
            write(tmp_path / "s", random_columns(15))
        store = finished(first, 10)
    assert store.num_rows == 10
    store.verify()


def test_a_writer_that_finished_leaves_the_next_one_alone(tmp_path):
    second = StoreWriter(tmp_path / "s", DISPLAY_ADS, hash_seed=0)
    with StoreWriter(tmp_path / "s", DISPLAY_ADS, hash_seed=0) as first:
        finished(first, 10)
        shutil.rmtree(tmp_path / "s")
        second.__enter__()
    assert finished(second, 20).num_rows == 20
    second.__exit__(None, None, None)
    assert contents(tmp_path) == ["s"]


def test_foreign_files_where_leftovers_would_be_are_not_removed(tmp_path):
    (tmp_path / ".s.partial").mkdir()
    (tmp_path / ".s.partial" / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match=r"thesis\.tex does not belong to a store"):
        write(tmp_path / "s", random_columns(5))
    assert (tmp_path / ".s.partial" / "thesis.tex").read_text() == "years of work"


KILLED = """
import os, signal, sys
sys.path[:0] = [{root!r}]
from tests.experiments.tasks.clicks.test_store import random_columns
from experiments.tasks import splits
from experiments.tasks.clicks import schema, writer as module
def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
with module.StoreWriter({out!r}, schema.DISPLAY_ADS, hash_seed=0) as writer:
    for i in range(3):
        writer.append(random_columns(1000, i), "train")
        if {moment!r} == "while writing rows" and i == 1: die()
    if {moment!r} == "before the manifest": module.json.dumps = die
    if {moment!r} == "before the rename": module.os.rename = die
    writer.divide(splits.chronological_split(3000))
    writer.complete({{}})
"""


@pytest.mark.short("before the rename")
@pytest.mark.parametrize(
    "moment", ["while writing rows", "before the manifest", "before the rename"]
)
def test_the_next_writer_replaces_leftovers_of_a_killed_one(tmp_path, moment):
    out = tmp_path / "s"
    script = KILLED.format(root=str(ROOT), out=str(out), moment=moment)
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert contents(tmp_path) == [".s.partial"]
    with pytest.raises(StoreError, match="does not exist"):
        Store.open(out)
    columns = random_columns(20, 9)
    store = write(out, columns)
    store.verify()
    assert contents(tmp_path) == ["s"]
    assert contents(out) == sorted(["manifest.json", *file_names(DISPLAY_ADS)])
    np.testing.assert_array_equal(store.load("train")["label"], columns["label"][:16])


# --- Opening -------------------------------------------------------------------------------------

ROWS = {"train": 80, "validation": 10, "test": 10}


@pytest.fixture
def stored(tmp_path):
    write(tmp_path / "s", random_columns(100))
    return tmp_path / "s"


def manifest(**changes):
    """Changes entries of the manifest."""

    def change(path):
        file = path / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def text(content):
    return lambda path: (path / "manifest.json").write_text(content)


def replaced_by_a_file(path):
    shutil.rmtree(path)
    path.write_text("")


DAMAGES = {
    "no directory": (shutil.rmtree, "does not exist"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "has no manifest.json"),
    "a file": (replaced_by_a_file, "is a file, not a store; convert it by `dpsgd prepare`"),
    "version": (manifest(version=2), "version 2, but this program reads version 3"),
    "format": (manifest(format="parquet"), "its format is 'parquet', not dpsgd-columns"),
    "fewer rows": (manifest(splits=ROWS | {"test": 9}), "test.label has 10 bytes, expected"),
    "another split": (manifest(splits=ROWS | {"../x": 1}), "splits: train, validation, test each"),
    "negative rows": (manifest(splits=ROWS | {"test": -1}), "each need a row count of at least 0"),
    "no checksum": (manifest(sha256={}), "sha256: test.categories is missing"),
    "nothing": (text(""), "damaged manifest.json"),
    "half": (text("{"), "damaged manifest.json"),
    "a list": (text("[]"), "damaged manifest.json"),
    "few entries": (text('{"format": "dpsgd-columns", "version": 3}'), "damaged manifest.json"),
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
def test_a_file_that_is_missing_cut_extended_or_changed_is_named(stored, column):
    name = f"validation.{column}"
    file = stored / name
    content = file.read_bytes()
    for other in (b"", content[:-1], content + b"x"):
        file.write_bytes(other)
        refused(stored, f"{name} has ")
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(StoreError, match=f"{name} was changed"):
        Store.open(stored).verify()
    file.unlink()
    refused(stored, f"{name} is missing")
    file.mkdir()
    refused(stored, name)


def test_an_unknown_split_lists_the_known_ones(stored):
    with pytest.raises(StoreError, match="no split 'dev'; it has train, validation, test"):
        Store.open(stored).load("dev")


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot be written: (Not a directory|File exists)"):
        write(tmp_path / "file" / "s", random_columns(5))
    with pytest.raises(StoreError, match="cannot be written: File name too long"):
        write(tmp_path / ("s" * 300), random_columns(5))


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(tmp_path):
    """Really full, as far as the process can tell: the kernel refuses files past 50 kB."""
    synthetic.write_raw(tmp_path / "train.txt", 1_000, 0)
    program = f"""
import resource, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from experiments.tasks.clicks.formats import DISPLAY
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    DISPLAY.prepare({str(tmp_path / "train.txt")!r}, {str(tmp_path / "s")!r})
except ValueError as error:
    sys.exit(str(error))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert re.fullmatch(r".*/s cannot be written: the disk is full \(.*\).*\n", done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["train.txt"]
