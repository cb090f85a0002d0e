"""A slow reader of all formats, which shares no line with the fast one."""

import gzip
import re
import zlib

import numpy as np

from experiments.tasks.clicks.formats import DISPLAY, SEARCH, table_format, table_schema

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15

TABLE = table_format(
    table_schema("y", categories=("city", "n"), numbers=("age", "visits"), buckets=(64, 256))
)
FORMATS = {"display": DISPLAY, "search": SEARCH, "table": TABLE}
HEADER = ("y", "city", "age", "n", "visits", "note")
"""Columns of the table's text files; "note" is not read."""
LABELS = {
    **dict.fromkeys(("0", "0.0", "false", "False", "FALSE"), 0),
    **dict.fromkeys(("1", "1.0", "true", "True", "TRUE"), 1),
}


def split_mix(x: int) -> int:
    """Finalises as SplitMix64 does, in Python integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def text_hash(text: bytes) -> int:
    state = len(text) * GOLDEN & WORD
    for at in range(0, len(text), 8):
        state = split_mix(state ^ int.from_bytes(text[at : at + 8], "little"))
    return state


def edited(data: bytes, kind: str, where: float, byte: int) -> bytes:
    """Returns bytes with one put, inserted, deleted, or all of them cut or repeated somewhere."""
    at = int(where * len(data))
    return {
        "put": data[:at] + bytes([byte]) + data[at + 1 :],
        "insert": data[:at] + bytes([byte]) + data[at:],
        "delete": data[:at] + data[at + 1 :],
        "cut": data[:at],
        "double": data[:at] + data[at // 2 :],
    }[kind]


class Refused(Exception):
    """Fault of a file: its first line (None for the file), and the columns that are at fault."""

    def __init__(self, line, columns=()):
        super().__init__(line, columns)
        self.line, self.columns = line, set(columns)


def value(column: str, text: str) -> float | int | None:
    """Returns the label, number or hash of a field, None if it is missing, or raises."""
    if column in ("label", "Sale", "y"):
        return LABELS[text]
    if text == "":
        return None
    if re.fullmatch("I[0-9]+|click_timestamp|nb_clicks_1week", column):
        number = int(re.fullmatch("(-?[0-9]{1,18})", text)[1])
        if column[0] == "I":
            return number
        if number == -1:
            return None
        return number // 3600 % 168 if column == "click_timestamp" else number
    if re.fullmatch("C[0-9]+", column):
        return int(re.fullmatch("([0-9a-fA-F]{8})", text)[1], 16)
    if column in ("age", "visits"):
        number = float(text)
        return None if np.isnan(number) else number
    absent = {"city": "", "n": "", "SalesAmountInEuro": "-1.0"}.get(column, "-1")
    return None if text == absent else text_hash(text.encode("utf-8", "surrogateescape"))


def slow_lines(data: bytes, name: str):
    """Yields (line, fields by name) of Criteo's files."""
    try:
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error):
        raise Refused("gzip") from None
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not data.strip(b"\r\n"):
        raise Refused(None)
    *lines, last = data.split(b"\n")
    lines = [line.removesuffix(b"\r") for line in lines] + [last] * bool(last)
    names = FORMATS[name].layouts[0]
    for number, line in enumerate(lines, start=1):
        fields = line.decode("utf-8", "surrogateescape").split("\t")
        if len(fields) != len(names):
            raise Refused(number)
        yield number, dict(zip(names, fields, strict=True))


def slow_read(data: bytes, name: str):
    """Returns the rows of a file, dictionaries, or raises the Refused of its first bad line."""
    format, rows = FORMATS[name], []
    for line, row in slow_lines(data, name):
        bad = [column for column, text in row.items() if re.search("[\0\r]", text)]
        for column in (format.label, *format.features):
            try:
                value(column, row[column])
            except (KeyError, TypeError):
                bad.append(column)
            if re.search("[\udc80-\udcff]", row[column]):
                bad.append(column)
        if bad:
            raise Refused(line, bad)
        rows.append(row)
    return rows


def slow_columns(rows, format, *, labelled=True, hash_seed=0):
    """Returns the columns of a store for rows, dictionaries of texts."""
    schema = format.schema
    numbers = [[value(name, row[name]) for name in schema.integers] for row in rows]
    shape = len(rows), len(schema.integers)
    missing = np.array([[x is None for x in row] for row in numbers], bool).reshape(shape)
    x = np.array([[float(x or 0) for x in row] for row in numbers], float).reshape(shape)
    columns = {
        "integers": np.copysign(np.log1p(np.abs(x)), x).astype(np.float32),
        "integers_missing": missing,
        "categories": np.zeros((len(rows), len(schema.categories)), np.int32),
    }
    for j, name in enumerate(schema.categories):
        values = [value(name, row[name]) for row in rows]
        hashes = np.array([(x or 0) & WORD for x in values], np.uint64)
        ids = schema.hash(hashes, j, hash_seed)
        columns["categories"][:, j] = np.where([x is None for x in values], 0, ids)
    if labelled:
        columns["label"] = np.array([value(format.label, row[format.label]) for row in rows], "u1")
    return columns


def assert_same(got, expected):
    """Compares columns bit for bit."""
    assert set(got) == set(expected)
    for name, column in expected.items():
        assert (got[name].dtype, got[name].shape) == (column.dtype, column.shape)
        assert np.ascontiguousarray(got[name]).tobytes() == column.tobytes(), name
