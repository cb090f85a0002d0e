"""A run that stops goes on as if it had not, is counted exactly, and tells nobody its secrets."""

import dataclasses
import json
import os
import shutil
import signal
import stat
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from tiny_task import (
    Line,
    Scaled,
    assert_same,
    config_of,
    contents,
    edit,
    line,
    run_and_stop,
    sigterm,
    watched,
    words,
)

from accounting import epsilon
from dpsgd import Independent, RootKey, Run, resume, run
from dpsgd.engine.placement import Placement
from dpsgd.models.model import export
from dpsgd.runs import fingerprint, job, report
from dpsgd.runs.directory import DATA, DIAGNOSTICS, RunDirectory
from dpsgd.runs.ledger import Ledger, LedgerError, read
from dpsgd.runs.result import FinishedRun
from dpsgd.runs.stop import Stopped, stop_requests

# --- Stopping and going on -----------------------------------------------------------------------


KNOWN_BY = {
    "config", "data", "code", "task_code", "program", "initial_params", "packages", "python",
    "platform", "cpu_count", "cpus_allowed", "processor", "backend", "devices",
    "compiler_options", "xla_flags",
}  # fmt: skip


@pytest.mark.short("one device-dense")
@pytest.mark.parametrize(
    ("task", "settings", "more"),
    [
        (line, {}, set()),
        (words, {"tables": "lazy", "tables_learning_rate": 1.0}, {"tables"}),
    ],
    ids=["dense", "lazy"],
)
@pytest.mark.parametrize("placed", [None, Placement.default()], ids=["one device", "placed"])
def test_an_attempt_is_known_by_all_that_its_numbers_depend_on(
    tmp_path, task, settings, more, placed
):
    Run.create(task, config_of(**settings), tmp_path / "run", placement=placed)
    (attempt,) = read(tmp_path / "run" / "ledger.jsonl").attempts
    options = jax.config.values.keys() | os.environ.keys()  # which have a test of their own
    expected = KNOWN_BY | more | ({"placement"} if placed else set())
    assert attempt.terms.fingerprint.keys() - options == expected


