"""A killed sweep resumes without repeating a run, and equal seeds give equal numbers."""

import dataclasses
import fcntl
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stored_task

from dpsgd import RunSpec
from dpsgd.runs.directory import DATA
from dpsgd.runs.history import History
from dpsgd.runs.result import FinishedRun
from dpsgd.runs.stop import Stopped
from experiments.cli.errors import in_one_line
from experiments.results.page import page as page_of
from experiments.results.table import Table
from experiments.sweeps import engine, workers
from experiments.sweeps.config import PlannedRun, Sweep, plan
from experiments.sweeps.summary import INSECURE, TABLE, remarks_on
from samplers import Population
from samplers.settings import SETTINGS

SEEDED = """
title = "t"
insecure_seeds = [1, 2]

[task]
name = "tiny_task:Line"
width = 3

[run]
audit = false
target_delta = "1/n"

[[grid]]
x = "noise_multiplier"
sampler = "shuffle"
noise_multiplier = [0.5, 1, 2]
batch_size = 32
epochs = 2
"""
ONE = SEEDED.replace("[1, 2]", "[1]", 1).replace("[0.5, 1, 2]", "1")
STORED = ONE.replace("tiny_task:Line", "stored_task:Stored")
LINE = {"name": "tiny_task:Line", "settings": {}, "description": {}}


def sweep_of(folder, text=SEEDED):
    path = folder / "sweep.toml"
    path.write_text(text)
    return Sweep.read(path)


def shown(summary):
    """What a sweep shows of its runs, but how long they took."""
    return [table for view in summary.views for table in view.tables(intervals=True).items()]


def finished(out):
    """Names of the finished runs, with the moment at which each was."""
    return {path.parent.name: path.stat().st_mtime_ns for path in out.glob("runs/*/report.json")}


KILLED = """
import os, signal, sys
from pathlib import Path
from experiments.sweeps.config import Sweep
from experiments.sweeps.engine import run_sweep

def progress(line):
    if line.startswith("1 of"):
        os.kill(os.getpid(), signal.SIGKILL)

config, out = map(Path, sys.argv[1:])
run_sweep(Sweep.read(config), None, out, workers=2, progress=progress)
"""


@pytest.mark.crash
@pytest.mark.long
@pytest.mark.timeout(900)  # four sweeps of two processes each, which all start JAX
def test_a_killed_sweep_resumes_to_the_undisturbed_numbers(tmp_path):
    sweep, out = sweep_of(tmp_path), tmp_path / "disturbed"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path / "sweep.toml", out],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert killed.returncode == -signal.SIGKILL
    before = finished(out)
    assert 1 <= len(before) < 6

    asked = []

    def stop(line):
        if line.startswith("1 of") and "runs done" in line and not asked:
            asked.append(line)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="the same command resumes"):
        engine.run_sweep(sweep, None, out, workers=2, progress=stop)
    between = finished(out)
    assert before.items() < between.items()  # nothing was repeated, and something done
    assert len(between) < 6

    disturbed = engine.run_sweep(sweep, None, out, workers=2)
    assert between.items() < finished(out).items()
    assert len(finished(out)) == 6
    undisturbed = engine.run_sweep(sweep, None, tmp_path / "undisturbed", workers=2)
    assert shown(disturbed) == shown(undisturbed)
    # Whoever has the seeds has the noise: the sweep says so, and so does each run.
    assert INSECURE in disturbed.statements
    rows = disturbed.table.rows
    assert all(row["guarantee"].startswith("NO GUARANTEE") for row in rows)
    asked, *files = engine.write(disturbed, out, SEEDED.encode())
    assert asked.read_text() == SEEDED
    assert all(path.stat().st_size > 500 for path in files)
    assert Table.load(out / TABLE).frame.equals(disturbed.table.frame)


def test_a_failed_run_is_named_and_the_others_are_finished(tmp_path, in_this_process):
    text = ONE.replace("insecure_seeds = [1]", "repetitions = 1").replace(
        '"shuffle"', '[{ name = "poisson", max_batch_size = 33 }, "shuffle"]'
    )
    with pytest.raises(ValueError, match=r"1 of 2 runs failed.*poisson-.*no finite epsilon"):
        engine.run_sweep(sweep_of(tmp_path, text), None, tmp_path / "out")
    assert [name[:7] for name in finished(tmp_path / "out")] == ["shuffle"]


