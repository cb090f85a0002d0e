"""One's own table: every way to write it gives one store, and what is wrong has its place."""

import contextlib
import csv
import datetime
import decimal
import gzip
import io
import json
import math
import shlex
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsgd import load_exported
from experiments import cli
from experiments.tasks.clicks.raw.files import DataError
from experiments.tasks.clicks.store import Store
from experiments.tasks.clicks.tabular import files
from experiments.tasks.clicks.tabular.format import TableFormat, table_schema
from experiments.tasks.splits import Split, joined, random_split
from tests.experiments.tasks.clicks.slow import assert_same, slow_columns, text_hash

SCHEMA = table_schema("y", categories=("city", "n"), numbers=("age", "visits"), buckets=(64, 256))
FORMAT = TableFormat(SCHEMA)


def value(column, x):
    """Return what a column has in a store, by the slow reader."""
    if x is None or x == "" or x != x:
        return None
    return text_hash(str(x).encode()) if column in SCHEMA.categories else x


def read(path, schema=SCHEMA, hash_seed=0, **options):
    return joined(TableFormat(schema, hash_seed).read(path, **options))


# --- One table, however it is written ------------------------------------------------------------

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
floats = st.one_of(
    st.none(), st.just(math.nan), st.floats(allow_nan=False, allow_infinity=False, width=64)
)
tables = st.lists(
    st.fixed_dictionaries(
        {
            "y": st.booleans(),
            "city": st.one_of(st.none(), st.sampled_from(["", "Uri", "NA"]), texts),
            "age": floats,
            "n": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
            "visits": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
            "note": texts,
        }
    ),
    min_size=1,
    max_size=12,
)


def as_text(rows, delimiter=",", line_end="\n", quote_all=False, names=None):
    names = names or list(rows[0])

    def field(value):
        value = "" if value is None else str(int(value) if isinstance(value, bool) else value)
        quoted = quote_all or any(c in value for c in (delimiter, '"', "\r", "\n"))
        return '"' + value.replace('"', '""') + '"' if quoted else value

    lines = [names, *([row[name] for name in names] for row in rows)]
    return "".join(delimiter.join(map(field, line)) + line_end for line in lines).encode()


def as_parquet(rows, dictionary):
    columns = {name: pa.array([row[name] for row in rows]) for name in rows[0]}
    for name in ("city", "note"):
        columns[name] = columns[name].cast(pa.string())
        columns[name] = columns[name].dictionary_encode() if dictionary else columns[name]
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


@given(
    tables,
    st.sampled_from([*files.DELIMITERS]),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.booleans(),
    st.permutations(["y", "city", "age", "n", "visits", "note"]),
    st.booleans(),
    st.integers(0, 2**64 - 1),
)
def test_text_and_parquet_of_one_table_become_what_the_slow_reader_says(
    tmp_path_factory, rows, delimiter, line_end, quote_all, names, flag, seed
):
    path = tmp_path_factory.getbasetemp() / "table"
    expected = slow_columns(rows, SCHEMA, value, "y", seed)
    text = as_text(rows, delimiter, line_end, quote_all, names)
    text = b"\xef\xbb\xbf" * flag + text
    for content in (text, gzip.compress(text, 1), as_parquet(rows, dictionary=flag)):
        path.write_bytes(content)
        assert_same(read(path, hash_seed=seed), expected)
    del expected["label"]
    assert_same(read(path, hash_seed=seed, labelled=False), expected)
    table = {name: [row[name] for row in rows] for name in ("note", "visits", "n", "age", "city")}
    assert_same(TableFormat(SCHEMA, seed).encode(table), expected)


def people(count, first=0):
    return [
        {
            "y": i % 3 == 0,
            "city": ["", "Uri", 'a "b"\n, c', "Zoë"][i % 4],
            "age": None if i % 5 == 0 else i / 7,
            "n": i % 11,
            "visits": i - 20,
        }
        for i in range(first, first + count)
    ]


def write(path, rows, **options):
    path.write_bytes(as_text(rows, **options))
    return path


