"""Files of all formats are read as a slow reader reads them, or refused at the first bad line."""

import csv
import dataclasses
import datetime
import decimal
import gzip
import io
import math
import os
import re
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from experiments.tasks import files
from experiments.tasks.clicks.formats import DISPLAY, SEARCH, format_of, table_format, table_schema
from experiments.tasks.clicks.schema import DISPLAY_ADS, SEARCH_OUTCOMES, Schema, sponsored_search
from experiments.tasks.clicks.store import StoreError
from experiments.tasks.files import DELIMITERS
from experiments.tasks.splits import Split, concatenate, random_split
from experiments.tasks.streams import DataError, Span, spans_of
from tests.experiments.tasks.clicks.slow import (
    FORMATS,
    HEADER,
    TABLE,
    Refused,
    assert_same,
    edited,
    slow_columns,
    slow_read,
)

HASH = "4C90FD52FC53D2C1C205844CB69575AB"
OUTCOMES = ["Sale", "SalesAmountInEuro", "time_delay_for_conversion", "product_price"]
VALID = {
    "display": [
        ["0", "1", "-1", "", *["666"] * 6, "", "11", "", "1", *(f"{i:08x}" for i in range(26))],
        ["1", *[""] * 39],
        ["0", *["-0"] * 13, *["deadBEEF"] * 26],
        ["1", *["123456789012345678"] * 13, *[""] * 26],
    ],
    "search": [
        ["0", "-1.0", "-1", "1596439471", "17", "0.0", HASH, "-1", *[HASH] * 13, "A B", ""],
        ["1", "20.5", "3600", "-1", "-1", "19.99", *[""] * 17],
        ["1", "", "", "-7", "0", "", *["0x1F", "-1 ", "NA", '"', "a" * 8, "b" * 9] * 2, *"vwxyz"],
    ],
    "table": [
        ["1", "Uri", "7.25", "3", "-4", "z,z"],
        ["0", 'a "b"\n, c', "", "", "1e3", ""],
        ["true", "Zoë", "nan", "x" * 17, " 12 ", '"'],
    ],
}  # fmt: skip
each_format = pytest.mark.parametrize("name", FORMATS)
each_log = pytest.mark.parametrize("name", ["display", "search"])


def names_of(name):
    return FORMATS[name].layouts[0] if FORMATS[name].layouts else HEADER


def named(name, rows):
    return [dict(zip(names_of(name), row, strict=True)) for row in rows]


def as_text(name, rows, delimiter=",", line_end="\n", quote_all=False, names=None):
    """Returns rows, dictionaries of texts, as the text of a file."""
    names = names or names_of(name)
    if name != "table":
        return "".join("\t".join(row[x] for x in names) + line_end for row in rows).encode()

    def field(text):
        quoted = quote_all or any(c in text for c in (delimiter, '"', "\r", "\n"))
        return '"' + text.replace('"', '""') + '"' if quoted else text

    lines = [names, *([row[x] for x in names] for row in rows)]
    return "".join(delimiter.join(map(field, line)) + line_end for line in lines).encode()


def as_parquet(rows, dictionary=False):
    columns = {name: pa.array([row[name] for row in rows]) for name in rows[0]}
    if dictionary:
        columns = {name: column.dictionary_encode() for name, column in columns.items()}
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def read(format, path, **how):
    return concatenate(format.read(path, **how))


# --- Valid files ---------------------------------------------------------------------------------

integers = st.one_of(
    st.sampled_from(["", "-0", "-1"]),
    st.integers(-(10**18) + 1, 10**18 - 1).map(str),
    st.integers(0, 10**9).map("{:018d}".format),
)
words = st.integers(0, 2**32 - 1)
hexadecimals = st.one_of(st.just(""), *(words.map(f"{{:08{x}}}".format) for x in "xX"))
identifiers = st.one_of(
    st.sampled_from(["", "-1", "-1.0", "0", HASH]),
    st.text(st.characters(codec="utf-8", exclude_characters="\0\t\r\n"), max_size=40),
)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
numbers = st.one_of(
    st.sampled_from(["", "nan", " 1 ", "1e300", "-.5"]),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-(2**63), 2**63 - 1).map(str),
)
FIELDS = {
    "display": [st.sampled_from("01"), *[integers] * 13, *[hexadecimals] * 26],
    "search": [st.sampled_from("01"), *[identifiers] * 2, *[integers] * 2, *[identifiers] * 18],
    "table": [st.sampled_from(["0", "1", "true", "False"]), texts, numbers, texts, numbers, texts],
}