def test_a_diverged_run_is_finished_and_the_others_shown(tmp_path, in_this_process):
    rates = "learning_rate = [0.01, 1e30]\n"
    text = ONE.replace('x = "noise_multiplier"', 'x = "learning_rate"') + rates
    summary = engine.run_sweep(sweep_of(tmp_path, text), None, tmp_path / "out")
    (steep,) = [name for name in finished(tmp_path / "out") if "1e+30" in name]
    assert f"the training of {steep} diverged: means leave them out" in summary.statements
    engine.write(summary, tmp_path / "out", text.encode())
    page = (tmp_path / "out" / "summary.md").read_text()
    assert "| 1e+30 | undefined |" in page
    assert re.search(r"\| 0.01 \| \d", page)
    assert shown(engine.read(tmp_path / "out")) == shown(summary)


def raises(error):
    raise error


OUT_OF_MEMORY = {
    "Python's": (lambda: raises(MemoryError()), "out of memory"),
    "NumPy's": (lambda: np.zeros(2**58), "Unable to allocate 2.00 EiB"),
    "XLA's": (lambda: jnp.zeros(2**46), "out of memory: .* 281474976710656 bytes. Make the model"),
}


@pytest.mark.parametrize(("exhaust", "line"), OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_a_run_out_of_memory_fails_in_one_line(monkeypatch, tmp_path, capsys, exhaust, line):
    monkeypatch.setattr("dpsgd.runs.run.run", lambda *args, **options: exhaust())
    config = RunSpec.of(SETTINGS["shuffle"](), noise_multiplier=1.0)
    message = workers._outcome(LINE, PlannedRun("cell", config, tmp_path / "run"), print)
    assert message.kind == "failed"
    assert re.match(line, message.text)
    assert in_one_line("dpsgd", exhaust) == 2
    assert capsys.readouterr().err == f"dpsgd: {message.text}\n"


def test_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="ours"):
        in_one_line("dpsgd", lambda: raises(RuntimeError("ours")))


@pytest.mark.long
def test_a_sweep_in_workers_is_reported_with_its_command(tmp_path, command):
    (tmp_path / "sweep.toml").write_text(STORED)
    data, out = tmp_path / "points.npz", tmp_path / "a sweep"
    stored_task.Stored.write(data, 0)
    words = ["sweep", tmp_path / "sweep.toml", data, "--out", out, "--workers", "1"]
    assert re.search("like the timed one, . core", command(*words, "--dry-run"))
    assert "\ntest error\n" in command(*words)
    assert (out / "sweep.toml").read_bytes() == (tmp_path / "sweep.toml").read_bytes()
    before = finished(out)
    assert len(before) == 1

    page = page_of([out]).markdown
    assert "Single runs: models of " in page
    assert f"jax {jax.__version__}" in page
    assert re.search(r"Training took [\d.]+ s .*, at a median of [\d,]+ examples a second", page)
    (line,) = re.findall("^dpsgd sweep .*$", page, re.MULTILINE)
    again = shlex.split(line)[1:]
    assert again[:-1] == ["sweep", str(out / "sweep.toml"), str(data), "--out"]
    # Of what is finished, nothing is repeated; another metric can be shown of it.
    other = [*again[:-1], out, "--headline", "test_num_examples"]
    assert "\ntest num examples\n" in command(*other)
    assert finished(out) == before
    with pytest.raises(ValueError, match="unknown metric 'auc'; choose of test_error, "):
        page_of([out], headline="auc")

    # The page is of the runs as they are, and not of what was once written of them.
    for stale in (TABLE, "summary.md", "figure.png"):
        (out / stale).unlink()
    assert page_of([out]).markdown == page
    (run,) = (out / "runs").iterdir()
    one = FinishedRun.read(run)
    (first,) = one.history.attempts
    elsewhere = dataclasses.replace(first, environment={**first.environment, "code": ""})
    other = dataclasses.replace(one, history=History([elsewhere]))
    assert remarks_on([one, one]) == []
    assert remarks_on([one, other]) == ["the runs differ in: code"]
    killed = dataclasses.replace(one, history=History([first, first]))  # without any change
    assert remarks_on([killed]) == [f"{run.name} took 2 attempts: {'; '.join(one.record['notes'])}"]
    (run / DATA).rename(run / "elsewhere")
    with pytest.raises(ValueError, match="runs on different or unknown data"):
        page_of([out])
    run.rename(out / "elsewhere")
    with pytest.raises(FileNotFoundError, match=f"{run.name} is not a run directory"):
        page_of([out])
    (out / "sweep.toml").unlink()
    with pytest.raises(FileNotFoundError, match="is an unfinished sweep; repeat its command"):
        page_of([out])