@pytest.mark.parametrize("order", ["random", "chronological"])
def test_several_files_in_any_format_are_one_table_to_the_bit(tmp_path, order, monkeypatch):
    rows = people(300)
    whole = write(tmp_path / "whole.csv", rows)
    parts = [write(tmp_path / "1.csv", rows[:80]), tmp_path / "2", tmp_path / "3.parquet"]
    parts[1].write_bytes(
        gzip.compress(as_text(rows[80:81], delimiter="\t", names=[*rows[0]][::-1]))
    )
    parts[2].write_bytes(as_parquet([{**row, "note": ""} for row in rows[81:]], dictionary=True))
    parts.insert(1, write(tmp_path / "empty.csv", rows[:1]))
    parts[1].write_bytes(parts[1].read_bytes().splitlines(keepends=True)[0])
    format = TableFormat(SCHEMA, split=Split(order, (0.7, 0.2, 0.1)))
    one = format.prepare([whole], tmp_path / "one")
    monkeypatch.setattr(files, "BLOCK_BYTES", 512)
    monkeypatch.setattr(files, "BLOCK_ROWS", 7)
    seen = []
    several = format.prepare(parts, tmp_path / "several", progress=seen.append)
    assert one.shards == several.shards
    assert one.splits == several.splits
    left_out = [FORMAT.left_out([FORMAT.open(path) for path in some]) for some in ([whole], parts)]
    assert left_out == [(), ("note",)]
    assert len(seen) > 10
    assert seen[-1] == 300
    several.verify()
    expected = slow_columns(rows, SCHEMA, value, "y")
    if order == "random":
        expected = random_split(expected, 0, (0.7, 0.2, 0.1))
        for part, columns in expected.items():
            assert_same(several.load(part), columns)
    else:
        assert several.splits["validation"] == (210, 270)
        assert_same(several.load("train"), {k: v[:210] for k, v in expected.items()})


def test_columns_that_are_not_named_are_not_looked_at(tmp_path):
    lines = as_text([{**row, "city": "Uri"} for row in people(40)]).splitlines()
    more = [b"z,z", *[b"\xff,", b'"a\nb""",nan'] * 20]
    wide = [b"%b,%b" % pair for pair in zip(lines, more, strict=True)]
    stores = []
    for name, content in {"plain": lines, "wide": wide}.items():
        (tmp_path / name).write_bytes(b"\n".join(content))
        stores.append(FORMAT.prepare([tmp_path / name], tmp_path / f"{name} store"))
    assert stores[0].shards == stores[1].shards
    assert FORMAT.left_out([FORMAT.open(tmp_path / "wide")]) == ("z",)


def test_numbers_may_stay_as_they_are_and_words_may_be_missing(tmp_path):
    schema = table_schema(
        "y", categories=("c",), numbers=("x",), transform="none", missing=("NA", "?")
    )
    path = tmp_path / "t.csv"
    path.write_text("y,c,x\n1,NA,-2.5\n0,?, 1e3 \n1,na,?\n0,x,NA\n")
    columns = read(path, schema)
    assert columns["integers"].tolist() == [[-2.5], [1000], [0], [0]]
    assert columns["integers_missing"].tolist() == [[False], [False], [True], [True]]
    assert (columns["categories"] == 0).ravel().tolist() == [True, True, False, False]
    path.write_text("y,c,x\n1,a,3.5e38\n")
    with pytest.raises(DataError, match=r"line 2, column x: found '3.5e38', .* at most 3.4e\+38"):
        read(path, schema)


def test_declared_values_are_numbered_and_all_others_are_missing(tmp_path):
    values = {"sex": ("Male", "Female"), "n": ("1", "7", "3")}
    names = ("sex", "city", "n")
    schema = table_schema("y", categories=names, buckets=(64,), values=values, missing=("?",))
    assert schema.table_sizes(2) == (3, 3, 4)  # declared values are not folded
    rows = {
        "sex": ["Female", "male", "", "?", None, "Male"],
        "city": ["a", "b", "", "?", None, "a"],
        "n": [3, 1, 2, None, 7, -1],
    }
    ids = [[2, 0, 0, 0, 0, 1], [3, 1, 0, 0, 2, 0]]
    table = TableFormat(schema).encode(rows)
    assert table["categories"][:, ::2].T.tolist() == ids
    assert schema.fold(table["categories"], 1)[:, ::2].T.tolist() == ids
    plain = TableFormat(table_schema("y", categories=names, buckets=(64,), missing=("?",)))
    np.testing.assert_array_equal(table["categories"][:, 1], plain.encode(rows)["categories"][:, 1])
    columns = {name: pa.array(rows[name]) for name in names} | {"y": pa.array([0, 1] * 3)}
    columns["sex"] = columns["sex"].dictionary_encode()
    pq.write_table(pa.table(columns), tmp_path / "p")
    assert read(tmp_path / "p", schema)["categories"][:, ::2].T.tolist() == ids


