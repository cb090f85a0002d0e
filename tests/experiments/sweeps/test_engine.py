"""A sweep that is killed goes on without repeating a run, and equal seeds give equal numbers."""

import dataclasses
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd.runs.directory import DATA
from dpsgd.runs.history import History
from dpsgd.runs.stop import Stopped
from experiments import cli, programs
from experiments import train as training
from experiments.cli import config as config_of
from experiments.cli.config import TrainConfig
from experiments.cli.errors import in_one_line
from experiments.finished import FinishedRun
from experiments.reports.overview import overview
from experiments.sweeps import engine, workers
from experiments.sweeps.config import Sweep
from experiments.sweeps.plan import plan
from experiments.sweeps.summary import INSECURE
from experiments.tasks.clicks.synthetic import rows as synthetic

SEEDED = """
title = "t"
insecure_seeds = [1, 2]

[run]
embedding_dim = 2
max_buckets = 8
hidden = [4]
audit = false

[[grid]]
x = "noise_multiplier"
sampler = "shuffle"
noise_multiplier = [0.5, 1, 2]
batch_size = 32
epochs = 2
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "store"
    synthetic.write_store(path, 400, seed=0)
    return path


def sweep_of(folder, text=SEEDED):
    path = folder / "sweep.toml"
    path.write_text(text)
    return Sweep.read(path)


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

config, store, out = map(Path, sys.argv[1:])
run_sweep(Sweep.read(config), store, out, workers=2, progress=progress)
"""


@pytest.mark.crash
@pytest.mark.long
@pytest.mark.timeout(900)  # four sweeps of two processes each, which all start JAX
def test_killed_and_stopped_a_sweep_goes_on_to_the_numbers_of_an_undisturbed_one(store, tmp_path):
    sweep, out = sweep_of(tmp_path), tmp_path / "disturbed"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path / "sweep.toml", store, out],
        cwd=Path(__file__).parents[3],
    )
    assert killed.returncode == -signal.SIGKILL
    before = finished(out)
    assert 1 <= len(before) < 6

    asked = []

    def stop(line):
        if line.startswith("1 of") and "runs done" in line and not asked:
            asked.append(line)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="the same command goes on"):
        engine.run_sweep(sweep, store, out, workers=2, progress=stop)
    between = finished(out)
    assert before.items() < between.items()  # nothing was repeated, and something done
    assert len(between) < 6

    disturbed = engine.run_sweep(sweep, store, out, workers=2)
    assert between.items() < finished(out).items()
    assert len(finished(out)) == 6
    undisturbed = engine.run_sweep(sweep, store, tmp_path / "undisturbed", workers=2)
    assert disturbed.record() == undisturbed.record()
    assert undisturbed.record()["cells"]
    # Whoever has the seeds has the noise: the sweep says so, and so does each run.
    assert INSECURE in disturbed.statements
    reports = [report for result in disturbed.results for report in result.reports]
    assert all(report["guarantee"].startswith("NO GUARANTEE") for report in reports)
    asked, *shown = engine.write(disturbed, out, SEEDED.encode())
    assert asked.read_text() == SEEDED
    assert all(path.stat().st_size > 500 for path in shown)


def test_a_run_that_fails_is_named_and_keeps_no_other_from_being_finished(store, tmp_path):
    text = SEEDED.replace("insecure_seeds = [1, 2]", "repetitions = 1").replace(
        '"shuffle"', '[{ name = "poisson", max_batch_size = 33 }, "shuffle"]'
    )
    sweep = sweep_of(tmp_path, text.replace("[0.5, 1, 2]", "1"))
    with pytest.raises(ValueError, match=r"1 of 2 runs failed.*poisson-.*no finite epsilon"):
        engine.run_sweep(sweep, store, tmp_path / "out", workers=1)
    assert [name[:7] for name in finished(tmp_path / "out")] == ["shuffle"]


def raises(error):
    raise error


OUT_OF_MEMORY = {
    "Python's": (lambda: raises(MemoryError()), "out of memory"),
    "NumPy's": (lambda: np.zeros(2**58), "Unable to allocate 2.00 EiB"),
    "XLA's": (lambda: jnp.zeros(2**46), "out of memory: .* 281474976710656 bytes. Make the model"),
}