def test_runs_in_one_process_share_a_program_across_numbers(tmp_path, caplog, in_this_process):
    text = ONE.replace('"shuffle"', '["shuffle", "balls-and-bins"]')
    text = text.replace("epochs = 2", "epochs = 1")
    text = text.replace("width = 3", "width = 4")  # a model that no other test compiles
    text += "learning_rate = [1e-3, 1e-2]\n"
    sweep = sweep_of(tmp_path, text)
    runs = plan(sweep, tmp_path / "runs", "sweep")
    shapes = {engine._program(run.spec, Population(160), "sweep") for run in runs}
    assert len(shapes) == 2  # batches of 32, and padded ones
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        engine.run_sweep(sweep, None, tmp_path / "out")
    compiled = sum("Compiling jit(_run_block)" in message for message in caplog.messages)
    assert compiled == len(shapes)


def swept(folder, text):
    """Digests of the parameters by run, and whether the sweep says that seeds are known."""
    folder.mkdir()
    summary = engine.run_sweep(sweep_of(folder, text), None, folder / "out")
    digests = {row["run"]: row["params_sha256"] for row in summary.table.rows}
    return digests, INSECURE in summary.statements


PLAIN = ONE.replace("noise_multiplier = 1", "non_private = true")
PLAIN = PLAIN.replace('x = "noise_multiplier"', 'x = "epochs"').replace("shuffle", "deterministic")
FRESH = "repetitions = 2"
REPEATED = {  # what stays equal if a sweep is carried out again
    "initial parameters, by the declared seed": (PLAIN, FRESH, True),
    "neither noise": (ONE.replace("shuffle", "deterministic"), FRESH, False),
    "nor draws": (PLAIN.replace("deterministic", "shuffle"), FRESH, False),
    "everything, by an insecure seed": (ONE, "insecure_seeds = [7]", True),
}


@pytest.mark.parametrize(("text", "seeds", "equal"), REPEATED.values(), ids=REPEATED)
def test_a_repeated_sweep_shares_what_is_declared(tmp_path, in_this_process, text, seeds, equal):
    text = text.replace("insecure_seeds = [1]", seeds)
    first, marked = swept(tmp_path / "first", text)
    second, _ = swept(tmp_path / "second", text)
    assert first.keys() == second.keys()
    assert all((first[run] == second[run]) == equal for run in first)
    assert len({*first.values()}) == len(first)  # repetitions differ in any case
    assert marked == seeds.startswith("insecure")
    if text == PLAIN.replace("insecure_seeds = [1]", FRESH):
        other, _ = swept(tmp_path / "other", text.replace("[run]", "[run]\ninit_seed = 9"))
        assert not {*other.values()} & {*first.values()}


def test_a_free_worker_prefers_its_program_then_an_unused_one():
    todo = [(f"{program}{number}", program) for program in "abc" for number in (1, 2)]
    pool = [types.SimpleNamespace(program=None) for _ in range(2)]
    turns = [pool[number] for number in (0, 1, 1, 1, 0, 1)]
    taken = [workers.next_run(todo, worker, pool) for worker in turns]
    assert taken == ["a1", "b1", "b2", "c1", "a2", "c2"]
    assert todo == []


def test_a_dry_run_says_what_each_panel_takes_and_trains_nothing(tmp_path, command, monkeypatch):
    asked = []

    def time_runs(task, specs, workers):
        asked.extend(specs)
        return iter(["a device", *(360.0 for _ in specs)])

    monkeypatch.setattr(engine, "time_runs", time_runs)
    monkeypatch.delenv("COLUMNS", raising=False)  # tables are not wrapped in a pipe
    text = SEEDED + "learning_rate = [0.1, 0.2]\nl2_clip_norm = [1, 4]\n"
    (tmp_path / "sweep.toml").write_text(text + SEEDED[SEEDED.index("[[grid]]") :])
    said = command("sweep", tmp_path / "sweep.toml", "--dry-run", "--workers", "1")
    assert len(asked) == 1  # one program for all numbers
    rows = [line.split() for line in said.splitlines()]
    # 2 seeds, 3 noises, 4 settings or the default one; 10 steps, an hour together
    assert ["panel", "1", "24", "240", "24", "12", "6", "3", "1"] in rows
    assert ["panel", "2", "6", "60", "6", "3", "1.5", "1", "1"] in rows
    assert ["all", "panels", "together", "30", "300", "30", "15", "7.5", "3.75", "1"] in rows
    assert "like the timed one, a device" in said
    assert "--out is missing" in command.refuses("sweep", tmp_path / "sweep.toml")


