"""The reader of the Kaggle format agrees with a slow one, and says exactly what is wrong, where."""

import gzip
import math
import re
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from experiments.tasks.clicks.criteo.display import FORMAT, prepare, read
from experiments.tasks.clicks.raw import fields as kinds
from experiments.tasks.clicks.raw.files import DataError
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.store import Store, StoreError
from experiments.tasks.clicks.synthetic import rows as synthetic

COLUMN_NAMES = tuple(FORMAT.columns)
ROOT = Path(__file__).resolve().parents[4]


# --- A slow reader, which shares no line with the fast one ---------------------------------------


class Refused(Exception):
    """Raised by the slow reader: the line, and the column if one is at fault."""

    def __init__(self, line, column):
        self.place = line, column


def slow_read(data: bytes):
    """Return the rows of `data` as (label, 13 integers or None, 26 words or None)."""
    lines = data.split(b"\n")
    while lines and not lines[-1].strip(b"\r"):
        lines.pop()
    if not lines:
        raise Refused(None, None)
    rows = []
    for number, line in enumerate(lines, start=1):
        line = line[:-1] if line.endswith(b"\r") else line
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise Refused(number, None) from None
        fields = text.split("\t")
        if len(fields) != 40:
            raise Refused(number, None)
        for name, field in zip(COLUMN_NAMES, fields, strict=True):
            pattern = {"l": "[01]", "I": "(-?[0-9]{1,18})?", "C": "([0-9a-fA-F]{8})?"}[name[0]]
            if not re.fullmatch(pattern, field):
                raise Refused(number, name)
        integers = [int(f) if f else None for f in fields[1:14]]
        rows.append((int(fields[0]), integers, [int(f, 16) if f else None for f in fields[14:]]))
    return rows


def assert_columns_are(columns, rows, hash_seed=0):
    label, integers, missing, categories = (
        columns[k] for k in ("label", "integers", "integers_missing", "categories")
    )
    assert [a.dtype for a in columns.values()] == [np.uint8, np.float32, bool, np.int32]
    assert label.tolist() == [row[0] for row in rows]
    assert missing.tolist() == [[x is None for x in row[1]] for row in rows]
    expected = [[math.copysign(math.log1p(abs(x or 0)), x or 0) for x in row[1]] for row in rows]
    np.testing.assert_array_max_ulp(integers, np.array(expected, dtype=np.float32), maxulp=1)
    for j, ids in enumerate(categories.T):
        words = [row[2][j] for row in rows]
        known = np.array([w or 0 for w in words], dtype=np.uint64)
        hashed = DISPLAY_ADS.hash(known, j, hash_seed)
        hashed[[w is None for w in words]] = 0
        np.testing.assert_array_equal(ids, hashed)


def read_all(path, **options):
    blocks = list(read(path, **options))
    return {name: np.concatenate([b[name] for b in blocks]) for name in blocks[0]}


integer_fields = st.one_of(
    st.just(""),
    st.integers(-3, 100).map(str),
    st.integers(-(10**18) + 1, 10**18 - 1).map(str),
    st.integers(0, 10**9).map(lambda x: f"{x:09d}"),
    st.just("-0"),
)
hex_fields = st.one_of(
    st.just(""),
    st.integers(0, 2**32 - 1).map(lambda x: f"{x:08x}"),
    st.integers(0, 2**32 - 1).map(lambda x: f"{x:08X}"),
)
lines = st.tuples(
    st.sampled_from("01"),
    st.lists(integer_fields, min_size=13, max_size=13),
    st.lists(hex_fields, min_size=26, max_size=26),
).map(lambda row: "\t".join((row[0], *row[1], *row[2])))


@given(
    st.lists(lines, min_size=1, max_size=8),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(["", "\n", "\n\n", "\r\n\n"]),
    st.integers(0, 2**64 - 1),
    st.integers(1, 3000),
)
def test_every_valid_file_is_read_as_the_slow_reader_reads_it(
    tmp_path_factory, rows, line_end, end, hash_seed, block_bytes
):
    path = tmp_path_factory.getbasetemp() / "valid.txt"
    data = (line_end.join(rows) + end).encode()
    path.write_bytes(data)
    columns = read_all(path, hash_seed=hash_seed, block_bytes=block_bytes)
    assert_columns_are(columns, slow_read(data), hash_seed)