def test_a_run_that_was_made_here_and_trained_elsewhere_resumes_where_that_was(
    tmp_path, monkeypatch
):
    made = Run.create(line, config_of(insecure_seed=3), tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(job, "train_blocks", watched(sigterm))
        with pytest.raises(Stopped):
            resume(tmp_path / "run")
    blocks = []
    monkeypatch.setattr(job, "train_blocks", watched(lambda *block: blocks.append(block)))
    made.train()
    assert len(blocks) == 2  # of four
    run(line, config_of(insecure_seed=3), tmp_path / "whole")
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.default_int_handler])
def test_the_signals_mean_again_what_they_meant(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with stop_requests() as stop:
            assert not stop()
            signal.raise_signal(signal.SIGINT)
            assert stop()
            assert signal.getsignal(signal.SIGINT) is handler  # a second one is not held up
        assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with stop_requests() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_that_stopped_keeps_what_it_needs_and_knows_what_it_cost(stopped):
    assert {path.name for path in stopped.iterdir()} == {
        "config.json", "environment.json", "guarantee.json", "ledger.jsonl",
        "root.key", "checkpoints", DATA, DIAGNOSTICS,
    }  # fmt: skip
    history = RunDirectory.open(stopped, finished=False).history()
    (attempt,) = history.attempts
    assert attempt.steps == range(16)
    sampler = attempt.terms.mechanism.sampler
    price = epsilon(sampler.privacy_of(1.0, [range(16)]), 1e-5)
    assert price.lower > 0.0
    assert price.upper < epsilon(sampler.with_epochs(2).privacy(1.0), 1e-5).upper
    assert f"epsilon in {price}" in history.guarantee().sentence()
    whole = epsilon(sampler.privacy(1.0), 1e-5)
    assert any(
        f"by looking at the model costs what the whole run costs (epsilon in {whole})" in note
        for note in history.guarantee().notes
    )


def test_what_a_crash_may_leave_is_mended_without_a_trace(stopped, finished):
    with open(stopped / "ledger.jsonl", "ab") as file:
        file.write(b'{"steps": [16, 2')
    (stopped / "checkpoints" / ".000000000024.npz.unfinished").write_bytes(b"PK")
    RunDirectory.open(stopped, finished=False).history()
    resume(stopped)
    assert_same(stopped, finished)
    assert {path.name for path in stopped.iterdir()} == {path.name for path in finished.iterdir()}


def test_a_finished_run_costs_what_was_promised_and_is_tidied_up(finished):
    promised = contents(finished, "guarantee.json")
    report = contents(finished, "report.json")
    assert {name: report[name] for name in promised} == promised
    guarantee = RunDirectory.open(finished).history().guarantee()
    assert guarantee.sentence() == promised["guarantee"]
    assert report["attempts"] == 1
    assert not (finished / "root.key").exists()
    assert not (finished / "checkpoints").exists()
    assert resume(finished) == report


def change_settings(out):
    edit(out, '"learning_rate": 0.003', '"learning_rate": 0.004')


CHANGES = {
    "code": (fingerprint, "code_digest", lambda: "other code"),
    "task code": (job, "task_code_digest", lambda *of, **more: "other code"),
    "description": (Line, "describe", lambda task: {"loss": "another"}),
    "start": (Line, "init", lambda task, seed: {"w": np.ones(3, np.float32)}),
    "data": dataclasses.replace(line, seed=1),
    "class": Scaled(),
    "settings": line,
}


@pytest.mark.short("data", "code", "settings", "start")
@pytest.mark.parametrize("changed", CHANGES)
def test_what_is_changed_begins_an_attempt_and_is_counted_in_addition(
    stopped, monkeypatch, changed
):
    task, lines = CHANGES[changed], []
    if isinstance(task, tuple):
        monkeypatch.setattr(*task)
        task = line
    elif changed == "settings":
        change_settings(stopped)
    (noted,) = RunDirectory(stopped).data()
    report = resume(stopped, task, progress=lines.append)
    assert len(RunDirectory(stopped).data()) == (2 if changed == "data" else 1)
    assert RunDirectory(stopped).data()[0] == noted
    first, second = read(stopped / "ledger.jsonl").attempts
    assert (first.steps, second.steps) == (range(16), range(16, 30))
    assert first.key != second.key
    sampler = first.terms.mechanism.sampler
    price = epsilon(sampler.privacy_of(1.0, [first.steps, second.steps]), 1e-5)
    assert (report["epsilon_lower"], report["epsilon_upper"]) == (price.lower, price.upper)
    entered = epsilon(sampler.with_epochs(4).privacy(1.0), 1e-5).upper  # the second one twice
    assert epsilon(sampler.privacy(1.0), 1e-5).upper < price.upper < entered
    assert report["epsilon_upper_otherwise"] == entered
    assert report["attempts"] == 2
    assert any(one.startswith("changed since: ") for one in lines)


def test_planned_guarantee_is_withdrawn_by_a_new_attempt(stopped, monkeypatch):
    """Also for an equal fingerprint: on a GPU no step is repeated."""
    shutil.rmtree(stopped / "checkpoints")
    monkeypatch.setattr("dpsgd.runs.plan.repeats_exactly", lambda: False)
    monkeypatch.setattr(job.Training, "train", stop_there)
    with pytest.raises(KeyboardInterrupt):
        resume(stopped)
    first, second = read(stopped / "ledger.jsonl").attempts
    assert first.terms.fingerprint == second.terms.fingerprint
    assert not (stopped / "guarantee.json").exists()


def test_correlated_noise_that_is_begun_anew_begins_without_history(tmp_path, monkeypatch):
    config = config_of(bands=2, coefficients=(1.0, 0.5))
    out = run_and_stop(line, config, tmp_path / "run")
    change_settings(out)
    begun, train_blocks = [], job.train_blocks

    def seen(algorithm, mechanism, state, *rest, **how):
        begun.append([np.asarray(row).any() for row in state.noise])
        return train_blocks(algorithm, mechanism, state, *rest, **how)

    monkeypatch.setattr(job, "train_blocks", seen)
    # A process that dies before anything is saved begins as the one before it.
    with monkeypatch.context() as patch:
        patch.setattr(job.Training, "train", stop_there)
        with pytest.raises(KeyboardInterrupt):
            resume(out)
    report = resume(out)
    first, second = read(out / "ledger.jsonl").attempts
    assert (first.steps, second.steps) == (range(16), range(16, 30))
    assert begun == [[False]]
    independent = dataclasses.replace(first.terms.mechanism, noise=Independent())
    segments = independent.privacy_of([first.steps, second.steps])
    assert report["epsilon_upper"] == epsilon(segments, 1e-5).upper


@pytest.mark.short("killed")
@pytest.mark.parametrize("declared", [0, 8], ids=["stopped", "killed"])
def test_copies_share_no_noise_where_bits_do_not_repeat(stopped, tmp_path, monkeypatch, declared):
    """As on a GPU, where two copies of one program differ in the last bits of their sums."""
    monkeypatch.setattr("dpsgd.runs.plan.repeats_exactly", lambda: False)
    if declared:
        with Ledger.open(stopped / "ledger.jsonl") as ledger:
            ledger.declare(range(16, 16 + declared))
    root = RootKey.load(stopped / "root.key")
    root.begin_run(read(stopped / "ledger.jsonl").name)
    root.hold()  # the fixture is a copy by itself
    copies = [shutil.copytree(stopped, tmp_path / name) for name in ("one", "two")]
    runs = [stopped, *copies]
    for out in runs:
        resume(out)
    before = read(stopped / "ledger.jsonl").attempts[0].key
    last = [read(out / "ledger.jsonl").attempts[-1] for out in runs]
    assert len({g.key for g in last}) == 3
    # Whose bits nobody repeats goes on; a copy, or whoever had declared more, begins anew.
    assert [g.key == before for g in last] == [not declared, False, False]
    assert [g.steps for g in last[1:]] == [range(16, 30)] * 2
    params = [np.load(out / "params.npz")["['w']"] for out in runs]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not np.array_equal(params[one], params[other])  # as under one noise they would
    counted = [read(out / "ledger.jsonl").guarantee().epsilon.upper for out in runs]
    assert counted[1] == counted[2] > epsilon(last[0].terms.mechanism.privacy(), 1e-5).upper


def test_a_copy_that_began_anew_is_no_copy_anymore(stopped, tmp_path, monkeypatch):
    monkeypatch.setattr("dpsgd.runs.plan.repeats_exactly", lambda: False)
    copy = shutil.copytree(stopped, tmp_path / "copy")
    with monkeypatch.context() as patch:
        patch.setattr(job.Training, "train", stop_there)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                resume(copy)
    assert len(read(copy / "ledger.jsonl").attempts) == 2


def test_diagnostics_have_each_step_once(finished, tmp_path):
    lines = (finished / DIAGNOSTICS).read_text().splitlines()
    assert [json.loads(one)["step"] for one in lines] == list(range(30))
    folder = RunDirectory(shutil.copytree(finished, tmp_path / "run"))
    for step in (25, 9, 0):
        folder.cut_diagnostics(step)
        kept = (folder.path / DIAGNOSTICS).read_text().splitlines()
        assert kept == lines[:step]
    (folder.path / DIAGNOSTICS).write_text("\n".join(lines[:3]) + '\n{"step": 3, "lo')
    folder.cut_diagnostics(4)
    assert (folder.path / DIAGNOSTICS).read_text().splitlines() == lines[:3]


# --- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("done", [False, True], ids=["stopped", "finished"])
def test_a_ledger_that_was_rolled_back_is_refused(stopped, finished, tmp_path, done):
    """What else a ledger is refused for, is refused where it is read."""
    out = shutil.copytree(finished, tmp_path / "done") if done else stopped
    lines = (out / "ledger.jsonl").read_text().splitlines(keepends=True)
    (out / "ledger.jsonl").write_text("".join(lines[:-1]))
    for refuse in (resume, lambda out: RunDirectory.open(out, finished=done).history()):
        with pytest.raises(LedgerError, match="rolled back or replaced"):
            refuse(out)


LAZY = {"tables": "lazy", "tables_learning_rate": 1.0, "tables_momentum": 0.0, "flush_every": 100}


def often(task, settings, out):
    """A stopped run with checkpoints of steps 8 and 16."""
    return run_and_stop(task, config_of(checkpoint_seconds=0.0, **settings), out)


def damage_an_array(path):
    with np.load(path) as saved:
        arrays = dict(saved)
    name = next(name for name in arrays if "params" in name)
    np.savez(path, allow_pickle=False, **{**arrays, name: arrays[name] + 1})


@pytest.mark.short("newest *")
@pytest.mark.parametrize(
    ("task", "settings", "damaged"),
    [(line, {}, True), (line, {}, False), (words, LAZY, True)],
    ids=["newest damaged", "newest gone", "lazy, newest damaged"],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path, task, settings, damaged):
    ours, theirs = (often(task, settings, tmp_path / name) for name in ("ours", "theirs"))
    older, newest = sorted((ours / "checkpoints").iterdir())
    shutil.copy(theirs / "checkpoints" / older.name, older)
    if damaged:
        damage_an_array(newest)
    else:
        newest.unlink()
    before = (ours / "ledger.jsonl").read_bytes()
    with pytest.raises(LedgerError, match=r"not the one that the .*checkpoint"):
        resume(ours)
    assert (ours / "ledger.jsonl").read_bytes() == before
    shutil.rmtree(ours / "checkpoints")  # its own beginning is still there
    assert resume(ours)["epsilon_upper"] >= resume(theirs)["epsilon_upper"]


@pytest.mark.parametrize("changed", [False, True])
def test_a_run_that_dies_between_its_release_and_its_report_ends_all_the_same(
    stopped, finished, monkeypatch, changed
):
    with monkeypatch.context() as patch:
        patch.setattr(report, "markdown", stop_there)
        with pytest.raises(KeyboardInterrupt):
            resume(stopped)
    closed = (stopped / "ledger.jsonl").read_bytes()
    copy = shutil.copytree(stopped, stopped.with_name("copy"))
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(ValueError, match="has released its model"):
        resume(copy)  # which is not trained again
    assert (copy / "ledger.jsonl").read_bytes() == closed
    assert closed == (finished / "ledger.jsonl").read_bytes()
    if changed:  # of which another attempt would be made, had it a step to take
        monkeypatch.setattr(fingerprint, "code_digest", lambda: "other")
    record = resume(stopped)
    assert (stopped / "ledger.jsonl").read_bytes() == closed
    assert record["params_sha256"] == RunDirectory(stopped).params_digest()
    assert_same(stopped, finished)


def test_a_second_process_and_a_missing_secret_or_run_are_refused(stopped, tmp_path):
    with Ledger.open(stopped / "ledger.jsonl"):
        with pytest.raises(LedgerError, match="another process is training"):
            resume(stopped)
        RunDirectory.open(stopped, finished=False).history()
    (stopped / "root.key").unlink()
    with pytest.raises(FileNotFoundError, match="no root key"):
        resume(stopped)
    with pytest.raises(FileNotFoundError, match="is not the directory of a run"):
        resume(tmp_path / "nothing")


class Picky(Line):
    """Says by itself which rows it refuses."""

    def check(self, begun):
        raise ValueError(f"no such rows as those of {begun}")


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (Line(rows=240), "has 240 training examples, and .* was begun on 160"),
        (Line(width=4), r"does not hold|of another|\['w'\]"),
        (Picky(), r"no such rows as those of {'headline': 'test_error'"),
    ],
    ids=["rows", "model", "by the task's own check"],
)
def test_a_task_that_does_not_fit_is_refused_before_anything_is_declared(stopped, task, why):
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=why):
        resume(stopped, task)
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


