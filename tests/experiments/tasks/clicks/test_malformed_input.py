"""A damaged store or run directory gives a right result, or one clear line that names it.

Every example damages one file, and asks a command. It may answer rightly, by what the undamaged
files say; or refuse with status 2 and one line that names the place. An exception that leaves the
command fails the test, and so does a changed byte in what was there.
"""

import functools
import json
import math
import os
import shutil
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpsgd.runs import journal
from dpsgd.runs.stop import Stopped
from experiments import cli
from experiments.tasks.clicks.store import Store
from tests.experiments.tasks.clicks.slow import edited

TASKS = Path(__file__).resolve().parents[3] / "dpsgd" / "runs"
"""Folder of the task of the runs."""


def ask(*words):
    """Runs one command; what it raises is the test's failure."""
    with redirect_stdout(StringIO()) as said, redirect_stderr(StringIO()) as failed:
        try:
            status = cli.main([str(word) for word in words])
        except SystemExit as stopped:  # the parser of the command line
            status = stopped.code
    return SimpleNamespace(status=status, out=said.getvalue(), err=failed.getvalue())


def assert_clear(answer, *places):
    """A refusal: one line of plain text that names one of `places`."""
    assert answer.status == 2, answer
    (line,) = (x for x in answer.err.splitlines() if not x.endswith(" s in all)"))
    assert line.startswith("dpsgd: "), answer
    assert line.isprintable(), answer
    assert len(line) < 600, answer
    assert any(str(place) in line for place in places), answer


