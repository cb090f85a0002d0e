"""Several runs at once, each in a process and on processors of its own.

On a CPU that is the fastest way to train small models. A step of the small preset (batch 1,024)
takes 5.2 ms of CPU time in a process with one core, 6.3 ms with two cores for the one run, and
6.0 ms a run where `vmap` steps three seeds at once: its work is large enough to fill a core, and
too small to be split. So each process has its share of the cores, one as a rule; and since it knows
of no others, a run's numbers do not depend on what else is running.

A process goes through many runs and keeps its compiled programs. It ends with its parent; a run
that is cut off resumes from its checkpoint when the sweep is started again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Literal

from dpsgd.runs.spec import RunSpec
from dpsgd.runs.stop import Stopped, stop_requests
from experiments.cli.console import counted
from experiments.cli.errors import mendable
from experiments.processes import SPAWN, deaf_to_interrupts, each
from experiments.sweeps.config import PlannedRun
from experiments.tasks import TASKS


@dataclass(frozen=True)
class Message:
    """What a process says of the run that it is at."""

    kind: Literal["progress", "finished", "stopped", "failed"]
    text: str = ""


def most_useful() -> int:
    """Returns how many runs at once are fastest: one a core, or one on an accelerator."""
    # In a process of its own: one that asks JAX for its devices may take all their memory.
    (backend,) = each(_backend, [None], 1)
    return (len(_cores()) or os.cpu_count() or 1) if backend == "cpu" else 1


def _backend(_: None) -> str:
    import jax

    return jax.default_backend()


def metric_names(task: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns what a task measures of a model, by its record: of an untrained one, elsewhere."""
    (found,) = each(_metric_names, [task], 1)
    return found


def _metric_names(record: Mapping[str, Any]) -> tuple[str, ...]:
    from dpsgd.runs.task import load

    task = load(record, "the sweep", kinds=TASKS)
    return tuple(task.metrics(task.init(0)))


def time_runs(task: Mapping[str, Any], specs: Sequence[RunSpec], workers: int) -> Iterator[Any]:
    """Yields the name of one worker's device, and then the seconds of a step of each run there."""
    cores = _shares(workers)[0]
    return each(_timed, [(task, spec, cores) for spec in (None, *specs)], 1)


def _timed(asked: tuple[Mapping[str, Any], RunSpec | None, set[int]]) -> str | float:
    record, spec, cores = asked
    if cores:
        os.sched_setaffinity(0, cores)
    if spec is None:
        import jax

        kind = jax.devices()[0].device_kind
        return counted(len(cores), "core") + " of a CPU" if kind == "cpu" else kind
    from dpsgd.runs.plan import timed
    from dpsgd.runs.task import load, rows_of

    task = load(record, "the sweep", kinds=TASKS)
    return timed(task, spec, rows_of(task)).step


def carry_out(
    task: Mapping[str, Any],
    runs: Sequence[tuple[PlannedRun, Hashable]],
    workers: int,
    progress: Callable[[str], None],
) -> Iterator[tuple[PlannedRun, Message]]:
    """Carries out runs in `workers` processes; yields each with how it ended, as it ends.

    A run begins, or resumes from its last checkpoint, on the task that each process makes of the
    record of it. A process keeps its compiled programs: of each run, what decides its program is
    given beside it.

    Raises:
      Stopped: if SIGTERM or SIGINT asked for it, after the runs have saved where they are.
    """
    todo = list(runs)
    pool: list[_Worker] = []
    done = 0
    try:
        with stop_requests() as stop:
            for cores in _shares(workers)[: len(runs)]:
                pool.append(_Worker(task, cores))
            while True:
                for worker in pool:
                    if worker.run is None and todo and not stop():
                        worker.begin(next_run(todo, worker, pool))
                busy = [worker for worker in pool if worker.run is not None]
                if not busy:
                    break
                if stop():
                    for worker in busy:
                        worker.ask_to_stop()
                for connection in wait([worker.connection for worker in busy], timeout=0.5):
                    worker = next(w for w in busy if w.connection is connection)
                    run, message = worker.listen()
                    if message.kind != "progress":
                        done += message.kind == "finished"
                        yield run, message
                now = [f"{w.run.out.name}: {w.status}" for w in busy if w.run is not None]
                progress("; ".join([f"{done} of {len(runs)} runs done", *now]))
            if stop():
                raise Stopped(f"stopped with {counted(len(runs) - done, 'run')} left")
    finally:
        for worker in pool:
            worker.close()