def test_a_label_is_of_two_classes_that_were_declared(tmp_path):
    schema = table_schema("y", categories=("c",), classes=("1", "0"))
    path = tmp_path / "t.csv"
    path.write_text("c,y\na,0\na,1\n")
    pq.write_table(pa.table({"c": ["a", "b"], "y": [0, 1]}), tmp_path / "p")
    for file in (path, tmp_path / "p"):
        assert read(file, schema)["label"].tolist() == [1, 0]
    path.write_text("c,y\na,0\nb,2\n")
    with pytest.raises(DataError, match=r"t.csv, line 3, column y: found '2', expected '1' or '0'"):
        read(path, schema)


@pytest.mark.parametrize(
    "values",
    [
        pa.array([0, 1], pa.int8()),
        pa.array([0, 1], pa.uint64()),
        pa.array([0.0, 1.0], pa.float16()),
        pa.array([False, True]),
        pa.array([0, 1], pa.decimal128(5, 2)),
        pa.array(["0", "1"]),
        pa.array(["False", "TRUE"], pa.large_string()),
        pa.array(["0.0", "true"]).dictionary_encode(),
        pa.array([b"0", b"1"]),
    ],
    ids=lambda values: str(values.type),
)
def test_labels_of_every_type_are_zeros_and_ones(tmp_path, values):
    pq.write_table(pa.table({"y": values, "x": [1, 2]}), tmp_path / "t")
    schema = table_schema("y", numbers=("x",))
    assert read(tmp_path / "t", schema)["label"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (pa.array([7, None], pa.uint8()), "7"),
        (pa.array([True, None]), "true"),
        (pa.array([datetime.date(2026, 1, 31), None]), "2026-01-31"),
        (pa.array([datetime.date(2026, 1, 31), None], pa.date64()), "2026-01-31"),
        (pa.array(["Zoë", None], pa.string_view()), "Zoë"),
        (pa.array(["Zoë", ""], pa.large_string()), "Zoë"),
        (pa.array(["Zoë".encode(), b""]), "Zoë"),
        (pa.array([7, None]).dictionary_encode(), "7"),
        (pa.nulls(2), ""),
    ],
    ids=lambda x: str(getattr(x, "type", x)),
)
def test_categories_of_every_type_are_the_text_that_a_csv_file_has(tmp_path, values, text):
    schema = table_schema("y", categories=("c",))
    encoded = TableFormat(schema).encode({"c": values})
    assert_same(encoded, TableFormat(schema).encode({"c": [text, ""]}))
    sliced = pa.concat_arrays([values, values]).slice(2)
    assert_same(TableFormat(schema).encode({"c": sliced}), encoded)


def test_what_lies_under_a_null_is_not_looked_at():
    whole = pa.array(["Uri", "Zug"])
    _, offsets, text = whole.buffers()
    masked = pa.Array.from_buffers(pa.string(), 2, [pa.py_buffer(b"\x01"), offsets, text])
    format = TableFormat(table_schema("y", categories=("c",)))
    assert_same(format.encode({"c": masked}), format.encode({"c": ["Uri", None]}))