VALID = [
    "0\t1\t-1\t\t4\t55555\t666\t7\t8\t9\t\t11\t\t13\t" + "\t".join(f"{i:08x}" for i in range(26)),
    "1" + "\t" * 39,
    "0" + "\t0" * 13 + "\tdeadbeef" * 26,
]
mutations = st.lists(
    st.tuples(
        st.sampled_from(["put", "insert", "delete", "cut", "double"]),
        st.floats(0, 1),
        st.one_of(st.integers(0, 255), st.sampled_from(b"\t\n\r-09afAFgG :/@`\xff\x00")),
    ),
    min_size=1,
    max_size=3,
)


def mutate(data: bytes, changes) -> bytes:
    for kind, where, byte in changes:
        at = int(where * len(data))
        match kind:
            case "put":
                data = data[:at] + bytes([byte]) + data[at + 1 :]
            case "insert":
                data = data[:at] + bytes([byte]) + data[at:]
            case "delete":
                data = data[:at] + data[at + 1 :]
            case "cut":
                data = data[:at]
            case "double":
                data = data[:at] + data[at // 2 :]
    return data


@settings(max_examples=2 * settings().max_examples)
@given(
    st.lists(st.sampled_from(VALID), min_size=1, max_size=5),
    st.sampled_from(["\n", "\r\n"]),
    mutations,
    st.sampled_from([1, 50, 333, 1 << 22]),
)
@example(rows=VALID, line_end="\n", changes=[("insert", 0.0, 10)], block_bytes=1)
def test_every_mutated_file_is_read_right_or_refused_at_the_right_place(
    tmp_path_factory, rows, line_end, changes, block_bytes
):
    path = tmp_path_factory.getbasetemp() / "mutated.txt"
    data = mutate((line_end.join(rows) + line_end).encode(), changes)
    path.write_bytes(data)
    try:
        expected, place = slow_read(data), None
    except Refused as refused:
        expected, place = None, refused.place
    if place is None:
        assert_columns_are(read_all(path, block_bytes=block_bytes), expected)
    else:
        with pytest.raises(DataError) as caught:
            read_all(path, block_bytes=block_bytes)
        assert (caught.value.line, caught.value.column) == place
        assert str(caught.value).isprintable()  # one line, no control characters


def test_every_byte_in_every_place_of_a_hexadecimal_field_is_judged_right():
    for field in (b"00000000", b"19afAF5c", b"ffffffff"):
        fields = [field[:i] + bytes([c]) + field[i + 1 :] for i in range(8) for c in range(256)]
        values, valid = kinds._hexadecimal(np.frombuffer(b"".join(fields), dtype="<u8"))
        for field_, value, good in zip(fields, values, valid, strict=True):
            assert good == bool(re.fullmatch(rb"[0-9a-fA-F]{8}", field_)), field_
            assert not good or value == int(field_, 16)


@pytest.mark.parametrize("digits", range(9))
def test_every_byte_in_every_place_of_a_decimal_field_is_judged_right(digits):
    """Characters before the field, those of the field before it, do not matter."""
    for field in (b"00000000", b"12345678", b"99999999"):
        words = [field[:i] + bytes([c]) + field[i + 1 :] for i in range(8) for c in range(256)]
        values, valid = kinds._decimal(
            np.frombuffer(b"".join(words), dtype="<u8"), np.full(len(words), digits)
        )
        for word, value, good in zip(words, values, valid, strict=True):
            text = word[8 - digits :]
            assert good == bool(re.fullmatch(rb"[0-9]*", text)), word
            assert not good or value == int(text or b"0")


# --- Bad input -----------------------------------------------------------------------------------


def row(**fields) -> bytes:
    values = dict(zip(COLUMN_NAMES, VALID[0].split("\t"), strict=True)) | fields
    return "\t".join(values.values()).encode()


@pytest.mark.short("37-1000-*")
@pytest.mark.parametrize(
    ("line", "column", "says"),
    [
        (row(C3="xyz"), "C3", "found 'xyz', expected eight hexadecimal digits"),
        (row(C26="1234567"), "C26", "found '1234567', expected eight hexadecimal digits"),
        (row(C1="123456789"), "C1", "found '123456789', expected eight hexadecimal digits"),
        (row(C9="0x123456"), "C9", "found '0x123456', expected eight hexadecimal digits"),
        (row(I1="1.5"), "I1", "found '1.5', expected an integer of at most 18 digits"),
        (row(I2="-"), "I2", "found '-', expected an integer"),
        (row(I3="+3"), "I3", "found '+3', expected an integer"),
        (row(I13=" 3"), "I13", "found ' 3', expected an integer"),
        (row(I4="1e3"), "I4", "found '1e3', expected an integer"),
        (row(I5="1" * 19), "I5", "expected an integer of at most 18 digits"),
        (row(I6="--4"), "I6", "found '--4', expected an integer"),
        (row(I7="٣"), "I7", r"found '\u0663', expected an integer"),
        (row(I8="nan"), "I8", "found 'nan', expected an integer"),
        (row(label=""), "label", "found '', expected 0 or 1"),
        (row(label="2"), "label", "found '2', expected 0 or 1"),
        (row(label="-1"), "label", "found '-1', expected 0 or 1"),
        (row(label="1.0"), "label", "found '1.0', expected 0 or 1"),
        (row(label="\ufeff0"), "label", r"found '\ufeff0', expected 0 or 1"),
        (row(C2="\0" * 8), "C2", r"found '\x00\x00"),
        (row(C4="a" * 500), "C4", "aaaa...', expected eight"),
        (row() + b"\t", None, "found 41 columns, expected 40 separated by tabs"),
        (row()[2:], None, "found 39 columns, expected 40 separated by tabs"),
        (row()[2:], None, "unlabelled test file"),
        (row().replace(b"\t", b"\0", 1), None, "found 39 columns, expected 40"),
        (row().replace(b"\t", b"\n", 1), None, "found 1 column, expected 40"),
        (row().replace(b"\t", b","), None, "found 1 column, expected 40"),
        (row(C5="caf\xe9").decode().encode("latin-1"), None, "byte 0xe9 at position"),
        (b"", None, "a blank line between rows, expected 40 columns"),
        (b"\r", None, "a blank line between rows, expected 40 columns"),
        (row() + b"\r\r", "C26", r"found '00000019\r', expected eight hexadecimal digits"),
    ],
)
@pytest.mark.parametrize("block_bytes", [1000, 1 << 22])
@pytest.mark.parametrize("before", [0, 37])
def test_bad_lines_are_named_by_file_line_and_column(
    tmp_path, line, column, says, block_bytes, before
):
    path = tmp_path / "train.txt"
    good = VALID[0].encode() + b"\n"
    path.write_bytes(good * before + line + b"\n" + good * 3 + row(label="9") + b"\n")
    with pytest.raises(DataError) as caught:
        prepare(path, tmp_path / "store") if block_bytes == 1 << 22 else read_all(
            path, block_bytes=block_bytes
        )
    message = str(caught.value)
    place = f"{path}, line {before + 1}" + (f", column {column}" if column else "")
    assert message.startswith(f"{place}: ")
    assert says in message
    assert message.isprintable()
    assert len(message) < 300 + len(str(path))
    assert [p.name for p in tmp_path.iterdir()] == ["train.txt"]


@pytest.mark.parametrize("content", [b"", b"\n", b"\r\n\r\n", gzip.compress(b"", mtime=0)])
def test_a_file_without_rows_is_empty(tmp_path, content):
    path = tmp_path / "train.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match="is empty; expected lines of 40 columns"):
        prepare(path, tmp_path / "store")


def test_blank_lines_that_span_blocks_are_named_by_the_first(tmp_path):
    path = tmp_path / "train.txt"
    path.write_bytes(VALID[0].encode() + b"\n" * 50 + VALID[0].encode())
    for block_bytes in (1, 7, 400, 1 << 22):
        with pytest.raises(DataError, match="a blank line between rows") as caught:
            read_all(path, block_bytes=block_bytes)
        assert caught.value.line == 2


def test_missing_files_directories_and_archives_are_one_line(tmp_path):
    with pytest.raises(DataError, match=r"none: cannot be read: No such file"):
        prepare(tmp_path / "none", tmp_path / "store")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        prepare(tmp_path, tmp_path / "store")
    for head in (b"PK\x03\x04rest", b"x" * 257 + b"ustar"):
        (tmp_path / "dac").write_bytes(head)
        with pytest.raises(DataError, match="is a zip or tar archive; unpack it"):
            prepare(tmp_path / "dac", tmp_path / "store")


def test_a_truncated_or_damaged_gzip_is_one_line_and_leaves_no_store(tmp_path):
    whole = gzip.compress("\n".join(VALID * 2000).encode())
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    wrong_sum = whole[:-8] + bytes(b ^ 0xFF for b in whole[-8:-4]) + whole[-4:]
    cases = [(whole[:keep], "truncated") for keep in (-1, -9, len(whole) // 2, 12)]
    # A flipped byte may also decompress to nonsense, which is refused as such.
    cases += [(bytes(flipped), "damaged|found|UTF-8|longer"), (wrong_sum, "damaged")]
    cases += [(whole + b"trailing", "damaged")]
    for content, says in cases:
        (tmp_path / "t.gz").write_bytes(content)
        with pytest.raises(DataError, match=says):
            prepare(tmp_path / "t.gz", tmp_path / "store")
        assert [p.name for p in tmp_path.iterdir()] == ["t.gz"]


@pytest.mark.parametrize("block_bytes", [1 << 16, 1 << 22])
def test_the_first_fault_is_named_though_a_line_without_end_follows(tmp_path, block_bytes):
    good, endless = VALID[0].encode() + b"\n", b"x" * (6 << 20)
    cases = [
        (good + endless, 2, "longer than 1048576 bytes"),
        (good + b"bad\n" + endless, 2, "found 1 column"),
        (good + b"\n\n" + endless, 2, "a blank line between rows"),
        (endless, 1, "longer than 1048576 bytes"),
    ]
    for content, line, says in cases:
        (tmp_path / "f").write_bytes(content)
        with pytest.raises(DataError, match=says) as caught:
            read_all(tmp_path / "f", block_bytes=block_bytes)
        assert caught.value.line == line


# --- The store that comes out --------------------------------------------------------------------


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    path = tmp_path_factory.mktemp("raw") / "train.txt"
    synthetic.write_raw(path, 30_000, 1)
    return path


def same(one: Store, two: Store) -> bool:
    return one.shards == two.shards and one.splits == two.splits


@pytest.mark.long
def test_gzip_equals_plain_and_line_ends_and_block_sizes_do_not_matter(tmp_path):
    raw = tmp_path / "raw"
    synthetic.write_raw(raw, 4_000, 1)
    plain = prepare(raw, tmp_path / "plain")
    text = raw.read_bytes()
    half = text.index(b"\n", len(text) // 2) + 1
    variants = {
        "gzip": gzip.compress(text, 1),
        "two gzip members": gzip.compress(text[:half], 1) + gzip.compress(text[half:], 1),
        "CRLF": text.replace(b"\n", b"\r\n"),
        "no last line end": text[:-1],
        "blank lines at the end": text + b"\n\n",
        "upper case": text.upper(),
    }
    for name, content in variants.items():
        (tmp_path / "variant").write_bytes(content)
        assert same(prepare(tmp_path / "variant", tmp_path / name), plain), name
    whole = read_all(raw)
    for block_bytes in (20_011, 99_991):
        for name, column in read_all(raw, block_bytes=block_bytes).items():
            np.testing.assert_array_equal(column, whole[name])
    for name, column in plain.load("test").items():
        np.testing.assert_array_equal(column, whole[name][3_600:])


def test_the_hash_seed_changes_ids_and_nothing_else(raw, tmp_path):
    one, two = (prepare(raw, tmp_path / str(s), hash_seed=s).load("train") for s in (0, 1))
    for name in ("label", "integers", "integers_missing"):
        np.testing.assert_array_equal(one[name], two[name])
    known = one["categories"] > 0
    np.testing.assert_array_equal(known, two["categories"] > 0)
    assert (one["categories"] == two["categories"])[known].mean() < 0.01


def test_a_new_token_label_or_row_changes_no_other_row_no_shape_and_no_bucket_count(raw, tmp_path):
    text = raw.read_bytes().split(b"\n")[:100]
    before = prepare_lines(tmp_path / "a", text)
    new = b"\t".join([b"1", *[b"99999999"] * 13, *[b"fffffff1"] * 26])
    flipped = (b"0" if text[5][:1] == b"1" else b"1") + text[5][1:]
    for i, lines_ in enumerate(
        ([*text, new], [*text[:5], flipped, *text[6:]], [*text[:5], new, *text[6:]])
    ):
        after = prepare_lines(tmp_path / f"b{i}", lines_)
        assert after.schema == before.schema
        old, now = every_row(before), every_row(after)
        for name, column in old.items():
            assert now[name].dtype == column.dtype
            assert now[name].shape[1:] == column.shape[1:]
            np.testing.assert_array_equal(np.delete(now[name][:100], 5, 0), np.delete(column, 5, 0))


def prepare_lines(out, lines_):
    source = out.parent / f"{out.name}.txt"
    source.write_bytes(b"\n".join(lines_))
    return prepare(source, out)


def every_row(store):
    parts = [store.load(split) for split in store.splits]
    return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}


def test_progress_counts_rows_up_to_all_of_them(raw, tmp_path):
    seen = []
    store = prepare(raw, tmp_path / "s", progress=seen.append)
    assert seen == sorted(set(seen))
    assert seen[-1] == store.num_rows == 30_000
    assert len(seen) > 1
    assert store.source == {"format": "criteo-display", "file": "train.txt"}


def test_preparing_twice_to_one_name_is_refused_before_reading(raw, tmp_path):
    prepare(raw, tmp_path / "s")
    with pytest.raises(StoreError, match="exists already"):
        prepare(tmp_path / "no such file", tmp_path / "s")


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(raw, tmp_path):
    """Really full, as far as this process can tell: the kernel refuses files past 1 MB."""
    script = f"""
import resource, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from experiments.tasks.clicks.criteo.display import prepare
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
try:
    prepare({str(raw)!r}, {str(tmp_path / "s")!r})
except ValueError as error:
    sys.exit(str(error))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert re.fullmatch(r".*/s cannot be written: the disk is full \(.*\).*\n", done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_a_run_killed_amid_its_blocks_leaves_no_store(raw, tmp_path):
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from experiments.tasks.clicks.criteo.display import prepare
blocks = []
def progress(rows):
    blocks.append(rows)
    if len(blocks) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
prepare({str(raw)!r}, {str(tmp_path / "s")!r}, progress=progress)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "s").exists()
    prepare(raw, tmp_path / "s").verify()
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


@pytest.mark.long
def test_memory_does_not_grow_with_the_file(raw, tmp_path):
    text = raw.read_bytes()
    text = text[: text.index(b"\n", 1 << 19) + 1]
    peaks = []
    for times in (1, 5):
        (tmp_path / "f").write_bytes(text * times)
        tracemalloc.start()
        for _ in read(tmp_path / "f", block_bytes=1 << 17):
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[1] < 20 * (1 << 17)


def test_real_rows_are_read_whole(real_criteo_rows, tmp_path):
    """Counts and missing rates taken from the file with other tools."""
    store = prepare(real_criteo_rows, tmp_path / "s")
    columns = every_row(store)
    assert store.num_rows == 110_000
    assert columns["label"].sum() == 28_243
    missing = columns["integers_missing"].mean(axis=0).round(4)
    assert missing[[0, 1, 2, 11]].tolist() == [0.4533, 0.0, 0.2113, 0.7685]
    absent = (columns["categories"] == 0).mean(axis=0).round(4)
    assert absent[[0, 2, 5, 18, 21]].tolist() == [0.0, 0.035, 0.1233, 0.4406, 0.7606]
    assert columns["integers"][:, 1].min() == -np.float32(np.log(3))  # the least I2 is -2
    distinct = [len(np.unique(columns["categories"][:, j])) for j in (8, 16, 19)]
    assert distinct == [3, 10, 4]
    with gzip.open(real_criteo_rows, "rb") as file:
        head = b"".join(file.readline() for _ in range(2000))
    assert_columns_are({k: v[:2000] for k, v in columns.items()}, slow_read(head))
