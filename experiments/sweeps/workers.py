"""Workers: several runs at once, each in a process with its own cores.

On a CPU this is the fastest way to train small models. A step of the small preset (batch 1,024)
takes 5.2 ms of CPU time in a process with one core, 6.3 ms with two cores for one run, and 6.0 ms
per run if `vmap` steps three seeds at once: its work fills one core and is too small to split. Each
process has its share of the cores, usually one, and knows of no others, so that a run's numbers do
not depend on other runs.

A process carries out many runs and keeps its compiled programs. It ends with its parent; an
interrupted run resumes from its checkpoint when the sweep is started again.
"""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Literal

from dpsgd.runs.spec import RunSpec
from dpsgd.runs.stop import Stopped, stop_requests
from dpsgd.runs.task import Task, load, rows_of
from experiments.cli.console import counted
from experiments.cli.errors import mendable
from experiments.processes import SPAWN, deaf_to_interrupts, each, end_with_parent
from experiments.sweeps.config import PlannedRun
from experiments.tasks import TASKS


@dataclass(frozen=True)
class Message:
    """Message of a process about its current run."""

    kind: Literal["progress", "finished", "stopped", "failed"]
    text: str = ""


def most_useful() -> int:
    """Returns the fastest number of concurrent runs.

    It is one per core, or one on an accelerator.
    """
    # In another process: asking JAX for its devices may take all their memory.
    (backend,) = each(_backend, [None], 1)
    return (len(_cores()) or os.cpu_count() or 1) if backend == "cpu" else 1


def _backend(_: None) -> str:
    import jax

    return jax.default_backend()


def metric_names(task: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns metric names, by measuring an untrained model."""
    (names,) = each(_metric_names, [task], 1)
    return names


def _metric_names(record: Mapping[str, Any]) -> tuple[str, ...]:
    task = _loaded(json.dumps(record, sort_keys=True))
    return tuple(task.metrics(task.init(0)))


def time_runs(task: Mapping[str, Any], specs: Sequence[RunSpec], workers: int) -> Iterator[Any]:
    """Yields a worker's device, then seconds per step.

    Args:
      task: Record of the task.
      specs: Configurations to time.
      workers: Number of runs at once.
    """
    cores = _shares(workers)[0]
    return each(_time_run, [(task, spec, cores) for spec in (None, *specs)], 1)


def _time_run(request: tuple[Mapping[str, Any], RunSpec | None, set[int]]) -> str | float:
    record, spec, cores = request
    if cores:
        os.sched_setaffinity(0, cores)
    if spec is None:
        import jax

        kind = jax.devices()[0].device_kind
        return counted(len(cores), "core") + " of a CPU" if kind == "cpu" else kind
    from dpsgd.runs.dry_run import timed

    task = _loaded(json.dumps(record, sort_keys=True))
    return timed(task, spec, rows_of(task)).step


def carry_out(
    task: Mapping[str, Any],
    runs: Sequence[tuple[PlannedRun, Hashable]],
    workers: int,
    progress: Callable[[str], None],
) -> Iterator[tuple[PlannedRun, Message]]:
    """Carries out runs in worker processes; yields their outcomes.

    A run begins, or resumes from its last checkpoint, with the task that the process makes from its
    record. A process keeps its compiled programs.

    Args:
      task: Record of the task.
      runs: Planned runs, each with a key of its compiled program.
      workers: Number of processes.
      progress: Function of one line of text.

    Raises:
      Stopped: If SIGTERM or SIGINT asked for it, after the runs have saved their state.
    """
    todo = list(runs)
    pool: list[_Worker] = []
    num_done = 0
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
                        num_done += message.kind == "finished"
                        yield run, message
                statuses = [f"{w.run.out.name}: {w.status}" for w in busy if w.run is not None]
                progress("; ".join([f"{num_done} of {len(runs)} runs done", *statuses]))
            if stop():
                raise Stopped(f"stopped with {counted(len(runs) - num_done, 'run')} left")
    finally:
        for worker in pool:
            worker.close()


def next_run(todo: list[tuple[Any, Hashable]], worker: Any, pool: Sequence[Any]) -> Any:
    """Takes the next run for a worker from `todo`.

    Runs of its compiled program come first, then runs of a program that no other worker has.

    Args:
      todo: Remaining runs with the keys of their programs.
      worker: Worker that is free.
      pool: All workers.
    """
    programs = {w.program for w in pool}
    entry = min(todo, key=lambda entry: (entry[1] != worker.program, entry[1] in programs))
    todo.remove(entry)
    run, worker.program = entry
    return run


class _Worker:
    """Process with its own cores, and its current run."""

    def __init__(self, task: Mapping[str, Any], cores: set[int]):
        self.settings = task, cores
        self.run: PlannedRun | None = None
        self.program: Hashable = None
        self.status = ""
        self.asked_to_stop = False
        self._start()

    def _start(self) -> None:
        self.connection, child_end = SPAWN.Pipe()
        self.process: SpawnProcess = SPAWN.Process(target=_serve, args=(child_end, *self.settings))
        with deaf_to_interrupts():  # Ctrl-C reaches the parent, which asks by SIGTERM
            self.process.start()
        child_end.close()

    def begin(self, run: PlannedRun) -> None:
        """Sends a run to the process."""
        if not self.process.is_alive():  # the run before was the end of it
            self.close()
            self._start()
        self.run, self.status = run, "starting"
        self.connection.send(run)

    def listen(self) -> tuple[PlannedRun, Message]:
        """Returns the run, and the process's message or its end."""
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
        """Asks the process to save its run and stop.

        Later calls do nothing, because a second signal would end the process unsaved.
        """
        if not self.asked_to_stop:
            self.process.terminate()
        self.asked_to_stop = True

    def close(self) -> None:
        """Ends the process, and its run if it has one."""
        self.connection.close()
        if self.run is not None:
            self.ask_to_stop()
        self.process.join()


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _shares(workers: int) -> list[set[int]]:
    """Returns equal shares of the cores, one set per worker; empty sets for any core."""
    cores = _cores()
    size = len(cores) // workers
    return [set(cores[i * size : (i + 1) * size]) for i in range(workers)]


def _serve(connection: Connection, task: Mapping[str, Any], cores: set[int]) -> None:
    """Carries out runs in a worker process until the parent closes the connection."""
    if cores:
        os.sched_setaffinity(0, cores)
    end_with_parent()

    def say(line: str) -> None:
        connection.send(Message("progress", line))

    while True:
        try:
            run: Any = connection.recv()
        except EOFError:
            return
        connection.send(_outcome(task, run, say))


@functools.lru_cache(maxsize=1)
def _loaded(record: str) -> Task:
    """Returns the one task of a process: programs are shared by runs of the same object."""
    return load(json.loads(record), "the sweep", kinds=TASKS)


def _outcome(record: Mapping[str, Any], planned: PlannedRun, say: Callable[[str], None]) -> Message:
    """Carries out or resumes one run; returns its outcome."""
    from dpsgd.runs.run import resume, run

    try:
        task = _loaded(json.dumps(record, sort_keys=True))
        if planned.out.exists():
            resume(planned.out, task, progress=say)
        else:
            run(task, planned.spec, planned.out, name=record["name"], progress=say)
    except Stopped as stopped:
        return Message("stopped", str(stopped))
    except Exception as error:
        line = mendable(error)
        if line is None:
            raise
        return Message("failed", line)
    return Message("finished")