OLD = {"data": "store", "sampler": {"name": "poisson"}, "model_sizes": {}, "schema": {}}


@pytest.mark.parametrize(
    "damage", ["{", '{"task": "x"}', '{"data": "x"}', "[]", json.dumps(OLD)], ids=str
)
def test_a_damaged_or_older_configuration_is_refused_in_one_line(
    stopped, finished, tmp_path, damage
):
    done = shutil.copytree(finished, tmp_path / "done")
    for out, use in [(stopped, resume), (done, FinishedRun.read), (done, resume)]:
        (out / "config.json").write_text(damage)
        old = "was begun by an earlier version, whose runs knew"
        with pytest.raises(ValueError, match=old if "schema" in damage else "config") as refused:
            use(out)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("change", [{"noise_multiplier": 50.0}, {"l2_clip_norm": 9.0}])
def test_a_run_without_a_step_left_does_not_take_over_another_mechanism(tmp_path, change):
    """Its report would name a noise that nothing was released under."""
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDirectory, "write_params", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(line, config_of(), out)
    config, ledger = out / "config.json", (out / "ledger.jsonl").read_bytes()
    asked = config.read_text()
    config.write_text(json.dumps({**json.loads(asked), **change}))
    with pytest.raises(ValueError, match=r"no step left to take.*restore the configuration$"):
        resume(out, line)
    assert (out / "ledger.jsonl").read_bytes() == ledger
    config.write_text(asked)
    assert resume(out, line)["attempts"] == 1


