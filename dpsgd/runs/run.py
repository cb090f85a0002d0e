"""`Run`: one run of a task in a directory, from its plan to the model and the guarantee it earned.

**Several processes** (`dpsgd.runs.processes`) call the methods here alike, and compute alike.
Process 0 alone writes what is here, and the ledger before any process takes part in a block; the
others read the root secret and the ledger in the directory that all of them share. What depends on
time or on signals is decided once for all. A process that fails ends all of them.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from dpsgd.engine import batch_files
from dpsgd.engine.batch_files import Draw
from dpsgd.engine.placement import Placement, on_one_device
from dpsgd.files import make_folder
from dpsgd.noise.keys import RootKey
from dpsgd.runs import report
from dpsgd.runs.checkpoint import Checkpoint
from dpsgd.runs.directory import CALIBRATION, DATA, RunDirectory
from dpsgd.runs.fingerprint import environment, origin
from dpsgd.runs.history import NO_HEAD
from dpsgd.runs.job import Job
from dpsgd.runs.journal import DirectoryJournal, check_batches_can_be_read, draw_of, numbers
from dpsgd.runs.ledger import Ledger
from dpsgd.runs.log import MetricWriter, Stages
from dpsgd.runs.plan import Asked, Execution, planned, resumed
from dpsgd.runs.processes import Processes
from dpsgd.runs.result import FinishedRun, proved
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.stop import stop_requests
from dpsgd.runs.task import Task

PyTree = Any
Progress = Callable[[str], None]


class Run:
    """A run of a task in a directory: begun, trained in one or more attempts, and finished.

    Attributes:
      folder: Its directory.
    """

    def __init__(
        self,
        folder: RunDirectory,
        task: Task | None,
        execution: Execution,
        job: Job | None = None,
    ) -> None:
        """Holds a run; use `create` and `open`."""
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
        log: MetricWriter | None = None,
    ) -> Run:
        """Makes the directory of a run that takes no step yet; `train` does.

        What the spec leaves open is chosen now, by what is public alone, and recorded. Everything
        that can be refused is refused before the directory is made.

        Args:
          task: What is trained.
          spec: How it is trained.
          out: The run directory; an existing one is never touched.
          name: By which `open` finds the task again, "module:object"; by default its class, if it
            is a dataclass of JSON values.
          placement: On which devices it is trained; by default one.
          started: When its work began, by `time.monotonic`; by default now.
          progress: Called with one line of text whenever there is something to tell.
          log: Where steps, epsilon so far and throughput go, besides `training_log.csv`.

        Raises:
          FileExistsError: if the run directory exists; it is left as it is.
          TypeError: if `spec` is no `RunSpec`.
          ValueError: for a task or a spec that cannot be run or cannot be guaranteed.
        """
        if not isinstance(spec, RunSpec):
            raise TypeError(f"a run takes a task and then its RunSpec, got a {type(spec).__name__}")
        out = Path(out)
        execution = Execution(placement, Stages(started), progress, log)
        RunDirectory.refuse_existing(out)
        plan = planned(spec, task, name, execution)
        if Processes.current().first:
            if spec.insecure_seed is None:
                root = RootKey.from_entropy()
            else:
                root = RootKey.from_insecure_seed(spec.insecure_seed)
            terms = plan.job.terms(plan.record, plan.digest, root)
            with RunDirectory.create(out) as made:
                made.write_json("config.json", plan.record)
                made.write_json("environment.json", environment())
                made.write_json("guarantee.json", plan.guarantee.record())
                made.write_json(DATA, {"data": [plan.digest]})
                with Ledger.create(made.ledger_path, terms) as ledger:
                    root.begin_run(ledger.history.name)
                    ledger.audited(plan.audit)
                root.save(made.root_path)
        return cls(RunDirectory(out), plan.job.task, execution, plan.job)

    @classmethod
    def open(
        cls,
        out: str | os.PathLike[str],
        task: Task | None = None,
        *,
        placement: Placement | None = None,
        started: float | None = None,
        progress: Progress = lambda line: None,
        log: MetricWriter | None = None,
    ) -> Run:
        """Opens the run in a directory, which `train` resumes from its last checkpoint.

        `task` is by default made again of what the configuration says; all else is as for `create`.
        Other devices than before add up in another order, so that an attempt begins and steps that
        were declared already count once more.

        Raises:
          FileNotFoundError: if there is no run.
        """
        folder = RunDirectory.open(Path(out), finished=False)
        return cls(folder, task, Execution(placement, Stages(started), progress, log))

    def train(self) -> Run:
        """Trains to the end, evaluates, and writes model and report; returns this run.

        No step is replayed: a batch is a function of seed and step. The ledger decides whether
        declared steps are repeated bit for bit, or taken anew and counted again (`Ledger.resume`).

        Raises:
          FileNotFoundError: if the root secret or the data of the run are gone.
          ValueError: if ledger, checkpoints, batches or data are damaged, another process is at it,
            or it cannot resume as its guarantee assumes.
          OSError: if the disk is full; `train` then resumes.
          Stopped: if SIGTERM or SIGINT asked for it; `train` then resumes.
        """
        if not self._finished():
            with self._resumed() as (job, ledger, root, checkpoint):
                self._record = self._finish(job, ledger, root, checkpoint)
        return self

    def report(self) -> dict[str, Any]:
        """Returns what `report.json` of the finished run holds: guarantee, metrics and others.

        Raises:
          FileNotFoundError: if it is not finished.
          ValueError: if its files are damaged, or do not belong together.
        """
        return self._record or FinishedRun.read(self.folder.path).record

    def draw(
        self,
        path: Path,
        write: Callable[[Path, Draw, int, PyTree], list[str]] = batch_files.draw_here,
    ) -> int | None:
        """Draws the batches of all steps that the run has left, and returns how many files.

        `train` then reads them in their order in place of rows at random, to the same bits. They
        are those of the attempt in which the run would resume, which begins by this if it must: if
        anything that an attempt depends on changes afterwards, they are refused, and drawn again.
        As secret as the seed, they are destroyed when the run ends.

        Args:
          path: Folder to make for them; if batches of this run lie there, others take their place.
          write: Writes the files of a draw with this seed from these rows, and returns their
            SHA-256.

        Returns:
          The number of files; None if the run is finished.

        Raises:
          FileExistsError: if there is something else at `path`.
          ValueError: if the run reads no rows from the host, or as for `train`.
          OSError: as for `train`.
        """
        if self._finished():
            return None
        with self._resumed() as (job, ledger, root, checkpoint):
            check_batches_can_be_read(job)
            history, step = ledger.history, int(checkpoint.state.step) if checkpoint else 0
            of = draw_of(job, history, step)
            if (before := self.folder.batches) is not None:
                batch_files.forget(before, history.name)
            batch_files.refuse_existing(path)  # what lies there is not noted, nor ever removed
            self.folder.note_batches(path)
            seed = root.sampling_seed(of.attempt)
            make_folder(path, 0o700)
            try:
                self._execution.progress(
                    f"drawing the batches of steps {step:,} to {of.sampler.num_steps:,}"
                )
                digests = write(path, of, seed, job.data)
                batch_files.write_manifest(path, of, seed, digests, job.data)
            except BaseException:
                batch_files.forget(path, history.name)
                raise
            return of.num_files

    def _finished(self) -> bool:
        if not self.folder.finished:
            return False
        self.report()
        if Processes.current().first:
            self.folder.forget()  # in case the run died just before it did
        self._execution.progress("the run is finished")
        return True

    @contextmanager
    def _resumed(self) -> Iterator[tuple[Job, Ledger, RootKey, Checkpoint | None]]:
        """Holds the ledger; yields the job, root and checkpoint of what is left of the run."""
        processes, job, self._job = Processes.current(), self._job, None
        asked = None if job else Asked(self.folder, self._execution.progress)
        with Ledger.open(self.folder.ledger_path, processes) as ledger:
            self.folder.history()  # refuses a ledger that is older than the checkpoints
            root = self.folder.root()
            try:
                root.begin_run(ledger.history.name)
            except ValueError as error:
                raise ValueError(f"{self.folder.root_path}: {error}") from None
            # Others' noise would be another.
            processes.check_alike({"root secret": root.blind("processes")})
            if job is not None and ledger.history.untouched:
                yield job, ledger, root, None  # it was planned, compiled and audited just now
                return
            if asked is None:  # another process was at it since
                asked = Asked(self.folder, self._execution.progress)
            job, checkpoint = resumed(self.folder, asked, ledger, root, self._task, self._execution)
            yield job, ledger, root, checkpoint

    def _finish(
        self, job: Job, ledger: Ledger, root: RootKey, checkpoint: Checkpoint | None
    ) -> dict[str, Any]:
        """Trains from `checkpoint` to the end, evaluates, and writes model and report."""
        folder, (_, stages, progress, _), record = self.folder, self._execution, None
        stages.begin("train")
        last = checkpoint or Checkpoint(job.start(), NO_HEAD, 0.0)
        with _full_disk_explained(folder):
            with stop_requests() as stop:
                journal = DirectoryJournal(job, folder, ledger, last, stop, self._execution)
                state = job.train(last.state, root, journal)
            params = on_one_device(state.params)
            processes = Processes.current()
            if processes.first:
                stages.begin("evaluate")
                released = ledger.history.released
                known = released and folder.params_path.exists()
                if not (known and folder.params_digest() == released):
                    folder.write_params(params)
                ledger.release(folder.params_digest())
                progress("evaluating")
                metrics = numbers(job.task.metrics(params))
                stages.begin("accounting")
                sampler = job.mechanism.sampler
                rate = sampler.num_steps * sampler.expected_batch_size / journal.seconds
                record = {
                    **proved(ledger.history),
                    "ledger_head": ledger.history.head,
                    "metrics": metrics,
                    "num_params": sum(leaf.size for leaf in jax.tree.leaves(job.params)),
                    "calibration": folder.read_json(CALIBRATION) if job.refinement else None,
                    "stage_seconds": stages.seconds(),
                    "training_seconds": journal.seconds,
                    "examples_per_second": rate,
                }
                journal.log.write(job.mechanism.num_steps, record["epsilon_upper"], rate)
                folder.write_json("guarantee.json", ledger.history.guarantee().record())
                config = folder.read_json("config.json")
                folder.write_text("report.md", report.markdown(record, config, origin()))
                folder.write_json("report.json", record)
                folder.forget()
        return processes.share(record, patience=math.inf)


def run(task: Task, spec: RunSpec, out: str | os.PathLike[str], **how: Any) -> dict[str, Any]:
    """Trains `task` as `spec` says in a new directory, and returns its report: see `Run`."""
    return Run.create(task, spec, out, **how).train().report()


def resume(out: str | os.PathLike[str], task: Task | None = None, **how: Any) -> dict[str, Any]:
    """Resumes the run in `out` from its last checkpoint, and returns its report: see `Run`."""
    return Run.open(out, task, **how).train().report()


@contextmanager
def _full_disk_explained(folder: RunDirectory) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(
            f"the disk is full; nothing is lost: make room, and `dpsgd resume {folder.path}` "
            "resumes it"
        ) from None