def contents(folder):
    """Every file under `folder`, with its bytes, and every other thing, with its kind."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else "no file"
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def folder(tmp_path):
    """Returns a function that returns an empty folder."""

    def empty():
        shutil.rmtree(tmp_path / "work", ignore_errors=True)
        (tmp_path / "work").mkdir()
        return tmp_path / "work"

    return empty


# --- Damages -------------------------------------------------------------------------------------

places = st.floats(0, 1, exclude_max=True)
VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, 1.0, -0.0,
    1e-320, 1e308, math.nan, math.inf, -math.inf, "", "x", "0", "1", "..", "/", "\0", "\ud800",
    "Ω", "x" * 5_000, [], [0], [[]], [1, 0], {}, {"a": 1}, [None] * 3,
]  # fmt: skip
ARRAYS = [
    np.zeros(160), np.zeros((200, 13), np.int64), np.zeros(0), np.zeros((200, 26), "<i4"),
    np.zeros(200, np.uint8), np.zeros((200, 13), np.float32, order="F"), np.array(["text"] * 200),
    np.array([{}], dtype=object), np.zeros((200, 13), ">f4"),
]  # fmt: skip
CONTENTS = [b"", b"\0" * 512, b"\x93NUMPY", b"PK\3\4", b"{", b"[" * 200_000, b"\xef\xbb\xbf{}"]
edits = st.sampled_from(["put", "insert", "delete", "cut", "double"])
odd_bytes = st.integers(0, 255) | st.sampled_from(b'\t\n\r-09afAFgG :/@`\xff\x00{}[]",.eE')
changes = st.sampled_from(["set", "remove", "add"])
odd_values = st.sampled_from(VALUES) | st.integers(-3, 300) | st.floats() | st.text(max_size=4)
ANY = st.sampled_from(["*", "*.json"])
DAMAGES = [  # kind, files, which of them, and the change
    st.tuples(st.just("bytes"), ANY, places, st.tuples(edits, places, odd_bytes)),
    st.tuples(st.just("content"), ANY, places, st.sampled_from(CONTENTS)),
    st.tuples(st.sampled_from(["nothing", "folder", "dangling"]), ANY, places, st.none()),
    st.tuples(st.just("values"), st.just("*.json"), places, st.tuples(changes, places, odd_values)),
]
ARRAY_DAMAGES = st.tuples(
    st.just("array"), st.just("*.npz"), places, st.tuples(changes, places, st.sampled_from(ARRAYS))
)


def nodes(value, at=()):
    """The path of every value within a JSON value."""
    yield at
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            yield from nodes(item, (*at, name))


def change(value, kind, where, new):
    """Returns nested values with one replaced, removed, or beside one more."""
    *way, name = list(nodes(value))[1:][int(where * (len(list(nodes(value))) - 1))]
    holder = functools.reduce(lambda inner, step: inner[step], way, value)
    if kind == "remove":
        del holder[name]
    elif kind == "set":
        holder[name] = new
    elif isinstance(holder, dict):
        holder["added"] = new
    else:
        holder.insert(name, new)
    return value


def damage(folder, kind, pattern, where, how):
    """Damages one file of a folder; returns its name."""
    found = sorted(path for path in folder.rglob(pattern) if path.is_file())
    path = found[int(where * len(found))]
    match kind:
        case "bytes":
            path.write_bytes(edited(path.read_bytes(), *how))
        case "content":
            path.write_bytes(how)
        case "values":
            path.write_text(json.dumps(change(json.loads(path.read_text()), *how)))
        case "array":
            with np.load(path) as archive:
                arrays = dict(archive)
            np.savez(path, **change(arrays, *how))
        case _:
            path.unlink()
            if kind == "folder":
                path.mkdir()
            elif kind == "dangling":
                path.symlink_to("nowhere")
    return path.relative_to(folder).as_posix()


def many(examples):
    """Returns the settings of a long test, whose fixtures all examples share."""
    skipped = list(HealthCheck)
    return settings(max_examples=examples, database=None, suppress_health_check=skipped)


# --- Stores --------------------------------------------------------------------------------------

TRAIN = ["--noise-multiplier", "1", "--batch-size", "16", "--epochs", "3", "--no-audit"]
TINY = ["--embedding-dim", "2", "--max-buckets", "8", "--hidden", "4"]


@pytest.fixture
def before_training(monkeypatch):
    """Makes `train` stop at the first step; returns the list of the jobs that it came to."""
    reached = []

    class Reached(journal.DirectoryJournal):
        def __init__(self, folder, ledger, job, *rest, **how):
            reached.append(job)
            raise Stopped("at the first step")

    monkeypatch.setattr("dpsgd.runs.run.DirectoryJournal", Reached)
    return reached


@pytest.mark.long
@pytest.mark.timeout(7_200)
@many(500)
@given(how=st.one_of(DAMAGES))
def test_a_damaged_store_is_refused_or_trains_on_the_right_rows(
    store, folder, before_training, how
):
    rows, at = Store.open(store).load("train"), folder()
    path, out = shutil.copytree(store, at / "store"), at / "run"
    damage(path, *how)
    before = contents(path)
    before_training.clear()
    answer = ask("train", path, "sampler:deterministic", "--out", out, *TRAIN, *TINY)
    assert contents(path) == before
    if answer.status == 2:
        assert_clear(answer, path, "batch_size")  # more than the rows that are left
        assert os.listdir(at) == ["store"]
        return
    (reached,) = before_training
    for name, column in reached.data.items():
        np.testing.assert_array_equal(column, rows[name])
        assert column.dtype == rows[name].dtype


# --- Run directories -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a finished run of a small task, and beside it rows and an export."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as path:
        path.syspath_prepend(TASKS)
        from readable_task import readable

        np.savez(folder / "rows.npz", **readable.generated(50))
        words = ["--task", "readable_task:readable", "sampler:deterministic"]
        assert ask("train", *words, "--out", folder / "run", *TRAIN).status == 0
        assert ask("export", folder / "run", folder / "exported").status == 0
        yield folder / "run"


@pytest.mark.long
@pytest.mark.timeout(7_200)
@many(300)
@given(how=st.one_of(*DAMAGES, ARRAY_DAMAGES))
def test_a_damaged_run_is_refused_or_gives_its_model_and_price(finished, folder, how):
    rows, at = finished.with_name("rows.npz"), folder()

    def answers(run, out):
        return {
            "ledger": ask("ledger", run),
            "export": ask("export", run, out),
            "evaluate": ask("evaluate", run, rows),
            "resume": ask("resume", run),
        }

    whole = answers(finished, at / "whole")
    run = shutil.copytree(finished, at / "run")
    damaged = damage(run, *how)
    before = contents(run)
    found = answers(run, at / "out")
    assert contents(run) == before
    for command, answer in found.items():
        if answer.status == 2:
            assert_clear(answer, run, "ledger")
            continue
        assert answer.status == 0, answer
        alone = {"ledger": "", "resume": "report.json"}.get(command, "config.json")
        if damaged != alone and command != "export":
            expected = whole[command].out.replace(str(finished), str(run))
            assert answer.out.replace(str(finished), str(run)) == expected
    if found["export"].status == 2:
        assert not (at / "out").exists()
    elif damaged != "config.json":
        assert contents(at / "out") == contents(finished.with_name("exported"))


# --- Paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["nothing", "a file", "an empty folder", "a store", "a name\n"])
@pytest.mark.parametrize(
    "words",
    [
        ["ledger", "IT"], ["resume", "IT"], ["export", "IT", "OUT"], ["evaluate", "IT", "STORE"],
        ["train", "IT", "sampler:shuffle", "--out", "OUT", "--non-private"],
        ["prepare", "criteo-display", "IT", "OUT"], ["score", "IT", "STORE", "--out", "OUT"],
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_path_to_something_else_is_refused_by_name(store, tmp_path, words, kind):
    path = tmp_path / kind
    match kind:
        case "a file":
            path.write_text("text")
        case "an empty folder":
            path.mkdir()
        case "a store":
            shutil.copytree(store, path)
    if (words[0], kind) == ("train", "a store"):
        pytest.skip("that is what it is for")
    before = contents(tmp_path)
    named = {"IT": path, "OUT": tmp_path / "out", "STORE": store}
    assert_clear(ask(*(named.get(word, word) for word in words)), kind.removesuffix("\n"))
    assert contents(tmp_path) == before