@pytest.mark.parametrize(("exhaust", "said"), OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_a_run_out_of_memory_fails_in_one_line_and_its_process_lives_on(
    monkeypatch, tmp_path, capsys, exhaust, said
):
    monkeypatch.setattr(training, "train", lambda config, progress: exhaust())
    config = TrainConfig(tmp_path, config_of.Shuffle(), tmp_path / "run", noise_multiplier=1.0)
    message = workers._outcome(config, print)
    assert message.kind == "failed"
    assert re.match(said, message.text)
    assert in_one_line("dpsgd", exhaust) == 2
    assert capsys.readouterr().err == f"dpsgd: {message.text}\n"


def test_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="ours"):
        in_one_line("dpsgd", lambda: raises(RuntimeError("ours")))


def test_the_report_of_a_sweep_names_the_command_that_does_it_again(store, tmp_path, capsys):
    sweep_of(tmp_path, SEEDED.replace("[1, 2]", "[1]", 1).replace("[0.5, 1, 2]", "1"))
    out = tmp_path / "a sweep"
    words = ["sweep", str(tmp_path / "sweep.toml"), str(store), "--out", str(out)]
    assert cli.main([*words, "--workers", "1"]) == 0
    assert (out / "sweep.toml").read_bytes() == (tmp_path / "sweep.toml").read_bytes()
    before = finished(out)
    assert len(before) == 1

    page = overview([out]).markdown
    assert "Mean ± one standard deviation over independent runs, 1 of each" in page
    assert f"jax {jax.__version__}" in page
    assert re.search(r"Training took [\d.]+ s .*, at a median of [\d,]+ examples a second", page)
    (command,) = re.findall("^dpsgd sweep .*$", page, re.MULTILINE)
    again = shlex.split(command)[1:]
    assert again[:-1] == ["sweep", str(out / "sweep.toml"), str(store), "--out"]
    assert cli.main([*again[:-1], str(out)]) == 0  # of what is finished, nothing is repeated
    assert finished(out) == before

    # The page is of the runs as they are, and not of what was once written of them.
    for stale in ("summary.json", "summary.md", "figure.png"):
        (out / stale).unlink()
    assert overview([out]).markdown == page
    (run,) = (out / "runs").iterdir()
    one = FinishedRun.read(run)
    (first,) = one.history.generations
    terms = dataclasses.replace(first.terms, fingerprint={**first.terms.fingerprint, "code": ""})
    other = dataclasses.replace(one, history=History([dataclasses.replace(first, terms=terms)]))
    assert engine._remarks([one, one]) == []
    assert engine._remarks([one, other]) == ["the runs are not alike in: code"]
    (run / DATA).rename(run / "elsewhere")
    with pytest.raises(ValueError, match="runs that do not say on which"):
        overview([out])
    run.rename(out / "elsewhere")
    with pytest.raises(FileNotFoundError, match=f"{run.name} is not the directory of a run"):
        overview([out])
    (out / "sweep.toml").unlink()
    with pytest.raises(FileNotFoundError, match="a sweep that is not finished: the command that"):
        overview([out])