def test_bytes_of_any_kind_may_be_categories():
    format = TableFormat(table_schema("y", categories=("c",)))
    texts = format.encode({"c": ["Uri", "Zug", ""]})["categories"]
    for kind in (pa.binary(), pa.large_binary(), pa.binary_view()):
        values = pa.array([b"Uri", b"\xff", None, b"\xfe"], kind)
        ids = format.encode({"c": values})["categories"].ravel().tolist()
        assert ids[0] == texts[0, 0]
        assert ids[2] == 0
        assert len({*ids}) == 4


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("c", pa.array([1.5, 2]), "column c: holds double, expected texts, integers, booleans or"),
        ("c", pa.array([datetime.datetime(2026, 1, 1)] * 2), "column c: holds timestamp"),
        ("c", pa.array([[1], [2]]), "column c: holds list"),
        ("x", pa.array([b"1", b"\xff"]), "column x: holds binary"),
        ("x", pa.array([True, False]), "column x: holds bool, expected numbers"),
        ("x", pa.array([datetime.date(2026, 1, 1)] * 2), "column x: holds date32"),
        ("x", pa.array([1.0, math.inf]), "row 2, column x: found inf, expected a finite number"),
        ("x", pa.array(["1", "one"]), "row 2, column x: found 'one', expected a finite number"),
        ("y", pa.array([1, 2]), "row 2, column y: found 2, expected 0 or 1"),
        ("y", pa.array([0, None]), "row 2, column y: found nothing, expected 0 or 1"),
        ("y", pa.array([math.nan, 0]), "row 1, column y: found nan, expected 0 or 1"),
        ("y", pa.array(["1", "yes"]), "row 2, column y: found 'yes', expected 0 or 1"),
        ("y", pa.nulls(2), "row 1, column y: found nothing"),
        ("y", pa.array([[1], [0]]), "column y: holds list"),
    ],
)  # fmt: skip
def test_values_of_a_parquet_file_that_do_not_fit_are_named(tmp_path, column, values, says):
    columns = {"y": pa.array([0, 1]), "x": pa.array([1, 2]), "c": pa.array(["a", "b"])}
    pq.write_table(pa.table(columns | {column: values}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=f"t.parquet, {says}"):
        read(tmp_path / "t.parquet", table_schema("y", categories=("c",), numbers=("x",)))


HEAD = b"y,x,c\n"
GOOD = b'1,2,"a\nb"\n'  # two lines


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", ": is empty; expected a header of column names"),
        (b"\n1,2,3\n", ": begins with a blank line"),
        (HEAD, ": has a header and no rows"),
        (HEAD + b"\n\n", ": has a header and no rows"),
        (b"y,z,z\n", ": has no column x, c; it has y, z, z, separated by commas"),
        (b"y, x,c\n", ": has no column x; it has y, ' x', c, separated by commas"),
        (b"y,x,c,x\n1,2,3,4\n", ": has the column x 2 times"),
        (HEAD + GOOD + b"2,2,a\n", ", line 4, column y: found '2', expected 0 or 1"),
        (HEAD + GOOD + b"\n\r\n,2,a\n", ", line 6, column y: found nothing, expected 0 or 1"),
        (HEAD + GOOD + b"0,1e999,a\n", ", line 4, column x: found '1e999', expected a finite"),
        (HEAD + GOOD + b"0,1_0,a\n", ", line 4, column x: found '1_0'"),
        (HEAD + GOOD + b"0," + b"7" * 50 + b"x,a\n", r", line 4, column x: found '7{40}\.\.\.'"),
        (HEAD + GOOD + b"0,1,2,3\n", ", line 4: found 4 columns, expected the 3 of the header"),
        (HEAD + GOOD + b"\xef\xbb\xbf0,1,2\n", ", line 4, column y: found "),
        (HEAD + GOOD + b"0,1,\xe9\n", ", line 4, column c: byte 0xe9 is not UTF-8 text"),
        (HEAD + GOOD + b"0,1,a\0b\n", ", line 4, column c: byte 0x00 is not UTF-8 text"),
        (b"z," + HEAD + b"\xe9,0,1,a\n\0,0,1,a\n", ", line 3, column z: byte 0x00 is not"),
        (HEAD.replace(b"x", b"\0"), ", line 1: byte 0x00 is not UTF-8 text"),
        (HEAD + GOOD + b'0,"1,2\n0,1,2\n', r", line 4: found 2 columns, .*\(is a quote not closed"),
        (HEAD + GOOD + b'0,1,"2\n0,1,2\n0,1,2', ", line 4: a quote is not closed"),
        (HEAD + GOOD + b'0,1,a"b\n0,1,"2\n', ", line 5: a quote is not closed"),
        (HEAD + GOOD * 30 + b'0,1,"2\n', ", line 62: a quote is not closed"),
        ("y,x,c\n1,2,a\n".encode("utf-16"), ": is UTF-16 text; save it as UTF-8"),
        (gzip.compress(b"PAR1", mtime=0), ": is a Parquet file within gzip; unpack it"),
        (b"PAR1" * 9, ": cannot be read as Parquet: "),
    ],
    ids=map(str, range(22)),
)  # fmt: skip
@pytest.mark.parametrize("block_bytes", [files.BLOCK_BYTES, 64])
def test_what_is_wrong_with_a_text_file_is_said_in_one_line_with_its_place(
    tmp_path, monkeypatch, block_bytes, content, says
):
    (tmp_path / "t.csv").write_bytes(content)
    monkeypatch.setattr(files, "BLOCK_BYTES", block_bytes)
    format = TableFormat(table_schema("y", categories=("c",), numbers=("x",)))
    with pytest.raises(DataError, match=f"t.csv{says}") as caught:
        format.prepare([tmp_path / "t.csv"], tmp_path / "store")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