# --- Secrets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_only_the_owner_writes_a_run_and_reads_what_is_not_private(tmp_path, umask):
    before = os.umask(umask)
    try:
        out = run_and_stop(line, config_of(insecure_seed=3), tmp_path / "new" / "runs" / "run")
        owns = {out / "root.key", out / "checkpoints", *(out / "checkpoints").iterdir()}
        owns |= {out / DATA, out / DIAGNOSTICS}
        for path in (out, out.parent, out.parent.parent, *out.rglob("*")):
            most = 0o700 if path in owns or umask else 0o755
            assert stat.S_IMODE(path.stat().st_mode) & ~most == 0, path
        resume(out)
        for path in out.rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) & 0o133 == 0, path
    finally:
        os.umask(before)


def test_a_root_of_another_run_is_refused(stopped, finished, tmp_path):
    other = run_and_stop(line, config_of(), tmp_path / "other")
    (stopped / "root.key").unlink()
    shutil.copy2(other / "root.key", stopped / "root.key")
    with pytest.raises(ValueError, match=r"root.*: a run was already begun under"):
        resume(stopped)


@pytest.mark.parametrize("name", ["root.key", "ledger.jsonl", "checkpoints", DIAGNOSTICS])
def test_what_lies_elsewhere_is_refused_in_one_line(stopped, tmp_path, name):
    (stopped / name).rename(tmp_path / "elsewhere")
    (stopped / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=f"{name} is a symbolic link to .*[:;] move th") as refused:
        resume(stopped)
    assert "\n" not in str(refused.value)