@each_format
@settings(max_examples=settings().max_examples // 4)
@given(data=st.data())
def test_files_and_rows_in_memory_are_read_as_by_the_slow_reader(tmp_path_factory, name, data):
    seed, draw = data.draw(st.integers(0, 2**64 - 1)), data.draw
    format = dataclasses.replace(FORMATS[name], hash_seed=seed)
    path = tmp_path_factory.getbasetemp() / "valid"
    rows = named(name, draw(st.lists(st.tuples(*FIELDS[name]), min_size=1, max_size=6)))
    line_ends = ["\n", "\r\n"] + ["\r"] * (name == "table")
    how = {"line_end": draw(st.sampled_from(line_ends))}
    if name == "table":
        how |= {"delimiter": draw(st.sampled_from([*DELIMITERS])), "quote_all": draw(st.booleans())}
        how["names"] = draw(st.permutations(HEADER))
    text = as_text(name, rows, **how)
    text = draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + text
    more = b"\n\r\n\n" * (name == "table")
    text = draw(st.sampled_from([text, text[: -len(how["line_end"])], text + more]))
    written = [text, gzip.compress(text, 1), as_parquet(rows, draw(st.booleans()))]
    expected = slow_columns(rows, format, hash_seed=seed)
    for content in written:
        path.write_bytes(content)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "BLOCK_BYTES", draw(st.sampled_from([1 << 22, 5_000])))
            assert_same(read(format, path), expected)
    del expected["label"]
    assert_same(read(format, path, labelled=False), expected)
    assert_same(format.encode({x: [row[x] for row in rows] for x in rows[0]}), expected)


@each_log
def test_files_without_labels_or_outcomes_have_features(tmp_path, name):
    format, rows = FORMATS[name], named(name, VALID[name])
    for layout in format.layouts:
        (tmp_path / "new").write_bytes(as_text(name, rows, names=layout))
        got = read(format, tmp_path / "new", labelled=False)
        assert_same(got, slow_columns(rows, format, labelled=False))
        if format.label not in layout:
            with pytest.raises(DataError, match=r"line 1: found \d+ columns, expected"):
                read(format, tmp_path / "new")
    included = format_of(sponsored_search(("product_price",)))
    (tmp_path / "new").write_bytes(
        as_text("search", named("search", VALID["search"]), names=SEARCH.layouts[-1])
    )
    with pytest.raises(DataError, match="line 1: found 19 columns, expected 23"):
        read(included, tmp_path / "new", labelled=False)


def test_outcomes_change_nothing_unless_they_are_included(tmp_path):
    rows = named("search", 2 * VALID["search"][:1])
    rows[1] |= {"SalesAmountInEuro": "20.5", "time_delay_for_conversion": "3600"}
    rows[1]["product_price"] = "19.99"
    (tmp_path / "log").write_bytes(as_text("search", rows))
    ids = read(SEARCH, tmp_path / "log")["categories"]
    np.testing.assert_array_equal(ids[0], ids[1])
    included = format_of(sponsored_search(tuple(SEARCH_OUTCOMES)))
    block = read(included, tmp_path / "log")
    assert_same(block, slow_columns(rows, included))
    assert (block["categories"][0, -3:] != block["categories"][1, -3:]).all()
    for include in (("Sale",), ("user_id",), ("product_price", "product_price")):
        with pytest.raises(ValueError, match="include: expected some of SalesAmountInEuro, "):
            sponsored_search(include)


@pytest.mark.long
def test_real_rows_are_read_as_by_the_slow_reader(real_criteo_rows, real_search_rows):
    rows = slow_read(real_search_rows.read_bytes(), "search")
    assert_same(read(SEARCH, real_search_rows), slow_columns(rows, SEARCH))
    with gzip.open(real_criteo_rows, "rb") as file:
        head = b"".join(file.readline() for _ in range(2000))
    columns = read(DISPLAY, real_criteo_rows)
    expected = slow_columns(slow_read(head, "display"), DISPLAY)
    assert_same({name: x[:2000] for name, x in columns.items()}, expected)
    # Counts and missing rates taken from the file with other tools.
    assert (len(columns["label"]), columns["label"].sum()) == (110_000, 28_243)
    missing = columns["integers_missing"].mean(axis=0).round(4)
    assert missing[[0, 1, 2, 11]].tolist() == [0.4533, 0.0, 0.2113, 0.7685]
    absent = (columns["categories"] == 0).mean(axis=0).round(4)
    assert absent[[0, 2, 5, 18, 21]].tolist() == [0.0, 0.035, 0.1233, 0.4406, 0.7606]


# --- Damaged files -------------------------------------------------------------------------------

mutations = st.lists(
    st.tuples(
        st.sampled_from(["put", "insert", "delete", "cut", "double"]),
        st.floats(0, 1),
        st.one_of(st.integers(0, 255), st.sampled_from(b'\t\n\r-09afAFgG :/@`\xff\x00"+')),
    ),
    max_size=3,
)


def mutate(data, changes):
    for change in changes:
        data = edited(data, *change)
    return data


