"""Whatever a user gives, he gets a right result or one clear line, and keeps all that he had.

Every example damages one thing: a store or a run directory. Then a command
is asked, as a user asks it. It may answer rightly, by a statement of what is right that is
made here from the undamaged thing; or refuse, with status 2 and one line that names the place. Any
exception that leaves the command fails the test, and so does a changed byte in what was there.
"""

import contextlib
import functools
import io
import json
import math
import os
import shutil
import signal
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
"""Where the tests' own tasks are."""

SECONDS = 60
"""No question may cost more, of a processor's time."""


def few_or(many):
    """Runs a test with a few examples, and with many where time does not matter."""
    patient = [pytest.mark.long, pytest.mark.timeout(7_200)]
    return pytest.mark.parametrize("examples", [10, pytest.param(many, marks=patient)])


def for_all(examples, strategy, check):
    """Checks `examples` draws of the strategy: the short suite the same few, the long one many."""
    how = settings(
        max_examples=examples,
        derandomize=examples < 100,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    how(given(strategy)(lambda drawn: check(drawn)))()


def ask(*words):
    """Runs one command; what it raises is the test's failure."""
    said, failed = io.StringIO(), io.StringIO()

    def late(*_):
        raise AssertionError(f"no answer after {SECONDS} s: {words}")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(failed):
            try:
                status = cli.main([str(word) for word in words])
            except SystemExit as stopped:  # the parser of the command line
                status = stopped.code
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
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
    """A folder that is empty whenever it is asked for."""

    def empty():
        shutil.rmtree(tmp_path / "work", ignore_errors=True)
        (tmp_path / "work").mkdir()
        return tmp_path / "work"

    return empty


# --- How things get damaged ----------------------------------------------------------------------

places = st.floats(0, 1, exclude_max=True)
odd_bytes = st.one_of(
    st.integers(0, 255), st.sampled_from(b'\t\n\r-09afAFgG :/@`\xff\x00{}[]",.eE')
)
byte_changes = st.one_of(
    st.tuples(st.sampled_from(["put", "insert", "delete", "cut", "double"]), places, odd_bytes),
    st.tuples(st.just("begin"), st.sampled_from([b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"\n"])),
    st.tuples(st.just("end"), st.sampled_from([b"\0" * 100, b"\n\n", b"{}", b"x", b"\r"])),
    st.tuples(st.just("all"), st.sampled_from([b"", b"\0" * 512, b"\x93NUMPY", b"PK\3\4", b"{"])),
)


def change_bytes(data, change):
    kind, *where = change
    match kind, where:
        case "begin", [extra]:
            return extra + data
        case "end", [extra]:
            return data + extra
        case "all", [other]:
            return other
    return edited(data, kind, *where)


odd_values = st.one_of(
    st.sampled_from([
        None, True, False, 0, 1, -1, 2, 3, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.5, 1.0, -0.0,
        1e-320, 1e308, math.nan, math.inf, -math.inf, "", "x", "0", "1", "..", "/", "\0", "\ud800",
        "Ω", "x" * 5_000, [], [0], [[]], [1, 0], {}, {"a": 1}, [None] * 3,
    ]),
    st.integers(-3, 300),
    st.floats(),
    st.text(max_size=4),
)  # fmt: skip
json_changes = st.tuples(st.sampled_from(["set", "remove", "add"]), places, odd_values)
odd_arrays = st.sampled_from([
    np.zeros(160), np.zeros((200, 13), np.int64), np.zeros(0), np.zeros((200, 26), "<i4"),
    np.zeros(200, np.uint8), np.zeros((200, 13), np.float32, order="F"), np.array(["text"] * 200),
    np.array([{}], dtype=object), np.zeros((200, 13), ">f4"),
])  # fmt: skip
array_changes = st.tuples(st.sampled_from(["set", "remove", "add"]), places, odd_arrays)


def nodes(value, at=()):
    """The path of every value within a JSON value."""
    yield at
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            yield from nodes(item, (*at, name))


def change_json(value, change):
    """Returns `value` with one of its nodes replaced, removed, or beside one more."""
    kind, where, new = change
    value = json.loads(json.dumps(value))
    *way, name = list(nodes(value))[1:][int(where * (len(list(nodes(value))) - 1))]
    holder = functools.reduce(lambda inner, step: inner[step], way, value)
    if kind == "set":
        holder[name] = new
    elif kind == "remove":
        del holder[name]
    elif isinstance(holder, dict):
        holder["added"] = new
    else:
        holder.insert(name, new)
    return value


def change_archive(path, change):
    """Changes one array of an .npz file."""
    kind, where, array = change
    with np.load(path) as archive:
        arrays = dict(archive)
    name = list(arrays)[int(where * len(arrays))]
    if kind == "remove":
        del arrays[name]
    else:
        arrays[name if kind == "set" else "added"] = array
    np.savez(path, **arrays)


ANY = ("*", "*.json")
damages = [
    st.tuples(st.just("bytes"), st.sampled_from(ANY), places, byte_changes),
    st.tuples(st.just("nothing"), st.sampled_from(ANY), places, st.none()),
    st.tuples(st.just("folder"), st.sampled_from(ANY), places, st.none()),
    st.tuples(st.just("dangling"), st.sampled_from(ANY), places, st.none()),
    st.tuples(st.just("too deep"), st.sampled_from(ANY), places, st.none()),
    st.tuples(st.just("values"), st.just("*.json"), places, json_changes),
]
array_damages = st.tuples(st.just("array"), st.just("*.npz"), places, array_changes)


def damage(folder, how):
    """Damages one file of a store or of a run's directory; returns which."""
    kind, pattern, where, change = how
    files = sorted(path for path in folder.rglob(pattern) if path.is_file())
    path = files[int(where * len(files))]
    match kind:
        case "bytes":
            path.write_bytes(change_bytes(path.read_bytes(), change))
        case "nothing" | "folder" | "dangling":
            path.unlink()
            if kind == "folder":
                path.mkdir()
            elif kind == "dangling":
                path.symlink_to("nowhere")
        case "too deep":
            path.write_bytes(b"[" * 200_000)
        case "values":
            path.write_text(json.dumps(change_json(json.loads(path.read_text()), change)))
        case "array":
            change_archive(path, change)
    return path.relative_to(folder).as_posix()


# --- Stores --------------------------------------------------------------------------------------

TRAIN = ["--noise-multiplier", "1", "--batch-size", "16", "--epochs", "3", "--no-audit"]
TINY = ["--embedding-dim", "2", "--max-buckets", "8", "--hidden", "4"]


@pytest.fixture
def before_training(monkeypatch):
    """Makes `train` stop at the first step; returns the list of the jobs that it came to."""
    reached = []

    class Reached(journal.DirectoryJournal):
        def __init__(self, job, folder, ledger, last, *rest):
            reached.append(job)
            raise Stopped("at the first step")

    monkeypatch.setattr("dpsgd.runs.run.DirectoryJournal", Reached)
    return reached


@pytest.mark.long
@few_or(1_000)
def test_a_damaged_store_is_refused_by_name_or_trains_on_the_right_rows(
    store, folder, before_training, examples
):
    whole = Store.open(store)
    rows = whole.load("train")

    def check(how):
        at = folder()
        path, out = shutil.copytree(store, at / "store"), at / "run"
        damage(path, how)
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

    for_all(examples, st.one_of(damages), check)


# --- Run directories -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The directory of a finished run, and beside it rows.

    Its task is trained in a moment: what lies in a run's directory is alike for all.
    """
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as path:
        path.syspath_prepend(TASKS)
        from readable_task import readable

        np.savez(folder / "rows.npz", **readable.generated(50))
        words = ["--task", "readable_task:readable", "sampler:deterministic"]
        assert ask("train", *words, "--out", folder / "run", *TRAIN).status == 0
        yield folder / "run"


@pytest.mark.long
@few_or(500)
def test_a_damaged_run_is_refused_or_gives_its_model_and_price(finished, folder, examples):
    rows = finished.with_name("rows.npz")
    price = ask("ledger", finished).out
    told = ask("resume", finished).out
    scores = ask("evaluate", finished, rows)
    assert scores.status == 0
    exported = folder() / "exported"
    assert ask("export", finished, exported).status == 0
    bundle = contents(exported)

    def check(how):
        at = folder()
        run = shutil.copytree(finished, at / "run")
        damaged = damage(run, how)
        before = contents(run)
        questions = {
            "ledger": ask("ledger", run),
            "export": ask("export", run, at / "out"),
            "evaluate": ask("evaluate", run, rows),
            "resume": ask("resume", run),
        }
        for answer in questions.values():
            if answer.status == 2:
                assert_clear(answer, run, "ledger")
            else:
                assert answer.status == 0, answer
        assert contents(run) == before
        if questions["ledger"].status == 0:
            assert questions["ledger"].out == price
        if questions["resume"].status == 0 and damaged != "report.json":
            assert questions["resume"].out == told.replace(str(finished), str(run))
        if questions["export"].status == 2:
            assert sorted(os.listdir(at)) == ["run"]
        elif damaged != "config.json":
            assert contents(at / "out") == bundle
        if questions["evaluate"].status == 0 and damaged != "config.json":
            assert questions["evaluate"].out == scores.out

    for_all(examples, st.one_of(*damages, array_damages), check)


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