def leaks(run, paths):
    """Files that hold the root secret of a run, or what is derived from it, in some form."""
    root, attempt = RootKey.load(run / "root.key"), read(run / "ledger.jsonl").attempts[0].key
    noise, seed = root.noise_key(attempt), root.sampling_seed(attempt)
    raw = [root._secret, noise.tobytes(), seed.to_bytes(32, "little"), seed.to_bytes(32, "big")]
    text = [root._secret.hex(), str(seed), *(str(word) for word in noise.tolist())]
    secrets = [*raw, *(item.encode() for item in text)]
    files = [path for path in paths if path.is_file()]
    return [path.name for path in files if any(one in path.read_bytes() for one in secrets)]


def test_a_run_holds_no_secret_but_in_its_one_file_and_an_export_none_and_nothing_else(
    stopped, finished, tmp_path
):
    assert leaks(stopped, stopped.rglob("*")) == ["root.key"]
    out = tmp_path / "out"
    export(finished, out)  # the same run
    assert {path.name for path in out.rglob("*")} == {"params.npz", "model.json", "guarantee.json"}
    assert leaks(stopped, out.iterdir()) == []
    with np.load(out / "params.npz") as bundle, np.load(finished / "params.npz") as whole:
        assert bundle.files == whole.files == ["['w']"]
        np.testing.assert_array_equal(bundle["['w']"], whole["['w']"])
    stated = contents(finished, "guarantee.json")
    exported = contents(out, "guarantee.json")
    assert set(exported.pop("segments")[0]) == {
        "sampler", "noise_multiplier", "l2_clip_norm", "noise", "full_sums", "adjacency", "unit",
        "reproducible_noise", "steps",
    }  # fmt: skip
    assert exported == {**stated, "audit": contents(finished, "report.json")["audit"]}
    for word in (b"root", b"step", b"fingerprint", b"opt_state", b"digest", b"ledger"):
        assert word not in (out / "model.json").read_bytes() + (out / "params.npz").read_bytes()
    with pytest.raises(FileNotFoundError, match="resumes it"):
        export(stopped, tmp_path / "other")


