"""Runs of several processes that are killed, stopped or made to fail, and go on: tests of a driver.

Every process is forked from this one, which has imported what they need, and begun no thread.
"""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_task
from jax.experimental import multihost_utils

from dpsgd.core import mechanism
from dpsgd.core.queries import FullSums
from dpsgd.engine import algorithm
from dpsgd.engine import calibration as calibrations
from dpsgd.engine import placement as placement_module
from dpsgd.engine.placement import Placement
from dpsgd.noise.keys import RootKey
from dpsgd.runs import job, run
from dpsgd.runs.attempts import STOP
from dpsgd.runs.history import read
from dpsgd.runs.ledger import Ledger
from dpsgd.runs.processes import together
from dpsgd.runs.result import code_digest
from dpsgd.runs.stop import STOPPED, Stopped
from samplers.batches import IndexBlock
from samplers.settings import SETTINGS


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Blocks are of four steps."""
    monkeypatch.setattr(job, "BLOCK_STEPS", 4)


@pytest.fixture
def folder(tmp_path):
    """What is compiled here, the processes need not compile again."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    # Of what is imported now: whoever edits a file meanwhile changes no run.
    code_digest()
    return tmp_path


WITHIN = 30
"""Seconds within which all end when one does."""


def compute(out, task=tiny_task.line, before=lambda: None, shard_rows_from=None, **settings):
    """Begins the run in `out`, or goes on with it, on all devices of all processes."""
    before()
    config = {"insecure_seed": 1, "checkpoint_seconds": 0.0, **settings}
    placement = Placement.default(shard_rows_from=shard_rows_from)
    if out.exists():
        return run.resume(out, task, placement=placement)
    return run.run(task, tiny_task.config_of(**config), out, placement=placement)


def fork(work, log):
    """Runs `work` in a forked process, which ends as a command does; returns its number."""
    child = os.fork()
    if child:
        return child
    status = 2
    with contextlib.suppress(BaseException), open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
        try:
            work()
            status = 0
        except Stopped as error:
            status = STOPPED
            print(error, file=sys.stderr)
        except (ValueError, OSError) as error:
            print(error, file=sys.stderr)
        except SystemExit as error:
            status = error.code
        except BaseException:
            import traceback

            traceback.print_exc()
    os._exit(status)


class Run:
    """Processes of one run, which are under way."""

    def __init__(self, out, count, *, devices=1, watchdog=600.0, **how):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]

        def work(index):
            address = f"127.0.0.1:{port}"
            jax.config.update("jax_num_cpu_devices", devices)
            with together(address, count, index, watchdog_seconds=watchdog, out=out):
                compute(out, **how.get("of", {}).get(index, {}), **how.get("all", {}))

        self.out = out
        self.logs = [out.with_name(f"{out.name}-{index}-{port}.log") for index in range(count)]
        self.pids = [
            fork(lambda index=index: work(index), log) for index, log in enumerate(self.logs)
        ]
        self.statuses = [None] * len(self.pids)

    def trainer(self, index):
        """Returns the process that trains, whose parent is its watchdog."""
        for _ in range(200):
            found = Path(f"/proc/{self.pids[index]}/task/{self.pids[index]}/children").read_text()
            if found.strip():
                return int(found.split()[0])
            time.sleep(0.05)
        raise ProcessLookupError

    def await_steps(self, stop):
        """Waits until the ledger declares steps up to `stop`."""
        ends = time.monotonic() + 120
        while time.monotonic() < ends:
            with contextlib.suppress(ValueError):
                if read(self.out / "ledger.jsonl").attempts[-1].steps.stop >= stop:
                    return
            time.sleep(0.02)
        self.end(0)
        pytest.fail(f"no step {stop}: {self.outputs()}")

    def end(self, within=120):
        """Waits for all; whoever does not end in time is killed. Returns the statuses."""
        ends = time.monotonic() + within
        while None in self.statuses:
            for index, pid in enumerate(self.pids):
                if self.statuses[index] is None:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        self.statuses[index] = os.waitstatus_to_exitcode(status)
            if time.monotonic() > ends:
                for index, pid in enumerate(self.pids):
                    if self.statuses[index] is None:
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
                        self.statuses[index] = "did not end"
            time.sleep(0.02)
        return self.statuses

    def outputs(self):
        return [log.read_text() for log in self.logs]


