"""Raw files are read as a slow reader reads them, or refused by file, line and column."""

import dataclasses
import gzip
import itertools
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from experiments.tasks.clicks.criteo import display, search
from experiments.tasks.clicks.encoding import ColumnError
from experiments.tasks.clicks.formats import format_of
from experiments.tasks.clicks.raw.files import DataError, byte_ranges, lines_of
from experiments.tasks.clicks.raw.kinds import Hexadecimal, HourOfWeek, Integer, Label
from experiments.tasks.clicks.schema import (
    DISPLAY_ADS,
    SEARCH_OUTCOMES,
    SPONSORED_SEARCH,
    Schema,
    sponsored_search,
)
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.splits import joined, random_split
from tests.experiments.tasks.clicks.slow import (
    GOLDEN,
    WORD,
    assert_same,
    edited,
    slow_columns,
    split_mix,
    text_hash,
)

ROOT = Path(__file__).resolve().parents[4]
FORMATS = {"display": display.FORMAT, "search": search.FORMAT}
OUTCOMES = ["Sale", "SalesAmountInEuro", "time_delay_for_conversion", "product_price"]
HASH = "4C90FD52FC53D2C1C205844CB69575AB"
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
}  # fmt: skip
each_format = pytest.mark.parametrize("name", FORMATS)


# --- A slow reader, which shares no line with the fast one ---------------------------------------


class Refused(Exception):
    """Raised by the slow reader: the line, and the column if one is at fault."""


def pattern(column: str) -> str:
    if column in ("label", "Sale"):
        return "[01]"
    if re.fullmatch("I[0-9]+|click_timestamp|nb_clicks_1week", column):
        return "(-?[0-9]{1,18})?"
    return "([0-9a-fA-F]{8})?" if re.fullmatch("C[0-9]+", column) else "[ -~]*"


def value(column: str, field: str) -> int | None:
    """Return the number that stands for the field of a feature, None if it is missing."""
    if field == "" or (len(column) > 3 and field == "-1"):
        return None
    if column[0] == "I":
        return int(field)
    if column[0] == "C":
        return int(field, 16)
    if column == "click_timestamp":
        return None if int(field) == -1 else int(field) // 3600 % 168
    if column == "nb_clicks_1week":
        return None if int(field) == -1 else int(field) & WORD
    if column == "SalesAmountInEuro" and field == "-1.0":
        return None
    return text_hash(field.encode())


def slow_read(data: bytes, columns: list[str]) -> list[dict[str, str]]:
    """Return the rows of a file."""
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error):
            raise Refused("gzip") from None
    lines = data.split(b"\n")
    while lines and not lines[-1].strip(b"\r"):
        lines.pop()
    if not lines:
        raise Refused(None, None)
    rows = []
    for number, line in enumerate(lines, start=1):
        line = line[:-1] if line.endswith(b"\r") else line
        try:
            fields = line.decode().split("\t")
        except UnicodeDecodeError:
            raise Refused(number, None) from None
        if len(fields) != len(columns):
            raise Refused(number, None)
        for name, field in zip(columns, fields, strict=True):
            if not re.fullmatch(pattern(name), field):
                raise Refused(number, name)
        rows.append(dict(zip(columns, fields, strict=True)))
    return rows


def assert_columns_are(columns, rows, schema, label=None, hash_seed=0):
    """Compares the columns of a store with those of the slow reader's rows."""
    assert_same(columns, slow_columns(rows, schema, value, label, hash_seed))


def write(path, rows, end="\n"):
    path.write_text("".join("\t".join(row) + end for row in rows))
    return path


# --- Valid files ---------------------------------------------------------------------------------