def test_what_a_run_writes_depends_on_a_row_by_the_model_and_blinded_digests_alone(
    tmp_path, monkeypatch
):
    """On data sets that differ in one row, with the same noise and the same batches."""
    runs, ledgers, usual = [tmp_path / "a", tmp_path / "b"], [], Line.columns

    def changed(task):
        rows = {name: np.array(column) for name, column in usual(task).items()}
        rows["x"][17], rows["y"][17] = 9.0, -9.0
        return rows

    for out, columns in zip(runs, (usual, changed), strict=True):
        monkeypatch.setattr(Line, "columns", columns)
        run(line, config_of(insecure_seed=5), out)
        (digest,) = RunDirectory(out).data()
        text = (out / "ledger.jsonl").read_text()
        assert digest not in text
        lines = [json.loads(one) for one in text.splitlines()]
        for one in lines:
            del one["hash"]
        assert lines.pop() == {"released": RunDirectory(out).params_digest()}
        assert lines[0]["fingerprint"].pop("data") == RootKey.from_insecure_seed(5).blind(digest)
        ledgers.append(lines)
    assert ledgers[0] == ledgers[1]
    a, b = (np.load(out / "params.npz") for out in runs)
    assert any(not np.array_equal(a[name], b[name]) for name in a.files)  # the row took part
    names = [{path.name for path in out.rglob("*")} for out in runs]
    assert names[0] == names[1]
    for name in ("params.npz", "ledger.jsonl"):
        assert len({(out / name).stat().st_size for out in runs}) == 1, name
    for name in ("guarantee.json", "environment.json", "config.json"):
        assert contents(runs[0], name) == contents(runs[1], name)
    a, b = (contents(out, "report.json") for out in runs)
    assert a.keys() == b.keys()
    clock = {"stage_seconds", "training_seconds", "examples_per_second"}
    different = {name for name in a if a[name] != b[name]}
    assert different <= clock | {"metrics", "ledger_head", "params_sha256"}
    assert a["metrics"]["test_num_examples"] == b["metrics"]["test_num_examples"]


def test_a_description_that_was_withdrawn_is_not_left_in_the_configuration(stopped, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Line, "describe", lambda task: {"loss": "another"})
        patch.setattr(Ledger, "resume", stop_there)
        with pytest.raises(KeyboardInterrupt):
            resume(stopped, line)
    assert contents(stopped, "config.json")["task"]["description"] != line.describe()
    resume(stopped, line)
    assert FinishedRun.read(stopped).task["description"] == line.describe()


def stop_there(*of, **how):
    raise KeyboardInterrupt