def go_on(out, count, **how):
    run = Run(out, count, **how)
    if run.end() != [0] * count:
        pytest.fail(f"{out}: {run.statuses}: {run.outputs()}")
    return out


def in_one_process(out, devices, **how):
    """The same run on as many devices of one process."""

    def work():
        jax.config.update("jax_num_cpu_devices", devices)
        compute(out, **how)

    log = out.with_name(f"{out.name}.log")
    _, status = os.waitpid(fork(work, log), 0)
    if status:
        pytest.fail(log.read_text())
    return out


def check_ended(run, but=()):
    """All ended in time, each that was not killed by itself with one line."""
    statuses = run.end(WITHIN)
    for index, (status, text) in enumerate(zip(statuses, run.outputs(), strict=True)):
        lines = text.splitlines()
        if index not in but:
            what = f"process {index} ended with status 2 and one line, not {status} and {lines}"
            if status != 2 or len(lines) != 1 or "`dpsgd resume" not in lines[0]:
                pytest.fail(what)
    if "did not end" in statuses:
        pytest.fail(f"{statuses}: {run.outputs()}")


def outcome(out, *, ledger=True):
    """What must be the same to the bit: model, diagnostics, declared steps and epsilon; ledger."""
    history = read(out / "ledger.jsonl")
    with np.load(out / "params.npz") as saved:
        params = {name: saved[name].tobytes() for name in saved.files}
    report = json.loads((out / "report.json").read_text())
    return (
        params,
        (out / "diagnostics_not_private.jsonl").read_text(),
        [(attempt.index, attempt.steps) for attempt in history.attempts],
        report["epsilon_upper"],
        (out / "ledger.jsonl").read_text() if ledger else None,
    )


def test_killed(folder):
    """Killed, and gone on with: as if nothing had been, and as in one process."""
    run = Run(folder / "run", 2, all={"before": slowly})
    run.await_steps(8)
    os.kill(run.pids[0], signal.SIGKILL)
    check_ended(run, but=(0,))
    alike = in_one_process(folder / "one", 2)
    go_on(folder / "run", 2)
    same = outcome(folder / "run", ledger=False) == outcome(alike, ledger=False)
    assert same


def test_stands_still(folder):
    """A process that is stopped, and one that hangs."""
    whole = outcome(go_on(folder / "whole", 2))
    for index in (0, 1):
        run = Run(folder / f"stopped-{index}", 2, all={"before": slowly})
        run.await_steps(8)
        os.kill(run.trainer(index), signal.SIGSTOP)
        check_ended(run)
        assert "was suspended" in run.outputs()[index]
        same = outcome(go_on(run.out, 2)) == whole
        assert same
    run = Run(folder / "hung", 2, watchdog=3.0, of={1: {"before": hanging}})
    check_ended(run)
    assert "no step for 3 s" in " ".join(run.outputs())
    assert outcome(go_on(run.out, 2)) == whole