@each_log
@settings(max_examples=2 * settings().max_examples)
@given(
    rows=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    code=st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16"]),
    changes=mutations,
    zipped=st.one_of(st.none(), st.none(), mutations),
    block_bytes=st.sampled_from([1 << 22, 2_000]),
)
@example([0, 1], "\n", "utf-8", [("insert", 0.0, 10)], None, 1 << 22)
@example([0, 1, 2], "\n", "utf-8", [("put", 0.0, 57), ("delete", 0.6, 0)], None, 1 << 22)
def test_mutated_files_are_read_right_or_refused_at_a_bad_line(
    tmp_path_factory, name, rows, line_end, code, changes, zipped, block_bytes
):
    path = tmp_path_factory.getbasetemp() / "mutated"
    text = as_text(name, named(name, [VALID[name][row] for row in rows]), line_end=line_end)
    data = mutate(text.decode().encode(code), changes)
    assume(data not in (b"\xef", b"\xef\xbb"))
    data = data if zipped is None else mutate(gzip.compress(data, mtime=0), zipped)
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_BYTES", block_bytes)
        try:
            expected, fault = slow_columns(slow_read(data, name), FORMATS[name]), None
        except Refused as refused:
            expected, fault = None, refused
        if fault is None:
            assert_same(read(FORMATS[name], path), expected)
            return
        with pytest.raises(DataError) as caught:
            read(FORMATS[name], path)
    assert str(caught.value).isprintable()  # one line, no control characters
    if fault.line != "gzip":
        assert caught.value.line == fault.line
        assert {caught.value.column} - {None} <= fault.columns
        assert caught.value.column or not fault.columns


def line(name="display", **fields):
    (row,) = named(name, VALID[name][:1])
    return as_text(name, [row | fields])


HEAD, GOOD = b"y,city,age,n,visits\n", b'1,"a\nb",2,3,4\n'
TABLE_HEAD = HEAD + GOOD  # three lines


