"""Runs of a task in a directory, from the plan to the guaranteed model.

**Several processes** (`dpsgd.runs.processes`) make the same calls and compute the same. Process 0
alone writes files, and writes the ledger before any process takes part in a block; the others read
the ledger in the shared directory. Decisions that depend on time or signals are made once for all
processes. A process that fails ends all of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import jax

from dpsgd.engine import batch_files
from dpsgd.engine.batch_files import Draw
from dpsgd.engine.copies import on_one_device
from dpsgd.engine.placement import Placement, check_placement
from dpsgd.files import FULL, file_sha256, make_folder
from dpsgd.runs.attempts import Stop
from dpsgd.runs.directory import BATCHES, CALIBRATION, DATA, RunDirectory
from dpsgd.runs.job import Job
from dpsgd.runs.journal import DirectoryJournal, numbers
from dpsgd.runs.ledger import Ledger
from dpsgd.runs.log import MetricWriter, Stages, writer_of
from dpsgd.runs.plan import Execution, plan_run, recorded_job
from dpsgd.runs.processes import Processes
from dpsgd.runs.result import Figures, FinishedRun, origin, proved, write_report
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.stop import stop_requests
from dpsgd.runs.task import TASKS, Task, find

PyTree = Any
Progress = Callable[[str], None]


class Run:
    """A run of a task in a directory, trained in one or more attempts.

    Attributes:
      folder: Run directory.
    """

    def __init__(
        self,
        folder: RunDirectory,
        task: Task | None,
        execution: Execution,
        job: Job | None = None,
    ) -> None:
        """Stores the parts of a run; use `create` or `open`."""
        self.folder: RunDirectory = folder
        self._task, self._execution, self._job = task, execution, job
        self._record: dict[str, Any] | None = None

    @classmethod
    def create(
        cls,
        task: Task,
        spec: RunSpec,
        out: str | os.PathLike[str],
        *,
        name: str | None = None,
        placement: Placement | None = None,
        started: float | None = None,
        progress: Progress = lambda line: None,
        log: MetricWriter | str | Path | None = None,
    ) -> Run:
        """Creates the directory of a run, whose training `train` begins.

        Open settings are chosen now, from public values alone, and recorded. Everything that can be
        refused is refused before the directory is made.

        Args:
          task: Task to train.
          spec: Settings of the run.
          out: Run directory to create; an existing one is never changed.
          name: Import name of the task for `open`, "module:object"; by default its class, if it is
            a dataclass of JSON values.
          placement: Devices to train on; by default one device.
          started: Start of the run's work by `time.monotonic`, in seconds; by default now.
          progress: Function of one line of text.
          log: Log besides `training_log.csv`, as in `dpsgd.train`.

        Raises:
          FileExistsError: if the run directory exists; it stays unchanged.
          TypeError: if `spec` is no `RunSpec`, or `placement` no `Placement`.
          ValueError: for a task or a spec that cannot be run or cannot be guaranteed.
        """
        if not isinstance(spec, RunSpec):
            raise TypeError(f"spec must be a RunSpec, got a {type(spec).__name__}")
        check_placement(placement)
        if name is not None:
            _check_name(name)
        out = Path(out)
        execution = Execution(placement, Stages(started), progress, writer_of(log))
        RunDirectory.refuse_existing(out)
        job = plan_run(spec, task, name, execution)
        execution.stages.begin("audit")
        job.audit(progress=progress)
        if Processes.current().first:
            _write_new(out, job)
        return cls(RunDirectory(out), job.task, execution, job)

    @classmethod
    def open(
        cls,
        out: str | os.PathLike[str],
        task: Task | None = None,
        *,
        placement: Placement | None = None,
        started: float | None = None,
        progress: Progress = lambda line: None,
        log: MetricWriter | str | Path | None = None,
    ) -> Run:
        """Opens a run directory, whose training `train` resumes.

        Devices, processes and versions may differ from earlier attempts.

        Args:
          out: Run directory.
          task: Task of the run; by default rebuilt from the configuration.
          placement: Devices to train on; by default one device.
          started: Start of this command's work by `time.monotonic`, in seconds; by default now.
          progress: Function of one line of text.
          log: Log besides `training_log.csv`, as in `dpsgd.train`.

        Raises:
          FileNotFoundError: if there is no run.
          TypeError: if `placement` is no `Placement`.
        """
        check_placement(placement)
        folder = RunDirectory.open(Path(out), finished=False)
        return cls(folder, task, Execution(placement, Stages(started), progress, writer_of(log)))

    def train(self) -> Run:
        """Trains to the end, and writes model and report.

        Lost steps are never repeated with their old noise: they are taken with new noise, and count
        again (`dpsgd.runs.attempts`).

        Raises:
          FileNotFoundError: if the data of the run are gone.
          ValueError: if ledger, checkpoints, batches or data are damaged, another process trains
            the run, or it cannot resume as its guarantee assumes.
          OSError: if the disk is full; `train` then resumes.
          Stopped: if SIGTERM or SIGINT asked for it; `train` then resumes.
        """
        if not self._finished():
            with self._resumed() as journal:
                self._record = self._finish(journal)
        return self

    def report(self) -> dict[str, Any]:
        """Returns the content of `report.json`: guarantee, metrics and others.

        Raises:
          FileNotFoundError: if the run is not finished.
          ValueError: if its files are damaged, or do not belong together.
        """
        return self._record or FinishedRun.read(self.folder.path).record

    def draw(
        self,
        path: Path,
        write: Callable[[Path, Draw, int, PyTree], list[str]] = batch_files.draw_here,
    ) -> int | None:
        """Draws the batches of all remaining steps into files.

        `train` then reads these batches instead of random rows. They belong to the attempt in which
        the run would resume; a new attempt begins now if one is needed. If the attempt is killed,
        its batches are refused, and must be drawn again. They are as secret as the seed, and
        destroyed when the run ends.

        Args:
          path: Folder to create; batches drawn earlier for this run are destroyed.
          write: Function that writes the files of a draw from (path, draw, seed, rows), and returns
            their SHA-256.

        Returns:
          The number of files; None if the run is finished.

        Raises:
          FileExistsError: if there is something else at `path`.
          ValueError: if the run reads no rows from the host, or as for `train`.
          OSError: as for `train`.
        """
        if self._finished():
            return None
        with self._resumed() as journal:
            draw, seed = journal.draw()
            history, step = journal.ledger.history, draw.first_step
            if (earlier := self.folder.batches) is not None:
                batch_files.forget(earlier, history.name)
            batch_files.refuse_existing(path)  # files of others are neither noted nor removed
            self.folder.write_json(BATCHES, {"path": str(path.absolute())})
            make_folder(path, 0o700)
            try:
                self._execution.progress(
                    f"drawing the batches of steps {step:,} to {draw.sampler.num_steps:,}"
                )
                digests = write(path, draw, seed, journal.job.data)
                batch_files.write_manifest(path, draw, seed, digests, journal.job.data)
                if not journal.keys.root.insecure:
                    self.folder.stop_file.write(Stop(history.attempts[-1].head, step, None, seed))
            except BaseException:
                batch_files.forget(path, history.name)
                raise
            return draw.num_files

    def _finished(self) -> bool:
        if not self.folder.finished:
            return False
        self.report()
        if Processes.current().first and self.folder.untidy:  # the run was killed before forget
            with Ledger.open(self.folder.ledger_path):  # refused while another process does this
                self.folder.forget()
        self._execution.progress("note: the run is finished, and no data are read")
        return True

    @contextmanager
    def _resumed(self) -> Iterator[DirectoryJournal]:
        """Locks the ledger against other processes, and begins or resumes the run."""
        folder, execution, processes = self.folder, self._execution, Processes.current()
        job, self._job = self._job, None
        config = None if job else folder.configuration(execution.progress)
        with Ledger.open(folder.ledger_path, processes) as ledger:
            folder.history()  # refuses a ledger that is older than the checkpoints
            if job is None:
                assert config is not None
                job = recorded_job(folder, config, ledger.history, self._task, execution)
            elif processes.first:  # another process may have replaced the run
                folder.check_data(job.digest)
            yield DirectoryJournal(folder, ledger, job, execution)

    def _finish(self, journal: DirectoryJournal) -> dict[str, Any]:
        """Trains to the end, evaluates, and writes model and report."""
        processes = Processes.current()
        self._execution.stages.begin("train")
        try:
            with stop_requests() as stop:
                state = journal.train(stop)
            params = on_one_device(state.params)
            record = self._release(journal, params) if processes.first else None
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise OSError(
                f"the disk is full; nothing is lost: free some space, then `dpsgd resume "
                f"{self.folder.path}` resumes the run"
            ) from None
        return processes.share(record, patience=math.inf)

    def _release(self, journal: DirectoryJournal, params: PyTree) -> dict[str, Any]:
        """Writes the model, records its release, evaluates it, and writes the report."""
        job, ledger = journal.job, journal.ledger
        folder, (_, stages, progress, _) = self.folder, self._execution
        stages.begin("evaluate")
        released = ledger.history.released
        path = folder.params_path
        if not (released and path.exists() and file_sha256(path) == released):
            folder.write_params(params)
        ledger.release(file_sha256(path))
        progress("evaluating")
        metrics = numbers(job.task.metrics(params))
        stages.begin("accounting")
        sampler = job.mechanism.sampler
        rate = sampler.num_steps * sampler.expected_batch_size / journal.seconds
        figures = Figures(
            metrics=metrics,
            num_params=sum(leaf.size for leaf in jax.tree.leaves(job.params)),
            calibration=folder.read_json(CALIBRATION) if job.refinement else None,
            stage_seconds=stages.seconds(),
            training_seconds=journal.seconds,
            examples_per_second=rate,
        )
        # Before the report, with which the run is finished.
        journal.log.write(job.mechanism.num_steps, proved(ledger.history)["epsilon_upper"], rate)
        record = write_report(folder, ledger.history, figures, origin())
        folder.forget()
        return record


def _write_new(out: Path, job: Job) -> None:
    """Writes the directory of a new run."""
    environment, drawing = job.environment(), job.drawing
    with RunDirectory.create(out) as directory:
        directory.write_json("config.json", dict(job.record))
        directory.write_json("environment.json", environment)
        directory.write_json("guarantee.json", job.guarantee.record())
        directory.write_json(DATA, {"data": job.digest})
        Ledger.create(directory.ledger_path, job.terms, drawing, environment).close()


def run(task: Task, spec: RunSpec, out: str | os.PathLike[str], **how: Any) -> dict[str, Any]:
    """Trains a task in a new directory, and returns its report.

    Args:
      task: Task to train.
      spec: Settings of the run.
      out: Run directory to create.
      **how: Further arguments of `Run.create`.
    """
    return Run.create(task, spec, out, **how).train().report()


def resume(out: str | os.PathLike[str], task: Task | None = None, **how: Any) -> dict[str, Any]:
    """Resumes a run, and returns its report.

    Args:
      out: Run directory.
      task: Task of the run; by default rebuilt from the configuration.
      **how: Further arguments of `Run.open`.
    """
    return Run.open(out, task, **how).train().report()


def _check_name(name: str) -> None:
    """Refuses a name by which a run's task cannot be found again.

    Args:
      name: "module:object", or the name of an installed package's task.

    Raises:
      ValueError: if there is no such object.
    """
    if not any(entry.name == name for entry in entry_points(group=TASKS)):
        try:
            find(name)
        except ValueError as error:
            raise ValueError(f"name of the task: {error}") from None
