"""Runs of several processes that are killed, stopped or made to fail, and go on.

    python process_driver.py FOLDER SCENARIO [ARGUMENT ...]

Every process is forked from this one, which has imported what they need, and begun no thread.
Prints a line for each thing that was seen to hold; ends with status 1 at the first that does not.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import tiny_task

from dpsgd.runs import engine, job
from dpsgd.runs.fingerprint import code_digest
from dpsgd.runs.ledger import read
from dpsgd.runs.processes import together
from dpsgd.runs.stop import STOPPED, Stopped
from dpsgd.training.placement import Placement

WITHIN = 30
"""Seconds within which all end when one does."""


def compute(out, task=tiny_task.line, before=lambda: None, **settings):
    """Begins the run in `out`, or goes on with it, on all devices of all processes."""
    before()
    config = {"insecure_seed": 1, "checkpoint_seconds": 0.0, **settings}
    placement = Placement.default()
    if out.exists():
        return engine.resume(out, task, placement=placement)
    return engine.run(task, tiny_task.config_of(**config), out, placement=placement)


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

    def __init__(self, out, count, *, watchdog=600.0, port=None, **how):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = port or free.getsockname()[1]

        def work(index):
            address = f"127.0.0.1:{port}"
            with together(address, count, index, watchdog_seconds=watchdog, out=out):
                compute(out, **how.get("of", {}).get(index, {}), **how.get("all", {}))

        self.out, self.port = out, port
        self.logs = [out.with_name(f"{out.name}-{index}.log") for index in range(count)]
        self.pids = [
            fork(lambda index=index: work(index), log) for index, log in enumerate(self.logs)
        ]
        self.statuses = [None] * count

    def trainer(self, index):
        """Returns the process that trains, whose parent is its watchdog."""
        for _ in range(200):
            found = Path(f"/proc/{self.pids[index]}/task/{self.pids[index]}/children").read_text()
            if found.strip():
                return int(found.split()[0])
            time.sleep(0.05)
        sys.exit("no process trains")

    def await_steps(self, stop):
        """Waits until the ledger declares steps up to `stop`."""
        ends = time.monotonic() + 120
        while time.monotonic() < ends:
            with contextlib.suppress(ValueError):
                if read(self.out / "ledger.jsonl").generations[-1].steps.stop >= stop:
                    return
            time.sleep(0.02)
        self.end(0)
        sys.exit(f"no step {stop}: {self.said()}")

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

    def said(self):
        return [log.read_text() for log in self.logs]


def go_on(out, count, **how):
    run = Run(out, count, **how)
    if run.end() != [0] * count:
        sys.exit(f"{out}: {run.statuses}: {run.said()}")
    return out


def in_one_process(out, devices):
    """The same run on as many devices of one process."""

    def work():
        jax.config.update("jax_num_cpu_devices", devices)
        compute(out)

    log = out.with_name(f"{out.name}.log")
    _, status = os.waitpid(fork(work, log), 0)
    if status:
        sys.exit(log.read_text())
    return out


def check(holds, what):
    if not holds:
        sys.exit(f"this does not hold: {what}")
    print(what, flush=True)


def check_ended(run, but=()):
    """All ended in time, each that was not killed by itself with one line."""
    statuses = run.end(WITHIN)
    for index, (status, text) in enumerate(zip(statuses, run.said(), strict=True)):
        lines = text.splitlines()
        if index not in but:
            what = f"process {index} ended with status 2 and one line, not {status} and {lines}"
            if status != 2 or len(lines) != 1 or "`dpsgd resume" not in lines[0]:
                sys.exit(what)
    if "did not end" in statuses:
        sys.exit(f"{statuses}: {run.said()}")


def outcome(out, *, ledger=True):
    """What must be the same to the bit: model, diagnostics, declared steps and epsilon; ledger."""
    history = read(out / "ledger.jsonl")
    with np.load(out / "params.npz") as saved:
        params = {name: saved[name].tobytes() for name in saved.files}
    report = json.loads((out / "report.json").read_text())
    return (
        params,
        (out / "diagnostics_not_private.jsonl").read_text(),
        [(generation.index, generation.steps) for generation in history.generations],
        report["epsilon_upper"],
        (out / "ledger.jsonl").read_text() if ledger else None,
    )


def killed(folder):
    """Killed, and gone on with: as if nothing had been, and as in one process."""
    run = Run(folder / "run", 2, all={"before": slowly})
    run.await_steps(8)
    os.kill(run.pids[0], signal.SIGKILL)
    check_ended(run, but=(0,))
    print("the first was killed: the other ended, in one line")
    alike = in_one_process(folder / "one", 2)
    go_on(folder / "run", 2)
    same = outcome(folder / "run", ledger=False) == outcome(alike, ledger=False)
    check(same, "two processes that were killed made what two devices of one did, bit for bit")


def slowly():
    """Has each block take a while, so that there is time to be killed in."""
    blocks = engine.train_blocks

    def slow(*arguments, **options):
        for block in blocks(*arguments, **options):
            time.sleep(0.2)
            yield block

    engine.train_blocks = slow


SCENARIOS = {"killed": killed}

if __name__ == "__main__":
    folder, scenario, *arguments = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    job.BLOCK_STEPS = 4
    jax.config.update("jax_compilation_cache_dir", str(Path(folder) / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    code_digest()  # of what is imported now: whoever edits a file meanwhile changes no run
    SCENARIOS[scenario](Path(folder), *arguments)
    children = os.times()
    print(f"{children.user + children.children_user:.1f} s", flush=True)