integers = st.one_of(
    st.sampled_from(["", "-0", "-1"]),
    st.integers(-(10**18) + 1, 10**18 - 1).map(str),
    st.integers(0, 10**9).map("{:018d}".format),
)
words = st.integers(0, 2**32 - 1)
FIELDS = {
    "[01]": st.sampled_from("01"),
    "(-?[0-9]{1,18})?": integers,
    "([0-9a-fA-F]{8})?": st.one_of(st.just(""), *(words.map(f"{{:08{x}}}".format) for x in "xX")),
    "[ -~]*": st.one_of(
        st.sampled_from(["", "-1", "-1.0", "0", HASH]),
        st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40),
    ),
}  # fmt: skip


@each_format
@settings(max_examples=settings().max_examples // 2)
@given(
    data=st.data(),
    ends=st.tuples(st.sampled_from(["\n", "\r\n"]), st.sampled_from(["", "\n", "\n\n", "\r\n\n"])),
    hash_seed=st.integers(0, 2**64 - 1),
    block_bytes=st.integers(1, 3000),
)
def test_a_valid_file_and_a_table_of_its_rows_are_read_as_the_slow_reader_reads_them(
    tmp_path_factory, name, data, ends, hash_seed, block_bytes
):
    format = dataclasses.replace(FORMATS[name], hash_seed=hash_seed)
    path = tmp_path_factory.getbasetemp() / "valid.txt"
    names = [*format.columns]
    fields = st.tuples(*[FIELDS[pattern(column)] for column in names])
    rows = data.draw(st.lists(fields, min_size=1, max_size=6))
    text = (ends[0].join(map("\t".join, rows)) + ends[1]).encode()
    path.write_bytes(text)
    expected = slow_read(text, names)
    got = joined(format.read(path, block_bytes=block_bytes))
    assert_columns_are(got, expected, format.schema, format.label, hash_seed)
    table = {column: [row[column] for row in expected] for column in names}
    assert_columns_are(format.encode(table), expected, format.schema, None, hash_seed)


@pytest.mark.parametrize(
    ("name", "absent"),
    [("display", 0), ("display", 1), ("search", 0), ("search", 1), ("search", 3), ("search", 4)],
)
def test_a_file_without_labels_is_read_for_its_features(tmp_path, name, absent):
    format, names = FORMATS[name], [*FORMATS[name].columns]
    left_out = OUTCOMES[:absent] if name == "search" else names[:absent]
    rows = [dict(zip(names, row, strict=True)) for row in VALID[name]]
    kept = [[row[column] for column in names if column not in left_out] for row in rows]
    got = joined(format.read(write(tmp_path / "new", kept), labelled=False))
    assert_columns_are(got, rows, format.schema)


def test_outcomes_change_nothing_unless_they_are_asked_for(tmp_path):
    """Rows that differ in sales amount, delay and price alone are one row to the model."""
    rows = [[row[0], *outcomes, *row[3:5], price, *row[6:]]
            for row in VALID["search"][:1]
            for *outcomes, price in [("-1.0", "-1", "0.0"), ("20.5", "3600", "19.99")]]  # fmt: skip
    path = write(tmp_path / "log", rows)
    ids = joined(search.FORMAT.read(path))["categories"]
    np.testing.assert_array_equal(ids[0], ids[1])
    included = format_of(sponsored_search(tuple(SEARCH_OUTCOMES)))
    block = joined(included.read(path))
    named = [dict(zip(search.FORMAT.columns, row, strict=True)) for row in rows]
    assert_columns_are(block, named, included.schema, "Sale")
    np.testing.assert_array_equal(block["categories"][:, : ids.shape[1]], ids)
    assert (block["categories"][0, ids.shape[1] :] != block["categories"][1, ids.shape[1] :]).all()


def test_real_rows_of_the_search_log_are_read(real_search_rows):
    rows = slow_read(real_search_rows.read_bytes(), [*search.FORMAT.columns])
    assert_columns_are(joined(search.FORMAT.read(real_search_rows)), rows, SPONSORED_SEARCH, "Sale")


def test_real_rows_are_read_whole(real_criteo_rows, tmp_path):
    """Counts and missing rates taken from the file with other tools."""
    store = display.prepare(real_criteo_rows, tmp_path / "s")
    columns = joined(store.load(split) for split in store.splits)
    assert store.num_rows == 110_000
    assert columns["label"].sum() == 28_243
    missing = columns["integers_missing"].mean(axis=0).round(4)
    assert missing[[0, 1, 2, 11]].tolist() == [0.4533, 0.0, 0.2113, 0.7685]
    absent = (columns["categories"] == 0).mean(axis=0).round(4)
    assert absent[[0, 2, 5, 18, 21]].tolist() == [0.0, 0.035, 0.1233, 0.4406, 0.7606]
    distinct = [len(np.unique(columns["categories"][:, j])) for j in (8, 16, 19)]
    assert distinct == [3, 10, 4]
    with gzip.open(real_criteo_rows, "rb") as file:
        head = b"".join(file.readline() for _ in range(2000))
    rows = slow_read(head, [*display.FORMAT.columns])
    assert_columns_are({k: v[:2000] for k, v in columns.items()}, rows, DISPLAY_ADS, "label")


# --- Other files ---------------------------------------------------------------------------------

mutations = st.lists(
    st.tuples(
        st.sampled_from(["put", "insert", "delete", "cut", "double"]),
        st.floats(0, 1),
        st.one_of(st.integers(0, 255), st.sampled_from(b'\t\n\r-09afAFgG :/@`\xff\x00"+')),
    ),
    max_size=3,
)


def mutate(data: bytes, changes) -> bytes:
    for change in changes:
        data = edited(data, *change)
    return data


@each_format
@settings(max_examples=2 * settings().max_examples)
@given(
    rows=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    code=st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16"]),
    changes=mutations,
    zipped=st.one_of(st.none(), st.none(), mutations),
    block_bytes=st.sampled_from([1, 50, 333, 1 << 22]),
)
@example([0, 1], "\n", "utf-8", [("insert", 0.0, 10)], None, 1)
def test_every_mutated_file_is_read_right_or_refused_at_the_right_place(
    tmp_path_factory, name, rows, line_end, code, changes, zipped, block_bytes
):
    format, path = FORMATS[name], tmp_path_factory.getbasetemp() / "mutated.txt"
    text = "".join("\t".join(VALID[name][row]) + line_end for row in rows)
    data = mutate(text.encode(code), changes)
    if zipped is not None:
        data = mutate(gzip.compress(data, mtime=0), zipped)
    path.write_bytes(data)
    try:
        expected, place = slow_read(data, [*format.columns]), None
    except Refused as refused:
        expected, place = None, refused.args
    if place is None:
        got = joined(format.read(path, block_bytes=block_bytes))
        assert_columns_are(got, expected, format.schema, format.label)
        return
    with pytest.raises(DataError) as caught:
        joined(format.read(path, block_bytes=block_bytes))
    assert place == ("gzip",) or (caught.value.line, caught.value.column) == place
    assert str(caught.value).isprintable()  # one line, no control characters


SEEDS = [b"00000000", b"19afAF5c", b"-1234567", b"9" * 18, b"-" + b"9" * 18, b"-1.0", b"1"]


@pytest.mark.parametrize("kind", [Label(), Integer(missing=-1), HourOfWeek(), Hexadecimal()])
def test_a_column_is_decoded_if_and_only_if_each_field_is_of_its_kind(kind):
    """Every byte in every place."""
    for good in SEEDS:
        for i, c in itertools.product(range(len(good)), range(256)):
            field = good[:i] + bytes([c]) + good[i + 1 :]
            column = pa.array([field], pa.binary()).view(pa.string())
            try:
                values, missing = kind.decode(column, "x")
            except ColumnError:
                assert not kind.pattern.fullmatch(field), field
                continue
            assert kind.pattern.fullmatch(field), field
            assert not missing or (isinstance(kind, Integer) and int(field) == -1)
            if not isinstance(kind, HourOfWeek):
                assert values == int(field, 16 if isinstance(kind, Hexadecimal) else 10)


def line(name="display", **fields) -> bytes:
    names = [*FORMATS[name].columns]
    return "\t".join((dict(zip(names, VALID[name][0], strict=True)) | fields).values()).encode()


@pytest.mark.parametrize(
    ("name", "bad", "column", "says"),
    [
        ("display", line(C3="xyz"), "C3", "found 'xyz', expected eight hexadecimal digits"),
        ("display", line(I1="1.5"), "I1", "found '1.5', expected an integer of at most 18 digits"),
        ("display", line(label=""), "label", "found '', expected 0 or 1"),
        ("display", line(label="\ufeff0"), "label", r"found '\ufeff0', expected 0 or 1"),
        ("display", line(C4="a" * 500), "C4", "aaaa...', expected eight"),
        ("display", line() + b"\t", None, "found 41 columns, expected 40 separated by tabs"),
        ("display", line()[2:], None, "found 39 columns, expected 40 separated by tabs"),
        ("display", line()[2:], None, "unlabelled test file"),
        ("display", line(C5="caf\xe9").decode().encode("latin-1"), None, "byte 0xe9 at position"),
        ("display", b"", None, "a blank line between rows, expected 40 columns"),
        ("display", line() + b"\r\r", "C26", r"found '00000019\r', expected eight hexadecimal"),
        ("search", line("search", click_timestamp="2020-08-03"), "click_timestamp", "a time in s"),
        ("search", line("search", user_id="caf\u00e9"), "user_id", "expected printable ASCII text"),
        ("search", line("search", product_brand="a\rb"), "product_brand", r"found 'a\rb', exp"),
    ],
)  # fmt: skip
def test_bad_lines_are_named_by_file_line_and_column(tmp_path, name, bad, column, says):
    path, good = tmp_path / "rows.txt", line(name) + b"\n"
    for before, block_bytes in ((0, 1000), (37, 1000), (37, 1 << 22)):
        path.write_bytes(good * before + bad + b"\n" + good * 3 + line(name)[1:] + b"\n")
        with pytest.raises(DataError) as caught:
            joined(FORMATS[name].read(path, block_bytes=block_bytes))
        message = str(caught.value)
        place = f"{path}, line {before + 1}" + (f", column {column}" if column else "")
        assert message.startswith(f"{place}: ")
        assert says in message
        assert message.isprintable()
        assert len(message) < 300 + len(str(path))


@pytest.mark.parametrize("content", [b"\n", b"\r\n\r\n"])
def test_a_file_without_rows_is_empty(tmp_path, content):
    (tmp_path / "train.txt").write_bytes(content)
    with pytest.raises(DataError, match="is empty; expected lines of 40 columns"):
        display.prepare(tmp_path / "train.txt", tmp_path / "store")


@pytest.mark.parametrize("block_bytes", [1 << 16, 1 << 22])
def test_the_first_fault_is_named_though_a_line_without_end_follows(tmp_path, block_bytes):
    good, endless = line() + b"\n", b"x" * (6 << 20)
    cases = [
        (good + endless, 2, "longer than 1048576 bytes"),
        (good + b"bad\n" + endless, 2, "found 1 column"),
        (good + b"\n\n" + endless, 2, "a blank line between rows"),
        (endless, 1, "longer than 1048576 bytes"),
    ]
    for content, number, says in cases:
        (tmp_path / "f").write_bytes(content)
        with pytest.raises(DataError, match=says) as caught:
            joined(display.read(tmp_path / "f", block_bytes=block_bytes))
        assert caught.value.line == number


def test_a_file_without_a_feature_of_the_model_is_refused_with_what_it_may_hold(tmp_path):
    with_price = format_of(sponsored_search(("product_price",)))
    rows = [dict(zip(search.FORMAT.columns, row, strict=True)) for row in VALID["search"]]
    path = write(tmp_path / "new", [[r[n] for n in r if n not in OUTCOMES] for r in rows])
    expected = r"new, line 1: found 19 columns, expected 23 .*; or 22: .*; or 20: time, clicks, "
    with pytest.raises(DataError, match=expected):
        joined(with_price.read(path, labelled=False))
    rows = [VALID["display"][0][1:], VALID["display"][1]]
    path = write(tmp_path / "test.txt", rows)
    with pytest.raises(DataError, match=r"line 2: found 40 columns, expected 39 .*: I1-I13, C1"):
        joined(display.read(path, labelled=False))
    short = write(tmp_path / "short", [row[2:] for row in VALID["display"]])
    with pytest.raises(DataError, match=r"line 1: found 38 columns, .*; or 39: I1-I13, C1-C26$"):
        joined(display.read(short, labelled=False))


@each_format
def test_the_file_of_another_data_set_is_refused_in_one_line(tmp_path, name):
    (other,) = FORMATS.keys() - {name}
    path = write(tmp_path / "f", VALID[other])
    with pytest.raises(DataError, match=r"f, line 1: found \d+ columns, expected") as caught:
        FORMATS[name].prepare(path, tmp_path / "store")
    assert "\n" not in str(caught.value)


# --- Ranges of bytes -----------------------------------------------------------------------------


def texts(path, range_bytes, block_bytes):
    """Returns the blocks of lines of each range."""
    found = []
    for span in byte_ranges([path], range_bytes):
        number = 1
        found.append([])
        for text, first, count in lines_of(span, "raw file", block_bytes):
            assert (first, count) == (number, 1 if text is None else text.count(b"\n"))
            number += count
            found[-1].append(text)
    return found


@settings(deadline=None)
@given(
    lines=st.lists(st.text("a\t\r", max_size=9).map(str.encode), min_size=1, max_size=9),
    ends=st.booleans(),
    range_bytes=st.integers(1, 30),
    block=st.integers(1, 40),
)
def test_every_line_lies_in_the_one_range_in_which_it_begins(
    tmp_path_factory, lines, ends, range_bytes, block
):
    path, content = tmp_path_factory.getbasetemp() / "ranges", b"\n".join(lines) + b"\n" * ends
    path.write_bytes(content)
    whole = content if content.endswith(b"\n") or not content else content + b"\n"
    found = texts(path, range_bytes, block)
    assert b"".join(text for own in found for text in own) == whole
    begins = {0, *(i + 1 for i, byte in enumerate(content) if byte == ord("\n"))}
    for number, own in enumerate(found):
        span = range(number * range_bytes, min((number + 1) * range_bytes, len(content)))
        assert sum(text.count(b"\n") for text in own) == len(begins & set(span))


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("range_bytes", [1, 7, 1000])
@pytest.mark.parametrize("block", [2, 1000])
def test_a_line_longer_than_any_row_is_named_and_the_lines_after_it_are_read(
    tmp_path, monkeypatch, compress, range_bytes, block
):
    monkeypatch.setattr("experiments.tasks.clicks.raw.files.MAX_LINE_BYTES", 5)
    (tmp_path / "f").write_bytes(compress(b"a\n" + b"x" * 2000 + b"\nb\nc"))
    found = [text for own in texts(tmp_path / "f", range_bytes, block) for text in own]
    if block == 2:  # a line that lies in one block whole is no danger to memory
        assert found.count(None) == 1
        at = found.index(None)
        assert (b"".join(found[:at]), b"".join(found[at + 1 :])) == (b"a\n", b"b\nc\n")


# --- The store that comes out --------------------------------------------------------------------


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(tmp_path):
    """Really full, as far as the process can tell: the kernel refuses files past 1 MB."""
    synthetic.write_raw(tmp_path / "train.txt", 20_000, 1)
    program = f"""
import resource, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from experiments.tasks.clicks.criteo.display import prepare
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
try:
    prepare({str(tmp_path / "train.txt")!r}, {str(tmp_path / "s")!r})
except ValueError as error:
    sys.exit(str(error))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert re.fullmatch(r".*/s cannot be written: the disk is full \(.*\).*\n", done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["train.txt"]


# --- Schemas, splits, and rows in memory ---------------------------------------------------------


def test_only_outcomes_can_be_included_and_each_once():
    for include in (("Sale",), ("user_id",), ("product_price", "product_price")):
        with pytest.raises(ValueError, match="can include each of SalesAmountInEuro, "):
            sponsored_search(include)


def test_every_column_is_a_feature_an_outcome_or_the_label_and_buckets_fit_the_cardinalities():
    names = [*search.FORMAT.columns]
    assert sorted(names) == sorted([*SPONSORED_SEARCH.categories, *SEARCH_OUTCOMES, "Sale"])
    assert SPONSORED_SEARCH.integers == ()
    assert all(b & (b - 1) == 0 and b <= 1 << 20 for b in SPONSORED_SEARCH.buckets)
    assert names[:6] == [*OUTCOMES[:3], "click_timestamp", "nb_clicks_1week", OUTCOMES[3]]
    assert names[-3:] == ["product_title", "partner_id", "user_id"]


def test_a_schema_without_a_raw_format_is_refused():
    assert format_of(DISPLAY_ADS).schema is DISPLAY_ADS
    with pytest.raises(ValueError, match="'other' have no raw format"):
        format_of(Schema("other", ("x",), (), ()))
    with pytest.raises(ValueError, match="criteo-search files have no column colour"):
        format_of(Schema("criteo-search", (), ("colour",), (1024,)))


def test_the_random_split_keeps_order_depends_on_row_numbers_alone_and_is_80_10_10():
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


def table(name, **changes):
    columns = zip(FORMATS[name].columns, map(list, zip(*VALID[name], strict=True)), strict=True)
    return dict(columns) | changes


@pytest.mark.parametrize("missing", [None, float("nan"), np.float32("nan"), ""])
def test_numbers_stand_for_their_digits_and_what_is_missing_for_nothing(missing):
    integers, categories = DISPLAY_ADS.integers, DISPLAY_ADS.categories

    def rows(twelve, missing):
        hexadecimal = np.array(["0000000a", missing], dtype=object)
        return {name: [twelve, missing] for name in integers} | dict.fromkeys(
            categories, hexadecimal
        )

    expected = display.FORMAT.encode(rows("12", ""))
    for twelve in (12, 12.0, np.int32(12), np.float32(12), b"12"):
        for name, column in display.FORMAT.encode(rows(twelve, missing)).items():
            np.testing.assert_array_equal(column, expected[name])


@pytest.mark.parametrize(
    ("name", "column", "value", "says"),
    [
        ("display", "I2", "1\t2", r"row 1, column I2: found '1\\t2', expected an integer"),
        ("display", "I2", "1\n2", r"row 1, column I2: found '1\\n2'"),
        ("display", "I2", 1.5, "row 1, column I2: found 1.5"),
        ("display", "I2", 10**18, "row 1, column I2: found 1000000000000000000"),
        ("display", "I2", True, "row 1, column I2: found True"),
        ("display", "I2", float("inf"), "row 1, column I2: found inf"),
        ("display", "C1", "xyz", "row 1, column C1: found 'xyz', expected eight hexadecimal"),
        ("display", "C1", 12345678, "row 1, column C1: found 12345678, expected eight"),
        ("display", "C26", ["05db9164"], "row 1, column C26: found "),
        ("search", "partner_id", 17.0, r"row 1, column partner_id: found 17\.0, expected"),
        ("search", "partner_id", "\ud800", "row 1, column partner_id: found "),
    ],
)
def test_a_value_that_no_file_holds_is_refused_with_its_row_and_column(name, column, value, says):
    rows = table(name)
    rows[column][1] = value
    with pytest.raises(ValueError, match=says):
        FORMATS[name].encode(rows)
