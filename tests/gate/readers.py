"""Columns that readers make of generated files, right and damaged, by the command `dpsgd prepare`.

A right file has the digest of its columns; a damaged one the place that its error names, or the
digest of its columns where it is read all the same. Wording is free.
"""

import contextlib
import gzip
import hashlib
import io
import random
import re
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from experiments import cli
from experiments.tasks.clicks.store import Store
from gate.record import read, write

ROWS = 60
OPTIONS = (
    "--label y --positive yes --negative no --categories city device --numbers age spend "
    "--bounds age=0:120 --missing NA --split 0.5 0.25 0.25"
)
CSV = ["csv", *OPTIONS.split()]
DISPLAY, SEARCH = ["criteo-display"], ["criteo-search"]


def _display(draw):
    def row():
        numbers = [draw.choice(["", "-2", "0", "7", str(draw.randrange(10**6))]) for _ in range(13)]
        words = [draw.choice(["", f"{draw.getrandbits(32):08x}"]) for _ in range(26)]
        return "\t".join([draw.choice("01"), *numbers, *words])

    return [row() for _ in range(ROWS)]


def _search(draw):
    def row():
        words = [draw.choice(["-1", f"{draw.getrandbits(128):032X}"]) for _ in range(16)]
        numbers = [str(draw.choice([-1, 0, 68])), draw.choice(["0.0", "68.6", "12"])]
        time = str(1_596_439_471 + draw.randrange(10**6))
        return "\t".join([draw.choice("01"), "-1.0", "-1", time, *numbers, "-1", *words])

    return [row() for _ in range(ROWS)]


def _table(draw):
    def row():
        city = draw.choice(["", "Rome", "\u00d6rebro", '"a, b"', f"c{draw.randrange(99)}"])
        numbers = draw.choice(["", "NA", "41", "7.5", "200"]), draw.choice(["-3", "1e3", "0.25"])
        return ",".join([city, draw.choice(["phone", "tv"]), *numbers, draw.choice(["yes", "no"])])

    return ["city,device,age,spend,y", *(row() for _ in range(ROWS))]


def _encoded(lines, end="\n"):
    return "".join(line + end for line in lines).encode()


def _with(lines, number, line):
    return [*lines[:number], line, *lines[number + 1 :]]


def files(folder):
    """Writes the files into a folder; returns name -> (words of the command, path)."""
    draw = random.Random(7)
    table, found = _table(draw), {}

    def add(name, words, content, suffix):
        path = folder / f"{name}{suffix}"
        path.write_bytes(content)
        found[name] = words, path

    kinds = {  # words of the command, lines, separator, suffix, places of a number and the label
        "display": (DISPLAY, _display(draw), "\t", ".txt", 2, 0),
        "search": (SEARCH, _search(draw), "\t", "", 4, 0),
        "table": (CSV, table, ",", ".csv", 2, 4),
    }
    for kind, (words, lines, comma, suffix, number, label) in kinds.items():
        text, tenth = _encoded(lines), lines[9].split(comma)
        add(kind, words, text, suffix)
        add(f"{kind} gzip", words, gzip.compress(text, mtime=0), f"{suffix}.gz")
        add(f"{kind} CRLF", words, _encoded(lines, "\r\n"), suffix)
        add(f"{kind} without a last newline", words, text[:-1], suffix)
        add(f"{kind} empty", words, b"", suffix)
        add(f"{kind} header or row alone", words, _encoded(lines[:1]), suffix)
        add(f"{kind} cut gzip", words, gzip.compress(text, mtime=0)[:-40], f"{suffix}.gz")
        add(f"{kind} two gzip members", words, 2 * gzip.compress(text, mtime=0), f"{suffix}.gz")
        add(f"{kind} NUL", words, text.replace(b"\n", b"\0\n", 3), suffix)
        damages = {
            "a field too many": [*tenth, "x"],
            "a field too few": tenth[:-1],
            "a blank line": [],
            "a word for a number": _with(tenth, number, "many"),
            "another label": _with(tenth, label, "9"),
            "0x1F for a number": _with(tenth, number, "0x1F"),
            "an open quote": ['"Rome', *tenth[1:]],
        }
        for how, line in damages.items():
            add(f"{kind} {how}", words, _encoded(_with(lines, 9, comma.join(line))), suffix)
        add(f"{kind} wrong UTF-8", words, text[:300] + b"\xff" + text[300:], suffix)
    add("table twice a column", CSV, _encoded(_with(table, 0, "city,city,age,spend,y")), ".csv")
    add("table another header", CSV, _encoded(_with(table, 0, "a,device,age,spend,y")), ".csv")
    add("table TSV", CSV, _encoded([line.replace(",", "\t") for line in table]), ".tsv")
    arrow = pa.csv.read_csv(io.BytesIO(_encoded(table)))
    for name, columns in {
        "table Parquet": arrow,
        "table Parquet short": arrow.drop(["age"]),
    }.items():
        path = folder / f"{name}.parquet"
        pa.parquet.write_table(columns, path)
        found[name] = CSV, path
    return found


def digest(store):
    """Returns a digest of the columns of a store, in any layout of its files."""
    opened, found = Store.open(store), hashlib.sha256()
    for split in ("train", "validation", "test"):
        for name, column in sorted(opened.load(split).items()):
            array = np.ascontiguousarray(column)
            found.update(f"{split} {name} {array.dtype.str} {array.shape}".encode())
            found.update(array.tobytes())
    return found.hexdigest()[:16]


def outcomes():
    """Returns the outcome of each file: a digest, or the place that the error names."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, (case, (words, path)) in enumerate(files(folder).items()):
            store, said = folder / f"store{number}", io.StringIO()
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                kind, *options = words
                status = cli.main(["prepare", kind, str(path), str(store), *options])
            if status == 0:
                found[case] = digest(store)
            else:
                place = re.search(r"(line|row) \d[\d,]*\b", said.getvalue())
                found[case] = f"refused at {place[0]}" if place else "refused"
    return found


def measure():
    """Records the outcome of each file."""
    write("readers", outcomes())


def check():
    """Returns a line for each file whose outcome is another one."""
    now = outcomes()
    return [
        f"readers: {case}: {now.get(case)}, frozen {frozen}"
        for case, frozen in read("readers").items()
        if now.get(case) != frozen
    ]
