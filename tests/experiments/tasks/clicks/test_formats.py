"""What all formats of rows have in common: raw files of both data sets, tables in text and Parquet.

A new format gets all of this by one entry of `CASES`.
"""

import gzip
import io
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from experiments.tasks.clicks.criteo import display, search
from experiments.tasks.clicks.raw import format as raw_format
from experiments.tasks.clicks.raw.files import DataError
from experiments.tasks.clicks.store import StoreError
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.clicks.tabular import files
from experiments.tasks.clicks.tabular.format import TableFormat, table_schema
from experiments.tasks.splits import joined

TABLE = TableFormat(table_schema("y", categories=("c",), numbers=("x",), buckets=(64,)))


class Case(NamedTuple):
    format: Any
    write: Callable[[Any], bytes]
    """(rows) -> the bytes of a file of these rows, each a dictionary of texts."""
    text: bool = True


def lines(rows):
    return "".join("\t".join(row.values()) + "\n" for row in rows).encode()


def table(write):
    def written(rows):
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        sink = io.BytesIO()
        write(pa.table(columns), sink)
        return sink.getvalue()

    return written


CASES = {
    "display": Case(display.FORMAT, lines),
    "search": Case(search.FORMAT, lines),
    "csv": Case(TABLE, table(pa.csv.write_csv)),
    "parquet": Case(TABLE, table(pq.write_table), text=False),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_text = pytest.mark.parametrize("case", [case for case in CASES.values() if case.text])


@pytest.fixture
def rows(case, tmp_path_factory):
    """400 rows of the format, as texts by column."""
    if case.format is TABLE:
        return [{"y": str(i % 2), "c": f"a\n{i % 7}", "x": str(i / 3)} for i in range(400)]
    log, path = synthetic.LOGS[case.format.schema.name], tmp_path_factory.mktemp("raw") / "f"
    synthetic.write_raw(path, 400, 1, log=log)
    fields = [line.split("\t") for line in path.read_text().splitlines()]
    return [dict(zip(case.format.columns, row, strict=True)) for row in fields]


def read(format, path, **options):
    return joined(format.read(path, **options))


def made(case, path, rows, out, **options):
    path.write_bytes(case.write(rows))
    return case.format.prepare([path], out, **options)


@each_case
def test_rows_in_memory_are_those_of_a_file(case, rows, tmp_path):
    (tmp_path / "f").write_bytes(case.write(rows))
    expected = read(case.format, tmp_path / "f", labelled=False)
    found = case.format.encode({name: [r[name] for r in rows] for name in rows[0]})
    assert found.keys() == expected.keys() == {"integers", "integers_missing", "categories"}
    for name, column in found.items():
        np.testing.assert_array_equal(column, expected[name])
    nothing = case.format.encode({name: [] for name in rows[0]})
    assert {name: x.shape[1:] for name, x in nothing.items()} == {
        name: x.shape[1:] for name, x in found.items()
    }


@each_case
def test_rows_in_memory_without_a_feature_or_of_other_lengths_are_refused(case, rows):
    columns = {name: [row[name] for row in rows[:4]] for name in rows[0]}
    first, *_, last = case.format.features
    with pytest.raises(ValueError, match=f"not of one length: .*{last} has 1"):
        case.format.encode({**columns, last: columns[last][:1]})
    del columns[first], columns[last]
    with pytest.raises(ValueError, match=r"the rows have no column \w+, \w+$"):
        case.format.encode(columns)


@each_case
def test_a_changed_and_a_new_row_change_no_other_row_no_shape_and_no_bucket_count(
    case, rows, tmp_path
):
    changed = rows[9] | {name: "1" for name in case.format.schema.integers}
    label = case.format.schema.label or case.format.label
    last = case.format.features[-1]
    changed |= {label: str(1 - int(changed[label])), last: "fffffff1"}
    if case.format is TABLE:
        changed["x"] = "-1e300"
    one = made(case, tmp_path / "a", rows, tmp_path / "one")
    other = made(case, tmp_path / "b", [*rows[:5], changed, *rows[6:], changed], tmp_path / "other")
    assert (one.schema, one.hash_seed) == (other.schema, other.hash_seed)
    differing = 0
    chronological = case.format.split.order == "chronological"
    for split in ("train",) if chronological else one.splits:
        old, new = one.load(split), other.load(split)
        size = len(old["label"])
        differs = [(x != new[name][:size]).reshape(size, -1).any(1) for name, x in old.items()]
        differing += np.any(differs, axis=0).sum()
    assert differing == 1  # row 5 trains


@each_case
def test_the_hash_seed_changes_ids_and_nothing_else(case, rows, tmp_path):
    (tmp_path / "f").write_bytes(case.write(rows))
    one, two = (read(replace(case.format, hash_seed=seed), tmp_path / "f") for seed in (0, 1))
    for name in ("label", "integers", "integers_missing"):
        np.testing.assert_array_equal(one[name], two[name])
    known = one["categories"] > 0
    np.testing.assert_array_equal(known, two["categories"] > 0)
    assert (one["categories"] == two["categories"])[known].mean() < 0.1


@each_case
def test_progress_counts_rows_and_a_name_that_is_taken_is_refused_before_reading(
    case, rows, tmp_path
):
    seen = []
    store = made(case, tmp_path / "f", rows, tmp_path / "s", progress=seen.append)
    assert seen == sorted(set(seen))
    assert seen[-1] == store.num_rows == 400
    named = {"files": ["f"]} if case.format is TABLE else {"file": "f"}
    assert store.source == {"format": case.format.schema.name, **named}
    with pytest.raises(StoreError, match="exists already"):
        case.format.prepare([tmp_path / "f"], tmp_path / "s", progress=pytest.fail)


@each_case
def test_what_is_no_file_of_rows_is_refused_in_one_line(case, rows, tmp_path):
    def refused(says, *paths):
        with pytest.raises(ValueError, match=says) as caught:
            case.format.prepare(paths, tmp_path / "store")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "store").exists()

    file = tmp_path / "f"
    file.write_bytes(case.write(rows))
    (tmp_path / "link").symlink_to(file)
    refused("link is given twice, and each of its rows would be two", file, tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    refused("pipe: is a pipe or a device", tmp_path / "pipe")
    refused(r"none: cannot be read: No such file", tmp_path / "none")
    refused("cannot be read: Is a directory", tmp_path)
    for head in (b"PK\x03\x04rest", b"x" * 257 + b"ustar"):
        file.write_bytes(head)
        refused("is a zip or tar archive; unpack it", file)
    for empty in (b"", gzip.compress(b"", mtime=0)):
        file.write_bytes(empty)
        refused("is empty; expected", file)


@each_text
def test_a_truncated_or_damaged_gzip_is_one_line_and_leaves_no_store(case, rows, tmp_path):
    whole = gzip.compress(case.write(rows * 15))
    wrong_sum = whole[:-8] + bytes(b ^ 0xFF for b in whole[-8:-4]) + whole[-4:]
    cases = [(whole[:keep], "truncated") for keep in (-1, -9, len(whole) // 2)]
    cases += [(wrong_sum, "damaged"), (whole + b"trailing", "damaged")]
    for content, says in cases:
        (tmp_path / "t.gz").write_bytes(content)
        with pytest.raises(DataError, match=f"the gzip stream is {says}"):
            case.format.prepare([tmp_path / "t.gz"], tmp_path / "store")
        assert [p.name for p in tmp_path.iterdir()] == ["t.gz"]


@each_case
def test_memory_does_not_grow_with_the_file(case, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(raw_format, "BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(files, "BLOCK_BYTES", 1 << 15)
    monkeypatch.setattr(files, "BLOCK_ROWS", 1 << 10)
    (tmp_path / "f").write_bytes(case.write(rows * (400 if case.format is TABLE else 60)))
    options = {} if case.format is TABLE else {"block_bytes": 1 << 16}
    before, most, blocks = pa.total_allocated_bytes(), 0, 0
    for _ in case.format.read(tmp_path / "f", **options):
        most = max(most, pa.total_allocated_bytes() - before)
        blocks += 1
    assert blocks > 30
    assert most < (2 << 20 if not case.text else (tmp_path / "f").stat().st_size / 4)