@pytest.mark.parametrize("begin", [b'0,1,"', b"0,1,"], ids=["open quote", "no line end"])
def test_a_row_without_an_end_is_refused_without_reading_all_of_it(tmp_path, monkeypatch, begin):
    monkeypatch.setattr(files, "BLOCK_BYTES", 1 << 16)
    rest = (b"0,1,a\n" if b'"' in begin else b"z" * 6) * (1 << 20)
    (tmp_path / "t.csv").write_bytes(HEAD + GOOD + begin + rest)
    del rest
    format = TableFormat(table_schema("y", categories=("c",), numbers=("x",)))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="line 4: a row longer than 2 MB"):
            format.prepare([tmp_path / "t.csv"], tmp_path / "store")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_the_line_is_right_far_into_a_file_and_after_long_fields(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 1 << 19)
    rows = b'1,2,"a\nb"\n' * 5_000 + b"0,1," + b"z" * 200_000 + b"\n\n" + b"0,1,a\n" * 40_000
    (tmp_path / "t.csv").write_bytes(HEAD + rows + b"0,?,a\n")
    with pytest.raises(DataError, match=r"t\.csv, line 50004, column x: found"):
        read(tmp_path / "t.csv", table_schema("y", categories=("c",), numbers=("x",)))
    assert csv.field_size_limit() == 131_072


def test_a_file_that_lacks_a_column_is_named_before_rows_are_read(tmp_path):
    first = write(tmp_path / "1.csv", [{**people(1)[0], "age": 1.0}])
    second = write(tmp_path / "2.csv", people(3), names=["y", "city", "n", "visits"])
    with pytest.raises(DataError, match=r"2\.csv: has no column age; it has y, city, n, visits"):
        FORMAT.prepare([first, second], tmp_path / "store", progress=pytest.fail)


# --- What is asked for ---------------------------------------------------------------------------


A, C = {"numbers": ("a",)}, {"categories": ("a",)}
ENDS = ((1, 0), (0,), (0, math.inf), (0, math.nan), (-3e38, 3.5e38), (1e8, 1e8 + 1))
REFUSED = {
    "name the columns to learn from": [{}],
    "y: a column is the label, a category": [{"categories": ("y",)}],
    "a: a column is the label": [A | C, {"numbers": ("a", "a")}],
    "one for each of the 3 categories": [{"categories": ("a", "b", "c"), "buckets": (8, 8)}],
    "bucket count of a must be a power of two": [C | {"buckets": (size,)} for size in (0, 12)],
    "different texts of the label are declared": [
        C | {"classes": classes} for classes in (("b",), ("b", "b"), ("b", ""), ("b", "c", "b"))
    ],
    "bounds of the label .* must be finite": [C | {"label_bounds": ends} for ends in ENDS],
    "values or bounds": [A | {"label_bounds": (0, 1), "classes": ("a", "b")}],
    "columns of numbers, not for b": [A | {"bounds": {"b": (0, 1)}}],
    "bounds of a must be finite, low:high, n": [A | {"bounds": {"a": (1, 0)}}],
    "bounds of a are .* in float32.* give others$": [A | {"bounds": {"a": (1e8, 1e8 + 1)}}],
    "bounds of a are .* or take --transform log1p": [
        A | {"bounds": {"a": (0, 1e39)}, "transform": transform} for transform in ("both", "none")
    ],
    "columns of categories, not for b": [C | {"values": {"b": ("x",)}}],
    "values of a must": [
        C | {"values": {"a": texts}, "missing": ("NA",)}
        for texts in ((), ("x", "x"), ("x", ""), ("x", "NA"))
    ],
}