def test_asked_to_stop(folder):
    """A request to one stops all, at one step, and nothing is lost."""
    whole = outcome(go_on(folder / "whole", 2))
    for number, name in ((signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")):
        run = Run(folder / name, 2, all={"before": slowly})
        run.await_steps(8)
        os.kill(run.pids[1], number)
        time.sleep(0.1)
        os.kill(run.pids[1], number)  # as `timeout` and others do
        assert run.end(WITHIN) == [STOPPED] * 2
        assert len(set(run.outputs())) == 1
        assert outcome(go_on(run.out, 2)) == whole


def test_what_differs(folder):
    """What the processes have not in common is named, and nothing is begun."""
    other = dataclasses.replace(tiny_task.line, seed=1)
    for name, mine in (
        ("config", {"learning_rate": 1e-2}),
        ("data", {"task": other}),
        ("l2_clip_norm", {"l2_clip_norm": 2.0}),
    ):
        run = Run(folder / name, 2, of={1: mine})
        assert run.end(WITHIN) == [2, 2]
        lines = {text.strip() for text in run.outputs()}
        assert len(lines) == 1
        assert name in lines.pop().split(";")[0]
        assert not run.out.exists()


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_other_number(folder, how):
    """Other processes go on after a stop in the attempt, and after a kill in another."""
    run = Run(folder / "run", 2, all={"before": slowly, "insecure_seed": None})
    run.await_steps(8)
    planned = json.loads((run.out / "guarantee.json").read_text())["epsilon_upper"]
    if how == "stopped":
        os.kill(run.pids[1], signal.SIGTERM)
        assert run.end(WITHIN) == [STOPPED] * 2
    else:
        os.kill(run.trainer(1), signal.SIGKILL)
        check_ended(run)
    assert (run.out / STOP).exists() == (how == "stopped")
    go_on(run.out, 3)
    *_, steps, epsilon, _ = outcome(run.out)
    if how == "stopped":
        assert len(steps) == 1
        assert epsilon == planned
    else:
        assert [number for number, _ in steps] == [0, 1]
        assert epsilon > planned
    assert not (run.out / STOP).exists()


def test_between_line_and_sum(folder):
    """Process 0 dies when a block is declared, and before its sum is made."""
    whole = outcome(go_on(folder / "whole", 2))
    run = Run(folder / "run", 2, of={0: {"before": dying}})
    check_ended(run, but=(0,))
    declared = read(run.out / "ledger.jsonl").attempts[-1].steps.stop
    saved = max(int(path.stem) for path in (run.out / "checkpoints").glob("*.checkpoint"))
    assert (declared, saved) == (12, 8)
    assert outcome(go_on(run.out, 2)) == whole


def test_calibrated(folder):
    """Sums over all rows after the last step."""
    calibrations.calibration_sums = lambda kind, num_examples, **about: FullSums(3, 4.0)
    how = {"task": tiny_task.calibrated, "calibration": "platt"}
    run = Run(folder / "run", 2, all=how)
    assert run.end() == [0, 0]
    alike = in_one_process(folder / "one", 2, **how)
    same = outcome(run.out, ledger=False) == outcome(alike, ledger=False)
    assert same


def test_sharded(folder):
    """A table and its moments whose rows lie in both processes: checkpoints of parts."""
    how = {"task": tiny_task.Line(width=8192), "shard_rows_from": 1}
    whole = outcome(go_on(folder / "whole", 2, all=how))
    alike = outcome(in_one_process(folder / "one", 2, **how), ledger=False)
    assert outcome(folder / "whole", ledger=False) == alike
    run = Run(folder / "run", 2, all={**how, "before": slowly})
    run.await_steps(16)
    os.kill(run.trainer(1), signal.SIGKILL)
    check_ended(run)
    newest = sorted((run.out / "checkpoints").glob("*.checkpoint"))[-1]
    part = newest.with_name(f"{newest.stem}.part-1-of-2")
    part.write_bytes(part.read_bytes()[:-1])
    assert outcome(go_on(run.out, 2, all=how)) == whole
    assert not (run.out / "checkpoints").exists()


@pytest.mark.parametrize("devices", [1, 2])
def test_lazy(folder, devices):
    """One dies between two flushes, and they go on from the last."""
    words = tiny_task.Words(words=2_000)
    given = {"tables_learning_rate": 1.0, "tables_momentum": 0.9, "flush_every": 12}
    how = {"task": words, "tables": "lazy", **given}
    alike = outcome(in_one_process(folder / "one", 2 * devices, **how), ledger=False)
    whole = outcome(go_on(folder / "whole", 2, devices=devices, all=how))
    assert outcome(folder / "whole", ledger=False) == alike

    run = Run(folder / "run", 2, devices=devices, all={**how, "before": slowly})
    run.await_steps(20)
    os.kill(run.trainer(1), signal.SIGKILL)
    check_ended(run)
    assert outcome(go_on(run.out, 2, devices=devices, all=how)) == whole


@pytest.mark.parametrize("count", [2, 4])
def test_shards(folder, count):
    """Each process has shards of its own, and of all other rows NaN."""
    for kind in ("poisson", "balls-and-bins", "shuffle", "deterministic"):
        how = {"sampler": SETTINGS[kind](batch_size=16, epochs=3, num_shards=count)}
        found = outcome(
            go_on(folder / f"run-{kind}", count, all={**how, "task": tiny_task.held}), ledger=False
        )
        alike = outcome(in_one_process(folder / f"one-{kind}", count, **how), ledger=False)
        assert found == alike
    run = Run(folder / "run", count, all={**how, "task": tiny_task.held, "before": slowly})
    run.await_steps(8)
    os.kill(run.pids[1], signal.SIGKILL)
    check_ended(run, but=(1,))
    again = outcome(go_on(run.out, count, all={"task": tiny_task.held}), ledger=False)
    assert again == found


SHARDS = {"sampler": SETTINGS["balls-and-bins"](batch_size=16, epochs=3, num_shards=2)}


def noise_of_the_first_alone():
    scales = mechanism.Mechanism.scales

    def silent(self):
        found = scales(self)
        if jax.process_index():
            found = dataclasses.replace(found, noise_stddev=found.noise_stddev * 0)
        return found

    mechanism.Mechanism.scales = silent


def another_program():
    """In the second process the noise is left out of the very program."""
    if jax.process_index():
        privatize = algorithm.privatize

        def without(total, noise_state, noise_key, step, scales):
            silent = dataclasses.replace(scales, noise_stddev=scales.noise_stddev * 0)
            return privatize(total, noise_state, noise_key, step, silent)

        algorithm.privatize = without


def noise_of_each():
    """Each process has noise of its own, and so a model of its own."""
    noise_key = RootKey.noise_key
    RootKey.noise_key = lambda root, attempt=0: noise_key(root, attempt + jax.process_index())


def a_shard_for_both():
    """Both processes draw the first shard, and nobody the second."""
    placement_module.Placement.shards = lambda self, sampler: range(1)


def batch_of_each():
    """Each process takes the first's part of the batch, which counts twice."""
    put_parts = placement_module.Placement.put_parts

    def repeated(self, tree, shardings):
        if not isinstance(tree, IndexBlock):
            first = multihost_utils.broadcast_one_to_all(jax.tree.map(np.asarray, tree))
            tree = jax.tree.map(np.asarray, first)
        return put_parts(self, tree, shardings)

    placement_module.Placement.put_parts = repeated


MUTANTS = {
    "noise of the first alone": (
        noise_of_the_first_alone,
        "process 1 and process 0 differ in scales",
    ),
    "another program": (another_program, "process 1 and process 0 differ in program"),
    "noise of each": (noise_of_each, "every device has the same state"),
    "a shard for both": (a_shard_for_both, "the audit found"),
    "batch of each": (batch_of_each, "the audit found"),
}


@pytest.mark.parametrize("name", ["sound", *MUTANTS])
def test_mutants(folder, name):
    """With a planted bug of several processes the run is refused, and says why."""
    before, why = MUTANTS.get(name, (lambda: None, None))
    run = Run(folder / "run", 2, all={"before": before, "audit": True, **SHARDS})
    assert run.end(300) == ([0, 0] if why is None else [2, 2]), run.outputs()
    if why:
        assert why in " ".join(run.outputs())
        assert not (run.out / "report.json").exists()


def slowly():
    """Has each block take a while, so that there is time to be killed in."""
    job.train_blocks = tiny_task.watched(lambda *block: time.sleep(0.2))


def hanging():
    """Has the third block take forever."""
    job.train_blocks = tiny_task.watched(lambda number, block: time.sleep(1000 * (number == 2)))


def dying():
    """Dies when the third block is declared, before anybody hears of it."""
    append = Ledger._append

    def append_and_die(self, body):
        append(self, body)
        if body.get("declare", [0])[0] == 8:
            os.kill(os.getpid(), signal.SIGKILL)

    Ledger._append = append_and_die