def test_a_folder_that_holds_another_run_is_left_alone(tmp_path, in_this_process):
    out = tmp_path / "out"
    engine.run_sweep(sweep_of(tmp_path, ONE), None, out)
    before = finished(out)
    changed = {
        "width": ONE.replace("width = 3", "width = 2"),
        "seed": ONE.replace("width = 3", "seed = 1"),
        "init_seed": ONE.replace("[run]", "[run]\ninit_seed = 9"),
        "task": ONE.replace("tiny_task:Line", "tiny_task:line").replace("width = 3", ""),
    }
    for setting, text in changed.items():
        with pytest.raises(ValueError, match=f"another .*{setting}"):
            engine.run_sweep(sweep_of(tmp_path, text), None, out)
    assert finished(out) == before
    (out / engine.ASKED).write_text(changed["init_seed"])
    with pytest.raises(ValueError, match="another init_seed"):
        engine.read(out)


def test_one_process_at_a_time_trains_the_runs_of_a_folder(tmp_path, in_this_process):
    out = tmp_path / "out"
    (out / engine.RUNS).mkdir(parents=True)
    folder = os.open(out / engine.RUNS, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="another process"):
        engine.run_sweep(sweep_of(tmp_path, ONE), None, out)
    os.close(folder)
    assert not finished(out)


def test_runs_resume_from_their_initial_model_alone(tmp_path, in_this_process, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("model.npz", w=np.ones(3, np.float32))
    start = '[run]\ninit_from = "model.npz"'
    sweep, out = sweep_of(tmp_path, ONE.replace("[run]", start)), tmp_path / "out"
    done = engine.run_sweep(sweep, None, out)
    engine.write(done, out, ONE.replace("[run]", start).encode())
    assert shown(engine.run_sweep(sweep, None, out)) == shown(engine.read(out)) == shown(done)
    np.savez("model.npz", w=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="another init_from"):
        engine.run_sweep(sweep, None, out)
    (tmp_path / "model.npz").unlink()
    with pytest.raises(FileNotFoundError, match=r"init_from: .*model\.npz does not exist"):
        engine.run_sweep(sweep, None, tmp_path / "other")
    assert shown(engine.read(out)) == shown(done)


def test_runs_resume_with_their_store_alone_and_may_move_it(tmp_path, in_this_process):
    sweep, out = sweep_of(tmp_path, STORED), tmp_path / "out"
    place, moved = tmp_path / "points.npz", tmp_path / "moved.npz"
    stored_task.Stored.write(place, 0)
    shutil.copy(place, moved)
    engine.run_sweep(sweep, place, out)
    before = finished(out)
    engine.run_sweep(sweep, moved, out)
    assert finished(out) == before
    stored_task.Stored.write(place, 1)  # made anew: other rows, and as many
    with pytest.raises(ValueError, match=r"holds another run .*with another data:"):
        engine.run_sweep(sweep, place, out)
    (run,) = (out / "runs").iterdir()
    (run / DATA).unlink()
    with pytest.raises(ValueError, match="another data"):
        engine.run_sweep(sweep, moved, out)


def test_wrong_metric_on_command_line_is_refused_before_any_run(tmp_path, in_this_process, command):
    (tmp_path / "sweep.toml").write_text(ONE)
    words = ["sweep", str(tmp_path / "sweep.toml"), "--out", str(tmp_path / "out")]
    line = command.refuses(*words, "--headline", "test_auc")
    assert "unknown metric 'test_auc'; choose of test_error" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (SEEDED.replace("= 32", "= 400"), "shuffle-.*: batch_size must be at most num_examples = "),
        (
            SEEDED.replace("= 32", "= 400").replace("shuffle", "deterministic"),
            "deterministic-.*: batch_size must be at most num_examples = 160",
        ),
        (
            SEEDED + "l2_clip_norm = 1e300\n",
            ".*: l2_clip_norm 1e\\+300 .* rescale the loss",
        ),
        (SEEDED.replace('"shuffle"', '"user-poisson"'), "user-poisson-.* have no user column"),
        (
            SEEDED + 'tune = ["learning_rate", "l2_clip_norm"]\n',
            "tune: learning_rate is chosen on validation rows, .* it measures test_error, ",
        ),
        ('headline = "test_auc"\n' + SEEDED, "headline: unknown metric 'test_auc'"),
        (SEEDED.replace("tiny_task:Line", "stored_task:Mute"), "headline: .* measures no metrics"),
    ],
)
def test_what_no_run_can_do_is_refused_before_any(tmp_path, in_this_process, text, problem):
    sweep = sweep_of(tmp_path, text)
    with pytest.raises(ValueError, match=f"sweep, {problem}"):
        engine.run_sweep(sweep, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=f"sweep, {problem}"):
        engine.forecast(sweep, None)
