"""What a run writes down in its directory as it goes: declarations, checkpoints, diagnostics."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax

from dpsgd.core.state import TrainState
from dpsgd.engine.batch_files import BatchFiles, Draw
from dpsgd.engine.loop import Block
from dpsgd.runs.checkpoint import Checkpoint
from dpsgd.runs.directory import BATCHES, CALIBRATION, RunDirectory
from dpsgd.runs.history import History
from dpsgd.runs.job import Job, Journal
from dpsgd.runs.ledger import Ledger
from dpsgd.runs.log import LOG, CsvWriter, TrainingLog
from dpsgd.runs.plan import Execution
from dpsgd.runs.processes import Processes
from dpsgd.runs.stop import REST, STEP, Stopped, report
from dpsgd.runs.task import arrays_digest


class DirectoryJournal(Journal):
    """The ledger, the checkpoints and the diagnostics of a run directory.

    Attributes:
      seconds: Time that was spent on training so far.
      log: Steps, epsilon so far and throughput, for people.
    """

    def __init__(
        self,
        job: Job,
        folder: RunDirectory,
        ledger: Ledger,
        last: Checkpoint,
        stop: Callable[[], bool],
        execution: Execution,
    ) -> None:
        self._job, self._folder, self._ledger, self._stop = job, folder, ledger, stop
        self._execution, self._processes = execution, Processes.current()
        self.name, self.attempt = ledger.history.name, ledger.history.attempts[-1].key
        self.flush_every = getattr(job.spec.tables, "flush_every", None)
        self.seconds = self._before = last.seconds
        self._first = self._done = int(last.state.step)
        self._started = self._saved = time.perf_counter()
        self._under_way: deque[Block] = deque()
        self._num_steps = job.mechanism.sampler.num_steps
        writers = [] if execution.log is None else [execution.log]
        self.log = TrainingLog([CsvWriter(folder.path / LOG, self._first), *writers])
        if self._first < self._num_steps:
            self.batches = _batches(job, folder, ledger.history, self._first)
            execution.progress(f"steps {self._first:,} to {self._num_steps:,}")
        elif self._first < job.mechanism.num_steps:
            self._begin_queries()

    def declare(self, steps: range) -> None:
        """Declares steps in the ledger.

        Queries are declared when the checkpoint of the last step is on the disk, so that a run that
        dies here resumes from these very parameters, and nothing releases them twice.
        """
        if steps.start == self._num_steps and self._processes.any(self._stop()):
            raise Stopped(
                f"stopped before the {self._job.mechanism.full_sums}, all of it saved: `dpsgd "
                f"resume {self._folder.path}` resumes it"
            )
        self._ledger.declare(steps)

    def keep(self, block: Block) -> bool:
        """Writes the diagnostics of blocks, and a checkpoint now and then and at the end."""
        processes, num_steps = self._processes, self._num_steps
        self._under_way.append(block)
        report(STEP)
        due = time.perf_counter() - self._saved >= self._job.spec.checkpoint_seconds
        stopping, due = map(any, zip(*processes.gather([self._stop(), due]), strict=True))
        # An attempt may begin where no noise is deferred: each such state of lazy tables is kept.
        flushed = bool(block.state.tables) and not block.state.pending
        save = due or stopping or flushed or block.steps.stop == num_steps
        # One block stays under way while the one before is written down, but for a checkpoint.
        while len(self._under_way) > (0 if save else 1):
            past = self._under_way.popleft()
            if processes.first:
                self._folder.append_diagnostics(past.steps.start, past.diagnostics)
            self._done = past.steps.stop
        elapsed, first, done = time.perf_counter() - self._started, self._first, self._done
        if done > first:
            left = elapsed / (done - first) * (num_steps - done)
            self._execution.progress(f"step {done:,} of {num_steps:,}, {left:.0f} s left")
            if processes.first and done < num_steps:
                batch = self._job.mechanism.sampler.expected_batch_size
                self.log.offer(done, self._epsilon, (done - first) * batch / elapsed)
        if save:
            _check_state(block.state, processes)
            self.seconds = self._before + elapsed
            self._save(block.state)
            self._saved = time.perf_counter()
        if done == num_steps:
            report(REST)
            self._begin_queries()
        elif stopping:
            raise Stopped(
                f"stopped at step {done:,} of {num_steps:,}, all of it saved: `dpsgd resume "
                f"{self._folder.path}` resumes it"
            )
        return False

    def keep_refined(self, state: TrainState, summary: Mapping[str, Any]) -> None:
        """Writes what the queries came to, and the checkpoint after the last one."""
        if self._processes.first:
            self._folder.write_json(CALIBRATION, numbers(summary))
        self._save(state)

    def _epsilon(self) -> float | None:
        """Returns the proved upper end of all that was declared; None where nothing is proved."""
        bound = self._ledger.history.guarantee().epsilon
        return None if bound is None else bound.upper

    def _begin_queries(self) -> None:
        if self._job.refinement is not None:
            self._execution.stages.begin("calibrate")
            self._execution.progress(f"calibrating by {self._job.mechanism.full_sums}")

    def _save(self, state: TrainState) -> None:
        head = self._ledger.history.head
        self._folder.checkpoints.save(Checkpoint(state, head, self.seconds))


def _batches(
    job: Job, folder: RunDirectory, history: History, step: int
) -> Callable[[int], BatchFiles] | None:
    """Returns what opens the batches that were drawn ahead, if any were."""
    if (path := folder.batches) is None:
        return None
    check_batches_can_be_read(job)

    def opened(seed: int) -> BatchFiles:
        try:
            return BatchFiles(path, draw_of(job, history, step), seed, job.data)
        except ValueError as error:
            raise ValueError(
                f"{error}; or remove {folder.path / BATCHES}, and the run draws its own"
            ) from None

    return opened


def _check_state(state: TrainState, processes: Processes) -> None:
    """Raises ValueError unless what all processes compute for themselves is the same in all."""
    if processes.count > 1:
        whole = [leaf for leaf in jax.tree.leaves(state) if leaf.is_fully_replicated]
        processes.check_alike({"state of training": arrays_digest(whole)})


def draw_of(job: Job, history: History, step: int) -> Draw:
    """Returns the draw of all steps from `step` on, for the attempt in which the run resumes."""
    key = history.attempts[-1].key
    sampler = job.mechanism.sampler
    return Draw.plan(sampler, job.data, run=history.name, attempt=key, first_step=step)


def check_batches_can_be_read(job: Job) -> None:
    """Raises ValueError unless a run can read batches from files."""
    if Processes.current().count > 1:
        raise ValueError("a run of several processes draws its own batches: they share storage")
    if not job.layout.streamed:
        raise ValueError(
            "batches that are drawn ahead bring their rows along: begin the run with "
            "data_on='host' (--data-on host)"
        )


def numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns numbers as JSON values: None for one that is undefined."""
    found = {}
    for name, value in values.items():
        number = value if isinstance(value, int) else float(value)
        found[name] = number if math.isfinite(number) else None
    return found