def next_run(todo: list[tuple[Any, Hashable]], worker: Any, pool: Sequence[Any]) -> Any:
    """Takes a run off `todo`: of a worker's own `program`, else of one that no other is at."""
    others = {other.program for other in pool}
    one = min(todo, key=lambda one: (one[1] != worker.program, one[1] in others))
    todo.remove(one)
    run, worker.program = one
    return run


class _Worker:
    """A process with its own cores, and the run that it is at."""

    def __init__(self, task: Mapping[str, Any], cores: set[int]):
        self.settings = task, cores
        self.run: PlannedRun | None = None
        self.program: Hashable = None
        self.status = ""
        self.asked_to_stop = False
        self._start()

    def _start(self) -> None:
        self.connection, theirs = SPAWN.Pipe()
        self.process: SpawnProcess = SPAWN.Process(target=_serve, args=(theirs, *self.settings))
        with deaf_to_interrupts():  # Ctrl-C reaches the parent, which asks by SIGTERM
            self.process.start()
        theirs.close()

    def begin(self, run: PlannedRun) -> None:
        """Hands it a run."""
        if not self.process.is_alive():  # the run before was the end of it
            self.close()
            self._start()
        self.run, self.status = run, "starting"
        self.connection.send(run)

    def listen(self) -> tuple[PlannedRun, Message]:
        """Returns its run, and what it says of it, or how the process ended."""
        assert self.run is not None
        run = self.run
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            if code == -signal.SIGTERM:
                message = Message("stopped")
            else:
                message = Message("failed", f"its process ended with exit status {code}")
        if message.kind == "progress":
            self.status = message.text
        else:
            self.run = None
        return run, message

    def ask_to_stop(self) -> None:
        """Has it save its run and stop. Asked a second time it would end without saving."""
        if not self.asked_to_stop:
            self.process.terminate()
        self.asked_to_stop = True

    def close(self) -> None:
        """Lets the process end, or ends it where it is at a run that is no longer wanted."""
        self.connection.close()
        if self.run is not None:
            self.ask_to_stop()
        self.process.join()


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _shares(workers: int) -> list[set[int]]:
    """Returns each worker's cores: equally many, so that all compute alike; empty for any."""
    cores = _cores()
    size = len(cores) // workers
    return [set(cores[i * size : (i + 1) * size]) for i in range(workers)]


def _serve(connection: Connection, task: Mapping[str, Any], cores: set[int]) -> None:
    """The life of a worker process: a run after another, until the parent closes the connection."""
    if cores:
        os.sched_setaffinity(0, cores)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def say(line: str) -> None:
        connection.send(Message("progress", line))

    while True:
        try:
            one: Any = connection.recv()
        except EOFError:
            return
        connection.send(_outcome(task, one, say))


def _outcome(record: Mapping[str, Any], one: PlannedRun, say: Callable[[str], None]) -> Message:
    """Carries out or resumes one run; returns how it ended."""
    from dpsgd.runs.run import resume, run
    from dpsgd.runs.task import load

    try:
        task = load(record, one.out.name, kinds=TASKS)
        if one.out.exists():
            resume(one.out, task, progress=say)
        else:
            run(task, one.spec, one.out, name=record["name"], progress=say)
    except Stopped as stopped:
        return Message("stopped", str(stopped))
    except Exception as error:
        line = mendable(error)
        if line is None:
            raise
        return Message("failed", line)
    return Message("finished")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