@pytest.mark.parametrize("says", REFUSED)
def test_columns_and_buckets_that_do_not_fit_are_refused(says):
    for asked in REFUSED[says]:
        with pytest.raises(ValueError, match=says):
            table_schema("y", **asked)


def test_rows_in_memory_are_refused_by_row_and_column():
    rows = {"city": ["a", "b"], "n": [1, 2], "age": [1.0, None], "visits": np.array([1, 2])}
    assert len(FORMAT.encode({**rows, "anything": []})["categories"]) == 2
    for change, says in [
        ({"age": [1.0, math.inf]}, "row 1, column age: found inf, expected a finite number"),
        ({"visits": ["1", "b"]}, "row 1, column visits: found 'b'"),
        ({"city": [1, "a"]}, "column city: values of one kind are expected"),
        ({"n": [1.0, 2.0]}, "column n: holds double, expected texts"),
        ({"n": [1]}, "not of one length: .*n has 1"),
        ({"n": [decimal.Decimal(1)] * 2}, "column n: holds decimal"),
    ]:
        with pytest.raises(ValueError, match=says):
            FORMAT.encode(rows | change)
    del rows["n"], rows["age"]
    with pytest.raises(ValueError, match="the rows have no column age, n"):
        FORMAT.encode(rows)


# --- The whole way -------------------------------------------------------------------------------


def run(*words) -> int:
    return cli.main([str(word) for word in words])


README = (Path(__file__).resolve().parents[4] / "README.md").read_text()
TINY = ["--embedding-dim", "2", "--max-buckets", "16", "--hidden", "4", "--batch-size", "100"]
TINY += ["--no-audit"]