def test_runs_in_one_process_compile_one_program_for_all_their_numbers(store, tmp_path, caplog):
    text = SEEDED.replace('"shuffle"', '["shuffle", "deterministic", "balls-and-bins"]')
    text += "learning_rate = [1e-3, 1e-2]\nl2_clip_norm = [1, 4]\n"
    runs = plan(sweep_of(tmp_path, text), store, tmp_path / "runs", "sweep")
    shapes = {engine._program(run, training.Store.open(store), "sweep") for run in runs}
    assert len(shapes) == 2  # batches of 32, and padded ones
    programs._shared.cache_clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        for run in runs[:: len(runs) // 12]:
            training.train(run.config)
    compiled = sum("Compiling jit(_run_block)" in message for message in caplog.messages)
    assert compiled == len(shapes)


def test_a_process_stays_with_its_program_and_leaves_others_to_the_next(tmp_path):
    config = TrainConfig(tmp_path, config_of.Shuffle(), tmp_path, noise_multiplier=1.0)
    tasks = deque(workers.Task(config, program) for program in "aabbbc")
    pool = [SimpleNamespace(last=None, task=None) for _ in range(2)]
    done = [[], []]
    while tasks:
        for worker, turns in zip(pool, done, strict=True):
            if tasks:
                worker.task = workers.next_task(tasks, worker, pool)
                worker.last = worker.task.program
                turns.append(worker.last)
    assert done == [["b", "b", "b"], ["a", "a", "c"]]


def test_a_folder_that_holds_another_run_is_left_alone(store, tmp_path):
    sweep, out = sweep_of(tmp_path, SEEDED.replace("[0.5, 1, 2]", "1")), tmp_path / "out"
    run = plan(sweep, store, out / "runs", "sweep")[0]
    training.train(run.config)
    before = finished(out)
    one = SEEDED.replace("[0.5, 1, 2]", "1")
    changed = {
        "hidden": sweep_of(tmp_path, one.replace("[4]", "[5]")),
        "init_seed": sweep_of(tmp_path, SEEDED.replace("[run]", "[run]\ninit_seed = 9")),
    }
    for setting, other in changed.items():
        with pytest.raises(ValueError, match=f"another {setting}"):
            engine.run_sweep(other, store, out)
    assert finished(out) == before


def test_runs_go_on_with_their_own_store_wherever_it_lies_and_with_no_other(store, tmp_path):
    sweep, out = sweep_of(tmp_path, SEEDED.replace("[0.5, 1, 2]", "1")), tmp_path / "out"
    moved, place = Path(shutil.copytree(store, tmp_path / "moved")), tmp_path / "store"
    shutil.copytree(store, place)
    run = plan(sweep, place, out / "runs", "sweep")[0]
    training.train(run.config)
    assert engine._finished(run, training.Store.open(moved))
    shutil.rmtree(place)
    synthetic.write_store(place, 400, seed=1)  # made anew: other rows, and as many
    with pytest.raises(ValueError, match=rf"{run.name} holds another run .*with another store:"):
        engine.run_sweep(sweep, place, out)
    (run.config.out / DATA).unlink()
    with pytest.raises(ValueError, match="another store"):
        engine.run_sweep(sweep, moved, out)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SEEDED.replace("= 32", "= 400"), "batch_size must be at most num_examples = 320"),
        (SEEDED + "l2_clip_norm = 1e300\n", "l2_clip_norm 1e\\+300 .* rescale the loss"),
    ],
)
def test_what_no_run_can_do_is_refused_before_any(store, tmp_path, text, said):
    with pytest.raises(ValueError, match=f"sweep, shuffle-sigma0.5.*: {said}"):
        engine.run_sweep(sweep_of(tmp_path, text), store, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_step_sizes_are_those_of_adam_with_a_cosine_and_follow_the_configuration(store, tmp_path):
    steps, rate = 7, 0.03
    ours = optax.inject_hyperparams(programs._cosine_adam)(
        learning_rate=rate, num_steps=float(steps)
    )
    plain = optax.adam(optax.cosine_decay_schedule(rate, steps))
    params = {"w": jnp.ones(3)}
    states = [ours.init(params), plain.init(params)]
    for step in range(steps + 2):
        gradient = {"w": jnp.cos(jnp.arange(3.0) + step)}
        (a, states[0]), (b, states[1]) = (
            optimizer.update(gradient, state)
            for optimizer, state in zip((ours, plain), states, strict=True)
        )
        np.testing.assert_allclose(a["w"], b["w"], rtol=1e-5, atol=1e-9)

    text = SEEDED + "learning_rate = [1e-3, 1e-2]\n"
    runs = plan(sweep_of(tmp_path, text), store, tmp_path, "sweep")
    slow, fast = (
        training.Job.of(
            run.config,
            training.Store.open(store),
            lambda n, config=run.config: training.mechanism_for(config, n),
        )
        for run in runs[:: len(runs) // 2]
    )
    # A state that another rate made, as of a run whose configuration was changed.
    state = fast.scheduled(slow.start())
    assert float(state.opt_state.hyperparams["learning_rate"]) == np.float32(1e-2)