def other_files(name):
    """Yields contents that hold no rows, and what is said of them."""
    whole = gzip.compress(as_text(name, named(name, VALID[name] * 40)), mtime=0)
    wrong_sum = whole[:-8] + bytes(b ^ 0xFF for b in whole[-8:-4]) + whole[-4:]
    for says, contents in {
        ": is a zip or tar archive; unpack it": [b"PK\x03\x04rest", b"x" * 257 + b"ustar"],
        ": is empty; expected": [b"", gzip.compress(b"", mtime=0)],
        ": is a gzipped Parquet file; unpack it": [gzip.compress(b"PAR1", mtime=0)],
        ": cannot be read as Parquet: ": [b"PAR1" * 9],
        ": the gzip file is incomplete": [whole[:n] for n in (-1, -9, len(whole) // 2)],
        ": the gzip file is damaged": [wrong_sum, whole + b"trailing"],
    }.items():
        yield from ((name, content, says) for content in contents)


FAULTS = [  # a format, a content, and what is said of it after the path
    *(fault for name in FORMATS for fault in other_files(name)),
    ("display", line(C3="xyz"), ", line 1, column C3: found 'xyz', expected eight hexadecimal dig"),
    ("display", line() * 37 + line(I1="1.5"), ", line 38, column I1: found '1.5', expected an int"),
    ("display", line(I1="0x1F"), ", line 1, column I1: found '0x1F', expected an integer"),
    ("display", line(I1=" 1"), ", line 1, column I1: found ' 1', expected an integer of at most 1"),
    ("display", line(I1="9" * 19), f", line 1, column I1: found '{'9' * 19}', expected an integer"),
    ("display", line(label=""), ", line 1, column label: found nothing, expected 0 or 1"),
    ("display", line(label='"0'), """, line 1, column label: found '"0', expected 0 or 1"""),
    ("display", line(C4="a" * 500), f", line 1, column C4: found '{'a' * 40}...', expected eight"),
    ("display", line()[:-1] + b"\t\n", ", line 1: found 41 columns, expected 40, separated by tab"),
    ("display", line() * 40 + line()[2:], ", line 41: found 39 columns, expected 40"),
    ("display", line(C5="\xe9").decode().encode("latin-1"), r", line 1, column C5: found '\\xe9',"),
    ("display", line() + b"\n", ", line 2: the line is blank, expected 40 columns"),
    ("display", line()[:-1] + b"\r\r\n", r", line 1, column C26: found '00000019\r', expected no"),
    ("search", line("search", click_timestamp="8-3"), ", line 1, column click_timestamp: "),
    ("search", line("search", user_id="b\0"), ", line 1, column user_id: byte 0x00 is not UTF-8"),
    ("search", line("search", user_id="Q").replace(b"Q", b"\xe9"), ", line 1, column user_id: byt"),
    ("search", line("search", product_id="a\rb"), r", line 1, column product_id: found 'a\rb', ex"),
    ("search", line("display"), ", line 1: found 40 columns, expected 23"),
    ("table", b"\n1,2,3\n", ": begins with a blank line"),
    ("table", HEAD, ": has a header but no rows"),
    ("table", HEAD + b"\n\n", ": has a header but no rows"),
    ("table", b"y,z,z\n", ": has no column age, visits, city, n; it has y, z, z, separated by"),
    ("table", HEAD.replace(b"n", b" n"), ": has no column n; it has y, city, age, ' n', visits, s"),
    ("table", HEAD.replace(b"n", b"age"), ": has no column n"),
    ("table", b"n," + HEAD, ": has the column n 2 times"),
    ("table", HEAD.replace(b"y,", b"\0,"), ", line 1: byte 0x00 is not UTF-8 text"),
    ("table", TABLE_HEAD + b"2,a,2,3,4\n", ", line 4, column y: found '2', expected 0 or 1"),
    ("table", TABLE_HEAD + b"\n\r\n,a,2,3,4\n", ", line 6, column y: found nothing, expected 0 or"),
    ("table", TABLE_HEAD + b"0,a,1e999,3,4\n", ", line 4, column age: found '1e999', expected a f"),
    ("table", TABLE_HEAD + b"0,a,0x1F,3,4\n", ", line 4, column age: found '0x1F', expected a fin"),
    ("table", TABLE_HEAD + b"0,a,1_0,3,4\n", ", line 4, column age: found '1_0'"),
    ("table", TABLE_HEAD + b"0,a," + b"7" * 50 + b"x,3,4\n", ", line 4, column age: found '7777"),
    ("table", TABLE_HEAD + b"0,1,2,3,4,5\n", ", line 4: found 6 columns, expected the 5 of the he"),
    ("table", TABLE_HEAD + b"0,a,?,3,4\n1,2\n", ", line 4, column age: found '?'"),
    ("table", TABLE_HEAD + b"\xef\xbb\xbf0,a,2,3,4\n", ", line 4, column y: found "),
    ("table", TABLE_HEAD + b"0,\xe9,2,3,4\n", ", line 4, column city: byte 0xe9 is not UTF-8 text"),
    ("table", TABLE_HEAD + b"0,a\0b,2,3,4\n", ", line 4, column city: byte 0x00 is not UTF-8 text"),
    ("table", b"z," + HEAD + b"\xe9,0,a,2,3,4\n\0,0,a,2,3,4\n", ", line 3, column z: byte 0x00 is"),
    ("table", TABLE_HEAD + b'0,"a,2\n0,a,2,3,4\n', ", line 4: found 2 columns, expected the 5 of"),
    ("table", TABLE_HEAD + b'0,a,2,3,"4\n0,a,2,3,4', ", line 4: a quote is not closed"),
    ("table", TABLE_HEAD + b'0,a"b,2,3,4\n0,a,2,3,"4\n', ", line 5: a quote is not closed"),
    ("table", TABLE_HEAD + GOOD * 30 + b'0,a,2,3,"4\n', ", line 64: a quote is not closed"),
    ("table", HEAD.decode().encode("utf-16"), ": is UTF-16 text; save it as UTF-8"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "says"), FAULTS, ids=range(len(FAULTS)))
@pytest.mark.parametrize("block_bytes", [1 << 22, 3_000])
def test_faults_are_named_by_file_line_and_column(
    tmp_path, monkeypatch, block_bytes, name, content, says
):
    monkeypatch.setattr(files, "BLOCK_BYTES", block_bytes if name != "table" else block_bytes // 40)
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(DataError, match=re.escape(f"{tmp_path}/f{says}")) as caught:
        FORMATS[name].prepare([tmp_path / "f"], tmp_path / "store")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300 + len(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_paths_that_are_no_files_are_refused_before_any_store(tmp_path):
    (tmp_path / "f").write_bytes(line())
    (tmp_path / "link").symlink_to(tmp_path / "f")
    os.mkfifo(tmp_path / "pipe")
    for says, names in {
        "link is named twice; each of its rows would count": ["f", "link"],
        "pipe: is a pipe or a device": ["pipe"],
        "none: cannot be read: No such file": ["none"],
        "cannot be read: Is a directory": [""],
    }.items():
        with pytest.raises(ValueError, match=f"^[^\n]*{says}[^\n]*$"):
            DISPLAY.prepare([tmp_path / name for name in names], tmp_path / "store")
        assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("begin", [b'0,"', b"0,"], ids=["open quote", "no line end"])
def test_endless_rows_are_refused_without_reading_all_of_them(tmp_path, monkeypatch, begin):
    monkeypatch.setattr(files, "BLOCK_BYTES", 1 << 16)
    rest = (b"0,a,2,3,4\n" if b'"' in begin else b"z" * 10) * (12 << 17)
    (tmp_path / "table").write_bytes(TABLE_HEAD + begin + rest)
    (tmp_path / "display").write_bytes(line() * 3 + b"x" * (12 << 20))
    del rest
    tracemalloc.start()
    try:
        for name in ("table", "display"):
            with pytest.raises(DataError, match="line 4: a row is longer than 2 MB"):
                FORMATS[name].prepare([tmp_path / name], tmp_path / "store")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_line_is_right_far_into_a_file_and_after_long_fields(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 1 << 17)
    rows = GOOD * 1_000 + b"0," + b"z" * 200_000 + b",2,3,4\n\n" + b"0,a,2,3,4\n" * 8_000
    (tmp_path / "t.csv").write_bytes(HEAD + rows + b"0,a,?,3,4\n")
    with pytest.raises(DataError, match=r"t\.csv, line 10004, column age: found"):
        read(TABLE, tmp_path / "t.csv")
    assert csv.field_size_limit() == 131_072


@pytest.mark.short("table", "parquet")
@pytest.mark.parametrize("kind", [*FORMATS, "parquet"])
def test_memory_is_that_of_a_few_blocks(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(files, "BLOCK_ROWS", 1 << 10)
    name = "table" if kind == "parquet" else kind
    rows = named(name, VALID[name][:2] * 20_000)
    text = as_parquet(rows) if kind == "parquet" else as_text(name, rows)
    (tmp_path / "f").write_bytes(text)
    before, most, blocks = pa.total_allocated_bytes(), 0, 0
    for _ in FORMATS[name].read(tmp_path / "f"):
        most = max(most, pa.total_allocated_bytes() - before)
        blocks += 1
    assert blocks > 10
    assert most < (3 << 20)


# --- Spans ---------------------------------------------------------------------------------------


@pytest.mark.long
@settings(deadline=None)
@given(
    rows=st.lists(st.sampled_from(["0", "1"]), min_size=1, max_size=9),
    span_bytes=st.integers(1, 400),
    ends=st.sampled_from(["", "\n", "\r\n"]),
)
def test_each_line_is_read_in_the_one_span_in_which_it_begins(
    tmp_path_factory, rows, span_bytes, ends
):
    path = tmp_path_factory.getbasetemp() / "spans"
    texts = ["\t".join([label, *VALID["display"][0][1:]]) for label in rows]
    content = ("\n".join(texts) + ends).encode()
    path.write_bytes(content)
    begins = [0, *(i + 1 for i, byte in enumerate(content) if byte == ord("\n"))][: len(rows)]
    for span in spans_of([path], span_bytes):
        opened = DISPLAY.encoded(DISPLAY.open(path, span=span))
        labels = [label for block in opened for label in block["label"].tolist()]
        expected = [
            int(label)
            for label, at in zip(rows, begins, strict=True)
            if span.begin <= at < span.end
        ]
        assert labels == expected


def test_gzip_file_is_one_span(tmp_path):
    (tmp_path / "f").write_bytes(gzip.compress(b"a\nb\n"))
    (tmp_path / "g").write_bytes(b"abcd")
    spans = spans_of([tmp_path / "f", tmp_path / "g"], 3)
    assert [(s.file, s.begin, s.end) for s in spans] == [(0, 0, None), (1, 0, 3), (1, 3, 6)]
    assert spans_of([tmp_path / "g"], None) == [Span(0, 0, str(tmp_path / "g"))]


# --- Values of every type ------------------------------------------------------------------------


DATE = datetime.date(2026, 1, 31)
SPELLED = [  # a column, and values of a type that stand for two texts
    ("y", pa.array([0, 1], pa.int8()), ["0", "1"]),
    ("y", pa.array([0, 1], pa.uint64()), ["0", "1"]),
    ("y", pa.array([0, 1], pa.decimal128(5, 2)), ["0", "1"]),
    ("y", pa.array([0.0, 1.0], pa.float16()), ["0", "1"]),
    ("y", pa.array([False, True]), ["0", "1"]),
    ("y", pa.array(["False", "TRUE"], pa.large_string()), ["0", "1"]),
    ("y", pa.array(["0.0", "true"]).dictionary_encode(), ["0", "1"]),
    ("y", pa.array([b"0", b"1"]), ["0", "1"]),
    ("city", pa.array([7, None], pa.uint8()), ["7", ""]),
    ("city", pa.array([True, None]), ["true", ""]),
    ("city", pa.array([DATE, None]), ["2026-01-31", ""]),
    ("city", pa.array([DATE, None], pa.date64()), ["2026-01-31", ""]),
    ("city", pa.array(["Zoë", None], pa.string_view()), ["Zoë", ""]),
    ("city", pa.array(["Zoë", ""], pa.large_string()), ["Zoë", ""]),
    ("city", pa.array(["Zoë".encode(), b""]), ["Zoë", ""]),
    ("city", pa.array([7, None]).dictionary_encode(), ["7", ""]),
    ("city", pa.nulls(2), ["", ""]),
    ("age", pa.nulls(2), ["", ""]),
    ("age", pa.array([12, None]), ["12", ""]),
    ("age", pa.array([0.5, math.nan]), ["0.5", ""]),
    ("age", pa.array([decimal.Decimal("2.5"), None]), ["2.5", ""]),
]


@pytest.mark.parametrize(("column", "values", "texts"), SPELLED, ids=range(len(SPELLED)))
def test_values_of_every_type_are_the_texts_of_a_csv_file(tmp_path, column, values, texts):
    base = {name: [row[name] for row in named("table", VALID["table"][:2])] for name in HEADER}
    sliced = pa.concat_arrays([values, values]).slice(2)
    blocks = []
    for found in (pa.array(texts), values, sliced):
        pq.write_table(pa.table(base | {column: found}), tmp_path / "t")
        blocks.append(read(TABLE, tmp_path / "t"))
        if column != "y":
            del blocks[-1]["label"]
            assert_same(TABLE.encode(base | {column: found}), blocks[-1])
    for block in blocks[1:]:
        assert_same(block, blocks[0])


def test_texts_under_nulls_are_not_read():
    whole = pa.array(["12", "Zug"])
    _, offsets, text = whole.buffers()
    masked = pa.Array.from_buffers(pa.string(), 2, [pa.py_buffer(b"\x01"), offsets, text])
    format = table_format(table_schema("y", categories=("c",)))
    assert_same(format.encode({"c": masked}), format.encode({"c": ["12", None]}))
    rows = {name: ["0000000a", None] for name in DISPLAY_ADS.categories}
    for values in (masked, [12, None]):
        got = DISPLAY.encode(rows | dict.fromkeys(DISPLAY_ADS.integers, values))
        assert got["integers_missing"].tolist() == [[False] * 13, [True] * 13]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()], ids=str)
def test_bytes_of_any_kind_may_be_categories(kind):
    format = table_format(table_schema("y", categories=("c",)))
    values = pa.array([b"Uri", b"\xff", None, b"\xfe"], kind)
    ids = format.encode({"c": values})["categories"].ravel().tolist()
    assert ids[0] == format.encode({"c": ["Uri"]})["categories"][0, 0]
    assert ids[2] == 0
    assert len({*ids}) == 4


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_numbers_in_memory_stand_for_their_digits(missing):
    def encoded(twelve, missing):
        hexadecimal = np.array(["0000000a", None], dtype=object)
        rows = {name: [twelve, missing] for name in DISPLAY_ADS.integers}
        return DISPLAY.encode(rows | dict.fromkeys(DISPLAY_ADS.categories, hexadecimal))

    expected = encoded("12", "")
    for twelve in (12, 12.0, np.int32(12), np.float32(12), b"12"):
        assert_same(encoded(twelve, missing), expected)


BAD_VALUES = [  # a format, a column, two values, the row of the bad one, and what is said of it
    ("display", "I2", ["1", "1\t2"], 1, r"found '1\t2', expected an integer"),
    ("display", "I2", ["1\n", "1"], 0, r"found '1\n'"),
    ("display", "I2", [1, 1.5], 1, "found 1.5"),
    ("display", "I2", [1, 10**18], 1, "found 1000000000000000000"),
    ("display", "I2", [True, False], None, "holds bool, expected an integer"),
    ("display", "I2", [1.0, math.inf], 1, "found inf"),
    ("display", "C1", ["", "xyz"], 1, "found 'xyz', expected eight hexadecimal"),
    ("display", "C1", [12345678] * 2, None, "holds int64, expected eight"),
    ("display", "C26", [["05db9164"]] * 2, None, "holds list"),
    ("search", "partner_id", [17.0] * 2, None, "holds double, expected texts, integers, booleans"),
    ("table", "age", [1.0, math.inf], 1, "found inf, expected a finite number"),
    ("table", "age", [b"1", b"\xff"], None, "holds binary"),
    ("table", "age", [True, False], None, "holds bool, expected numbers"),
    ("table", "age", [DATE] * 2, None, "holds date32"),
    ("table", "visits", ["1", "b"], 1, "found 'b', expected a finite number"),
    ("table", "n", [1.0, 2.0], None, "holds double, expected texts"),
    ("table", "n", [decimal.Decimal(1)] * 2, None, "holds decimal"),
    ("table", "city", [datetime.datetime(2026, 1, 1)] * 2, None, "holds timestamp"),
    ("table", "y", [1, 2], 1, "found 2, expected 0 or 1"),
    ("table", "y", [0, None], 1, "found nothing, expected 0 or 1"),
    ("table", "y", [math.nan, 0], 0, "found nan, expected 0 or 1"),
    ("table", "y", ["1", "yes"], 1, "found 'yes', expected 0 or 1"),
    ("table", "y", [None, None], 0, "found nothing"),
    ("table", "y", [[1], [0]], None, "holds list"),
    # These no file holds.
    ("search", "partner_id", ["a", "\ud800"], "memory", "expected values of one type"),
    ("table", "city", [1, "a"], "memory", "expected values of one type"),
]


@pytest.mark.parametrize(("name", "column", "values", "row", "says"), BAD_VALUES)
def test_values_that_do_not_fit_are_named_by_row_and_column(
    tmp_path, name, column, values, row, says
):
    rows = named(name, VALID[name][:2])
    columns = {x: [row[x] for row in rows] for x in rows[0]}
    bad, has_row = columns | {column: values}, isinstance(row, int)
    if column != "y":
        place = f"row {row}, " * has_row
        with pytest.raises(ValueError, match=f"^{place}column {column}: {re.escape(says)}"):
            FORMATS[name].encode(bad)
    if row != "memory":
        pq.write_table(pa.table(bad), tmp_path / "t.parquet")
        place = f"row {row + 1}, " if has_row else ""
        with pytest.raises(
            DataError, match=f"/t.parquet, {place}column {column}: {re.escape(says)}"
        ):
            read(FORMATS[name], tmp_path / "t.parquet")


@each_format
def test_rows_in_memory_have_all_features_and_one_length(name):
    columns = {x: [row[x] for row in named(name, VALID[name][:2])] for x in names_of(name)}
    column = FORMATS[name].features[-1]
    assert len(FORMATS[name].encode({**columns, "anything": []})["categories"]) == 2
    with pytest.raises(ValueError, match=f"must have equal lengths: .*{column} has 1"):
        FORMATS[name].encode(columns | {column: columns[column][:1]})
    del columns[column]
    with pytest.raises(ValueError, match=f"rows have no column {column}; add it$"):
        FORMATS[name].encode(columns)


# --- Tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["random", "chronological"])
def test_several_files_in_any_format_are_one_table_to_the_bit(tmp_path, order, monkeypatch):
    rows = [{**named("table", VALID["table"])[i % 3], "visits": str(i)} for i in range(300)]
    for path, content in {
        "whole.csv": as_text("table", rows),
        "1.csv": as_text("table", rows[:80]),
        "empty.csv": as_text("table", []),
        "2": gzip.compress(as_text("table", rows[80:81], delimiter="\t", names=HEADER[::-1])),
        "3.parquet": as_parquet(rows[81:], dictionary=True),
    }.items():
        (tmp_path / path).write_bytes(content)
    whole, *parts = (tmp_path / x for x in ("whole.csv", "1.csv", "empty.csv", "2", "3.parquet"))
    format = dataclasses.replace(TABLE, split=Split(order, (0.7, 0.2, 0.1)))
    one = format.prepare([whole], tmp_path / "one")
    monkeypatch.setattr(files, "BLOCK_BYTES", 512)
    monkeypatch.setattr(files, "BLOCK_ROWS", 7)
    seen = []
    several = format.prepare(parts, tmp_path / "several", progress=seen.append)
    assert (one.sha256, one.splits) == (several.sha256, several.splits)
    assert seen == sorted(set(seen))
    assert (len(seen) > 10, seen[-1]) == (True, 300)
    assert several.source == {"format": "table", "files": [path.name for path in parts]}
    assert format.left_out([format.open(path) for path in parts]) == ("note",)
    several.verify()
    expected = slow_columns(rows, TABLE)
    ranges = {"train": (0, 210), "validation": (210, 270), "test": (270, 300)}
    by_split = random_split(expected, 0, (0.7, 0.2, 0.1)) if order == "random" else {
        split: {name: x[a:b] for name, x in expected.items()} for split, (a, b) in ranges.items()
    }  # fmt: skip
    for split, columns in by_split.items():
        assert_same(several.load(split), columns)
    with pytest.raises(StoreError, match="exists already"):
        format.prepare([whole], tmp_path / "one", progress=pytest.fail)


def test_columns_that_are_not_named_are_not_read(tmp_path):
    lines = as_text("table", named("table", VALID["table"][:1] * 40)).splitlines()
    more = [b"z,z", *[b"\xff,", b'"a\nb""",nan'] * 20]
    wide = [b"%b,%b" % pair for pair in zip(lines, more, strict=True)]
    stores = []
    for name, content in {"plain": lines, "wide": wide}.items():
        (tmp_path / name).write_bytes(b"\n".join(content))
        stores.append(TABLE.prepare([tmp_path / name], tmp_path / f"{name} store"))
    assert stores[0].sha256 == stores[1].sha256
    assert TABLE.left_out([TABLE.open(tmp_path / "wide")]) == ("note", "z")
    (tmp_path / "narrow").write_bytes(b"y,city,n\n")
    with pytest.raises(DataError, match="narrow: has no column age, visits; it has y, city, n, "):
        TABLE.prepare(
            [tmp_path / "plain", tmp_path / "narrow"], tmp_path / "s", progress=pytest.fail
        )


def test_numbers_may_be_untransformed_and_words_may_be_missing(tmp_path):
    schema = table_schema(
        "y", categories=("c",), numbers=("x",), transform="none", missing=("NA", "?")
    )
    path = tmp_path / "t.csv"
    path.write_text("y,c,x\n1,NA,-2.5\n0,?, 1e3 \n1,na,?\n0,x,NA\n")
    columns = read(table_format(schema), path)
    assert columns["integers"].tolist() == [[-2.5], [1000], [0], [0]]
    assert columns["integers_missing"].tolist() == [[False], [False], [True], [True]]
    assert (columns["categories"] == 0).ravel().tolist() == [True, True, False, False]
    path.write_text("y,c,x\n1,a,3.5e38\n")
    with pytest.raises(DataError, match=r"line 2, column x: found '3.5e38', .* at most 3.4e\+38"):
        read(table_format(schema), path)


def test_declared_values_and_classes_are_numbered_by_their_order(tmp_path):
    values = {"sex": ("Male", "Female"), "n": ("1", "7", "3")}
    names = ("sex", "city", "n")
    declared = {"values": values, "classes": ("1", "0"), "missing": ("?",)}
    schema = table_schema("y", categories=names, buckets=(64,), **declared)
    assert schema.table_sizes(2) == (3, 3, 4)  # declared values are not folded
    rows = {
        "sex": ["Female", "male", "", "?", None, "Male"],
        "city": ["a", "b", "", "?", None, "a"],
        "n": [3, 1, 2, None, 7, -1],
    }
    ids = [[2, 0, 0, 0, 0, 1], [3, 1, 0, 0, 2, 0]]
    table = table_format(schema).encode(rows)
    assert table["categories"][:, ::2].T.tolist() == ids
    assert schema.fold(table["categories"], 1)[:, ::2].T.tolist() == ids
    plain = table_format(table_schema("y", categories=names, buckets=(64,), missing=("?",)))
    np.testing.assert_array_equal(table["categories"][:, 1], plain.encode(rows)["categories"][:, 1])
    columns = {name: pa.array(rows[name]) for name in names} | {"y": pa.array([0, 1] * 3)}
    columns["sex"] = columns["sex"].dictionary_encode()
    pq.write_table(pa.table(columns), tmp_path / "p")
    columns = read(table_format(schema), tmp_path / "p")
    assert columns["categories"][:, ::2].T.tolist() == ids
    assert columns["label"].tolist() == [1, 0] * 3


A, C = {"numbers": ("a",)}, {"categories": ("a",)}
ENDS = ((1, 0), (0,), (0, math.inf), (0, math.nan), (-3e38, 3.5e38), (1e8, 1e8 + 1))
REFUSED = {
    "no columns to learn from": [{}],
    "y: name each column once": [{"categories": ("y",)}, A | {"user": "y"}],
    "a: name each column once": [A | C, {"numbers": ("a", "a")}],
    "needs 1 number or 3, one per category": [{"categories": ("a", "b", "c"), "buckets": (8, 8)}],
    "bucket count of a must be a power of two": [C | {"buckets": (size,)} for size in (0, 12)],
    "needs two or more distinct texts": [
        C | {"classes": classes} for classes in (("b",), ("b", "b"), ("b", ""), ("b", "c", "b"))
    ],
    "label bounds .*: expected LOW:HIGH": [C | {"label_bounds": ends} for ends in ENDS],
    "both declared classes and bounds": [A | {"label_bounds": (0, 1), "classes": ("a", "b")}],
    "bounds: b must be among --numbers": [A | {"bounds": {"b": (0, 1)}}],
    "a=1:0: bounds are LOW:HIGH": [A | {"bounds": {"a": (1, 0)}}],
    "bounds of a become .* in float32.* give others$": [A | {"bounds": {"a": (1e8, 1e8 + 1)}}],
    "bounds of a become .* or use --transform log1p": [
        A | {"bounds": {"a": (0, 1e39)}, "transform": transform} for transform in ("both", "none")
    ],
    "values: b must be among --categories": [C | {"values": {"b": ("x",)}}],
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


def test_schema_without_a_format_is_refused():
    assert format_of(DISPLAY_ADS).schema is DISPLAY_ADS
    with pytest.raises(ValueError, match="raw files of 'other' cannot be read"):
        format_of(Schema("other", ("x",), (), ()))
    with pytest.raises(ValueError, match="criteo-search files have no column colour"):
        format_of(Schema("criteo-search", (), ("colour",), (1024,)))