def clicks(count, first=0):
    return [
        {
            "clicked": (i * i) % 7 < 3,
            "city": ["", "Uri", 'a "b"\n, c', "Zoë"][i % 4],
            "device": i % 11,
            "age": None if i % 5 == 0 else i / 7,
            "note": "",
            "other": i % 2,
        }
        for i in range(first, first + count)
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(the folder in which the README's commands on one's own data ran, what they printed)."""
    folder = tmp_path_factory.mktemp("trained")
    write(folder / "may.csv", clicks(700))
    june = as_text(clicks(300, 700), delimiter="\t", names=[*clicks(1)[0]][::-1])
    (folder / "june.tsv.gz").write_bytes(gzip.compress(june))
    (folder / "july.parquet").write_bytes(as_parquet(clicks(200, 1_000), dictionary=True))
    write(folder / "august.csv", clicks(50, 2_000), names=["age", "device", "other", "city"])
    section = README.split("## Your own data")[1].split("```")[1]
    commands = [
        shlex.split(line, comments=True)[1:]
        for line in section.replace("\\\n", "").strip().splitlines()
    ]
    assert [words[0] for words in commands] == ["prepare", "train", "evaluate", "export", "score"]
    commands[1] += TINY
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.chdir(folder):
        for words in commands:
            assert run(*words) == 0
    return folder, printed.getvalue()


def test_the_readmes_commands_prepare_train_with_a_guarantee_evaluate_export_and_score(trained):
    folder, printed = trained
    assert "left out: note, other\n1,000 rows in store" in printed
    assert "num_examples: 200\n" in printed
    store = Store.open(folder / "store")
    columns = {"categories": ("city", "device"), "numbers": ("age",)}
    schema = table_schema("clicked", **columns, bounds={"age": (0, 120)})
    assert store.schema == schema
    assert store.schema.buckets == (65_536, 65_536)
    assert store.source == {"format": "table", "files": ["may.csv", "june.tsv.gz"]}
    assert 750 < store.rows("train") < 850
    record = json.loads((folder / "run" / "report.json").read_text())
    assert 2.99 < record["epsilon_upper"] <= 3
    scores = [float(line) for line in (folder / "scores.csv").read_text().split()[1:]]
    august = {name: [row[name] for row in clicks(50, 2_000)] for name in ("city", "age", "device")}
    model = load_exported(folder / "model")
    np.testing.assert_allclose(model.predict(august), scores, rtol=1e-6)
    assert len(set(scores)) > 2
    with pytest.raises(ValueError, match="the rows have no column age"):
        model.predict({"city": ["Uri"], "device": [1]})


def test_scores_do_not_depend_on_how_rows_are_written_nor_on_their_labels(trained, tmp_path):
    folder, _ = trained
    rows = clicks(50, 2_000)
    write(tmp_path / "1", rows)
    write(tmp_path / "2", rows, delimiter=";", names=["device", "age", "city"], quote_all=True)
    unlabelled = [{k: v for k, v in row.items() if k != "clicked"} for row in rows]
    (tmp_path / "3").write_bytes(as_parquet(unlabelled, dictionary=False))
    for name in "123":
        out = tmp_path / f"{name}.csv"
        assert run("score", folder / "run", tmp_path / name, "--out", out) == 0
        assert out.read_bytes() == (folder / "scores.csv").read_bytes()


def test_scores_are_written_beside_a_column_that_tables_alone_have(trained, tmp_path, capsys):
    folder, _ = trained
    rows, out = [{**row, "note": f"k, {i}"} for i, row in enumerate(clicks(50))], tmp_path / "s.csv"
    ask = ["score", folder / "run", write(tmp_path / "t", rows), "--out", out, "--key"]
    assert run(*ask, "note") == 0
    with out.open(newline="") as file:
        assert [row[0] for row in csv.reader(file)] == ["note", *(f"k, {i}" for i in range(50))]
    out.unlink()
    for path, key, says in [
        (tmp_path / "t", "no", "has no column no"),
        (folder / "store", "note", "only tables, in CSV, TSV or Parquet files, have keys"),
    ]:
        assert run("score", folder / "run", path, "--out", out, "--key", key) == 2
        assert says in capsys.readouterr().err
    assert not out.exists()


def test_a_store_of_another_label_or_transform_is_not_evaluated(trained, tmp_path, capsys):
    folder, _ = trained
    asked = ["--categories", "city", "device", "--numbers", "age"]
    others = {"label": ["--label", "other"]}
    others["transform"] = ["--label", "clicked", "--transform", "none"]
    for what, other in others.items():
        assert run("prepare", "csv", folder / "may.csv", tmp_path / what, *other, *asked) == 0
        assert run("evaluate", folder / "run", tmp_path / what) == 2
        assert f"was prepared with other {what}: " in capsys.readouterr().err


AGE = ["t.csv", "s", "--label", "y", "--numbers", "age"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["t.csv", "--label", "y", "--numbers", "age"], "give a FILE or several, and then the ST"),
        (["t.csv", "t.csv", "--label", "y", "--numbers", "age"], "t.csv is a file; the last path"),
        (["t.csv", "s", "--label", "y"], "name the columns to learn from"),
        (["t.csv", "s", "--label", "y", "--numbers", "a"], "t.csv: has no column a; it has y, c"),
        (
            ["t.csv", "s", "--label", "y", "--numbers", "age", "--split", "1", "0", "0"],
            "add up to 1",
        ),
        (["no.csv", "s", "--label", "y", "--numbers", "age"], "no.csv: cannot be read: No such"),
        ([*AGE, "--positive", "1"], "--positive and --negative are given together"),
        (
            [*AGE, "--order", "chronological", "--split", "0.98", "0.01", "0.01"],
            "would have no validation rows, of 30 in all: give more rows",
        ),
        ([*AGE, "--bounds", "age=1"], "--bounds: 'age' has no bounds LOW:HIGH"),
        ([*AGE, "--bounds", "age=0:1", "age=0:2"], "age is given twice, with different"),
        ([*AGE, "--bounds", "age"], "age: No such file"),
        ([*AGE, "--bounds", "t.csv"], "t.csv is not TOML"),
        ([*AGE, "--values", "v.toml"], "v.toml: 'city' has no values ["),
        ([*AGE, "--values", "age=1,2"], "values are for columns of categories, not for age"),
    ],
)
def test_a_command_that_cannot_be_carried_out_is_one_line(
    tmp_path, monkeypatch, capsys, words, says
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.csv", people(30))
    (tmp_path / "v.toml").write_text("city = [1, 2]")
    assert run("prepare", "csv", *words) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "s").exists()
