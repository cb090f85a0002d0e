"""Begins or resumes a run in its directory, and writes ledger, checkpoints and diagnostics."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from dpsgd.core.state import TrainState
from dpsgd.engine.batch_files import BatchFiles, Draw
from dpsgd.engine.loop import Block
from dpsgd.engine.sources import arrays_digest
from dpsgd.files import FULL
from dpsgd.runs.attempts import (
    Decision,
    NewAttempt,
    constant_seed,
    decide,
    keys_of,
    stop_at,
)
from dpsgd.runs.checkpoint import Checkpoint
from dpsgd.runs.directory import BATCHES, CALIBRATION, RunDirectory
from dpsgd.runs.history import LedgerError
from dpsgd.runs.job import Job, Journal
from dpsgd.runs.ledger import Ledger
from dpsgd.runs.log import LOG, CsvWriter, TrainingLog
from dpsgd.runs.plan import Execution
from dpsgd.runs.processes import Processes
from dpsgd.runs.stop import REST, STEP, Stopped, report

_WRITING = 9.0
"""Least seconds of training per second of writing, until `checkpoint_seconds` have passed."""


class DirectoryJournal(Journal):
    """Part of one process in a run: it begins or resumes the run, and writes its directory.

    Attributes:
      job: Compiled job of the run.
      ledger: Ledger of the run, open for writing.
      state: State with which the run begins or resumes, without pending noise.
      keys: Keys of the attempt.
      seconds: Seconds of training so far.
      log: Log of steps, epsilon so far and throughput.
    """

    log: TrainingLog

    def __init__(
        self, folder: RunDirectory, ledger: Ledger, job: Job, execution: Execution
    ) -> None:
        """Begins or resumes a run alike in all processes, and audits the remaining steps.

        A new attempt begins if the last one cannot continue.

        Args:
          folder: Run directory.
          ledger: Ledger of the run, open for writing.
          job: Compiled job of the run.
          execution: Devices, timer and outputs.

        Raises:
          LedgerError: if the run cannot resume as its guarantee assumes.
        """
        self._folder, self._execution = folder, execution
        self.ledger, self.job, self._processes = ledger, job, Processes.current()
        history, sampler = ledger.history, job.mechanism.sampler
        checkpoint = folder.checkpoints.latest(job.shapes)
        step, stop = checkpoint.step if checkpoint else 0, folder.stop_file.read(sampler)
        try:
            decision = decide(history, checkpoint, stop, job.terms, job.drawing)
        except LedgerError as error:
            raise LedgerError(f"{folder.ledger_path}: {error}") from None
        origin = checkpoint and checkpoint[1:]
        files = [type(decision).__name__, decision, origin, step]
        self._processes.check_alike({"files of the run": files})
        state = self._restored(checkpoint, decision) if checkpoint else None
        verdict = None
        if step < job.mechanism.num_steps:
            execution.stages.begin("audit")
            verdict = job.audit(state, execution.progress)
        if isinstance(decision, NewAttempt):
            self._begin_attempt(step)
        if verdict is not None:
            ledger.audited(verdict)
        if self._processes.first:
            folder.write_json("environment.json", job.environment())
            folder.cut_diagnostics(step)
        self.keys = keys_of(decision, sampler, job.spec.insecure_seed)
        self.state = job.start() if state is None else state
        self.seconds = checkpoint.seconds if checkpoint else 0.0

    def _restored(self, checkpoint: Checkpoint, decision: Decision) -> TrainState:
        """Returns the state of a checkpoint on the devices, as `decision` continues it."""
        job, state, last = self.job, checkpoint.state, self.ledger.history.attempts[-1]
        if isinstance(decision, NewAttempt) or not last.steps:  # an earlier attempt computed it
            # Rows that were released before have no part in its noise.
            state = state._replace(noise=job.start().noise)
        return job.layout.put_state(job.scheduled(state))

    def _begin_attempt(self, step: int) -> None:
        history = self.ledger.history
        self._execution.progress(
            f"attempt {len(history.attempts)} begins at step {step:,}, with new noise "
            "and batches; steps declared earlier still count"
        )
        if self._processes.first:  # remove later states, and a guarantee without this attempt
            self._folder.checkpoints.destroy_after(step)
            (self._folder.path / "guarantee.json").unlink(missing_ok=True)
        drawing, environment = self.job.drawing, self.job.environment()
        self.ledger.begin(self.job.terms, step=step, drawing=drawing, environment=environment)

    def draw(self) -> tuple[Draw, int]:
        """Returns the draw of remaining batches, and its seed.

        Raises:
          ValueError: for several processes, or data on the device.
        """
        job, step, history = self.job, int(self.state.step), self.ledger.history
        if self._processes.count > 1:
            raise ValueError(
                "several processes cannot read batches drawn ahead: train in one process"
            )
        if not job.layout.streamed:
            raise ValueError(
                "batches drawn ahead contain their rows, which must stream from the host: begin "
                "the run with data_on='host' (--data-on host)"
            )
        index, sampler = history.attempts[-1].index, job.mechanism.sampler
        draw = Draw.plan(sampler, job.data, run=history.name, attempt=index, first_step=step)
        return draw, constant_seed(sampler, self.keys.sampling, step)

    def train(self, stop: Callable[[], bool]) -> TrainState:
        """Runs the remaining steps and queries; returns the last state.

        Args:
          stop: Function that returns True once the run is asked to stop.

        Raises:
          Stopped: if the run was asked to stop before its last step.
        """
        folder, job, execution, step = self._folder, self.job, self._execution, int(self.state.step)
        self._stop, self._num_steps = stop, job.mechanism.sampler.num_steps
        self.flush_every = getattr(job.spec.tables, "flush_every", None)
        self._under_way: deque[Block] = deque()
        self._last: Block | None = None
        self._room = folder.checkpoints.room(self.state)
        self._before = self.seconds
        self._first = self._done = self._saved_step = step
        self._started = self._saved = time.perf_counter()
        self._writing = 0.0
        writers = [] if execution.log is None else [execution.log]
        self.log = TrainingLog([CsvWriter(folder.path / LOG, step), *writers])
        if step < self._num_steps:
            if (path := folder.batches) is not None:
                try:
                    self.batches = BatchFiles(path, *self.draw(), job.data)
                except ValueError as error:
                    remedy = f"remove {path} and {folder.path / BATCHES} to draw new batches"
                    raise ValueError(f"{error}; or {remedy}") from None
            execution.progress(f"steps {step:,} to {self._num_steps:,}")
        elif step < job.mechanism.num_steps:
            self._begin_queries()
        return job.train(self.state, self.keys, self)

    def declare(self, steps: range) -> None:
        """Reserves disk space for a checkpoint and declares `steps`.

        Queries are declared after the checkpoint of the last step is on the disk, so that a run
        that dies here resumes from these parameters.

        Raises:
          Stopped: if the run was asked to stop before the queries.
        """
        if steps.start == self._num_steps and self._processes.any(self._stop()):
            self._keep_seed(steps.start)
            raise Stopped(
                f"stopped before the {self.job.mechanism.full_sums}; all is saved: `dpsgd "
                f"resume {self._folder.path}` resumes it"
            )
        with self._nothing_lost():
            self._folder.checkpoints.reserve(self._room)
            if self._processes.first:
                if not self._last:  # the first time
                    self._folder.stop_file.destroy()
                self._folder.stop_file.reserve()
            self.ledger.declare(steps)

    def keep(self, block: Block) -> bool:
        """Writes diagnostics of completed blocks and, when due, a checkpoint.

        Raises:
          Stopped: if the run was asked to stop before the sampler's last step.
        """
        processes, num_steps, self._last = self._processes, self._num_steps, block
        self._under_way.append(block)
        report(STEP)
        stopping, due = map(any, zip(*processes.gather([self._stop(), self._due()]), strict=True))
        if block.state.tables:  # a checkpoint holds no pending noise
            due = not block.state.pending
        save = due or stopping or block.steps.stop == num_steps
        with self._nothing_lost():
            # One block computes while the one before is written; a checkpoint waits for both.
            while len(self._under_way) > (0 if save else 1):
                past = self._under_way.popleft()
                if processes.first:
                    self._folder.append_diagnostics(past.steps.start, past.diagnostics)
                self._done = past.steps.stop
            elapsed = time.perf_counter() - self._started
            first, steps_done = self._first, self._done
            if steps_done > first:
                seconds_left = elapsed / (steps_done - first) * (num_steps - steps_done)
                self._execution.progress(
                    f"step {steps_done:,} of {num_steps:,}, {seconds_left:.0f} s left"
                )
                if processes.first and steps_done < num_steps:
                    batch = self.job.mechanism.sampler.expected_batch_size
                    self.log.offer(
                        steps_done, self._epsilon, (steps_done - first) * batch / elapsed
                    )
            if save:
                state = block.flush()
                _check_state(state, processes)
                self.seconds = self._before + elapsed
                self._save(state)
        if steps_done == num_steps:
            report(REST)
            self._begin_queries()
        elif stopping:
            self._keep_seed(steps_done)
            raise Stopped(
                f"stopped at step {steps_done:,} of {num_steps:,}; all is saved: `dpsgd resume "
                f"{self._folder.path}` resumes it"
            )
        return False

    def keep_refined(self, state: TrainState, summary: Mapping[str, Any]) -> None:
        """Writes summary and checkpoint after the last query.

        Args:
          state: State with the refined parameters.
          summary: Numbers that describe the refinement, by name.
        """
        if self._processes.first:
            self._folder.write_json(CALIBRATION, numbers(summary))
        self._save(state)

    def _due(self) -> bool:
        """Returns True if it is time for a checkpoint."""
        spec, sampler = self.job.spec, self.job.mechanism.sampler
        elapsed = time.perf_counter() - self._saved
        steps = self._last.steps.stop - self._saved_step if self._last else 0
        # The cost of a kill grows with the part of an epoch that it loses.
        share_due = 20 * steps >= sampler.steps_per_epoch and elapsed >= _WRITING * self._writing
        return share_due or elapsed >= spec.checkpoint_seconds

    def _epsilon(self) -> float | None:
        """Returns the proved epsilon of all declared steps; None without proof."""
        bound = self.ledger.history.guarantee().epsilon
        return None if bound is None else bound.upper

    def _begin_queries(self) -> None:
        if self.job.refinement is not None:
            self._execution.stages.begin("calibrate")
            self._execution.progress(f"calibrating by {self.job.mechanism.full_sums}")

    def _save(self, state: TrainState) -> None:
        began, history = time.perf_counter(), self.ledger.history
        self._folder.checkpoints.save(Checkpoint(state, history.head, self.seconds))
        self._saved, self._saved_step = time.perf_counter(), int(state.step)
        self._writing = self._saved - began

    def _keep_seed(self, step: int) -> None:
        """Writes a clean stop at `step`, the step of the newest checkpoint."""
        if self._processes.first and not self.job.plan.reproducible_noise:
            attempt, sampler = self.ledger.history.attempts[-1], self.job.mechanism.sampler
            stop = stop_at(step, attempt.head, sampler, self.keys.sampling)
            self._folder.stop_file.write(stop)

    @contextmanager
    def _nothing_lost(self) -> Iterator[None]:
        """Saves block and clean stop of a single process on a full disk."""
        try:
            yield
        except OSError as error:
            if error.errno in FULL and self._processes.count == 1:
                with contextlib.suppress(OSError):
                    if self._last is not None and self._saved_step < self._last.steps.stop:
                        self._save(self._last.flush())
                    self._keep_seed(self._saved_step)
            raise


def _check_state(state: TrainState, processes: Processes) -> None:
    """Raises ValueError if a replicated array of `state` differs between processes."""
    if processes.count > 1:
        replicated = [leaf for leaf in jax.tree.leaves(state) if leaf.is_fully_replicated]
        processes.check_alike({"state of training": arrays_digest(replicated)})


def numbers(values: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns numbers as JSON values, None for NaN and infinity.

    >>> numbers({"auc": 0.75, "loss": math.nan, "rows": 3})
    {'auc': 0.75, 'loss': None, 'rows': 3}
    """
    json_values = {}
    for name, value in values.items():
        number = value if isinstance(value, int) else float(value)
        json_values[name] = number if math.isfinite(number) else None
    return json_values
