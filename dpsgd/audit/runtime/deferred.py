"""Compares rows of lazy tables with simulated deferred noise (`reference_rows`).

The audit chooses the rows' first values, and the steps whose noise they have. It compares
rows after steps and flushes of the executable, after gaps of many lengths, and in blocks that
`train_blocks` trains and flushes. A step must write the rows that its batch looks up, and no
others. Sums are far below the noise.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import closing
from typing import Any

import jax.numpy as jnp
import numpy as np

from dpsgd.audit.probe import Probe
from dpsgd.audit.reference_rows import ReferenceRows, TableLaw, step_sizes
from dpsgd.audit.report import CheckResult
from dpsgd.audit.runtime.blocks import STEPS, Dispatched
from dpsgd.audit.runtime.expected import ALLOWED, Comparison, spread_places
from dpsgd.audit.runtime.releases import LARGE, noise_dominated, norm
from dpsgd.audit.tables import TableSnapshot, put_rows, some_rows
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import Table
from dpsgd.engine.copies import hosted
from dpsgd.engine.step import Watch

SIZES = "tables use the configured step sizes"
FRESH = "gradients are computed at up-to-date rows"
WRITTEN = "a step writes the rows that its batch looks up"
LAW = "deferred noise has the values that key, steps and coordinates determine"
FLUSHED = "flushed tables have the noise of every step"

_NUMBERS = 2**15  # compared numbers of all tables, about
_PASS = 2**16  # rows of a pass of a flush
_READS, _TRAINED = 2, 40  # numbers of attempts
_FLUSH_EVERY = 3
_EXAMPLES = 2**14  # examples in the compared steps of training, about


def deferred_checks(probe: Probe) -> list[CheckResult]:
    """Checks the deferred noise of a program's lazy tables.

    A program without lazy tables gets no check.
    """
    return [] if probe.snapshot is None else _Tables(probe, probe.snapshot).checks()


class _Simulated:
    """Simulated rows of all tables, and the expected steps of every row.

    Attributes:
      attempt: Number of the attempt.
      rows: Compared rows by table.
      steps: Expected step of every row, int32[R] for each table.
    """

    def __init__(self, tables: _Tables, attempt: int, begin: int, now: dict[int, Table]):
        key = tables.probe.root.noise_key(attempt)
        self.attempt, self._tables = attempt, tables
        self.rows = {
            k: ReferenceRows(tables.law, key, k, tables.rows[k], x) for k, x in now.items()
        }
        self._begin(begin)
        for k, x in now.items():
            self.steps[k][tables.rows[k]] = x.steps

    def _begin(self, step: int) -> None:
        tables = self._tables.snapshot.tables.items()
        self.steps = {k: np.full(len(table.values), step, np.int32) for k, table in tables}

    def step(self, step: int, read: dict[int, np.ndarray]) -> None:
        """Simulates a step that looks up the rows `read`."""
        for k, rows in self.rows.items():
            rows.step(step, np.isin(self._tables.rows[k], read[k]))
            self.steps[k][read[k]] = step + 1

    def compare(self, state: Any, words: str) -> None:
        """Compares tables with pending noise, and their rows' steps."""
        tables = self._tables
        for k, table in some_rows(state.lazy_tables, tables.rows).items():
            if not np.array_equal(hosted(state.tables[k].steps), self.steps[k]):
                tables.unwritten(
                    f"leaf {k}, {words}: the step wrote other rows than its batch looks up"
                )
            self.rows[k].compare(tables.pending, table, f"{tables.probe.names[k]} {words}")

    def compare_flushed(self, state: Any, stop: int, words: str) -> None:
        """Compares tables flushed at `stop`, and continues from them."""
        tables = self._tables
        self._begin(stop)
        for k, table in some_rows(state.lazy_tables, tables.rows).items():
            name = f"{tables.probe.names[k]} {words} at step {stop:,}"
            self.rows[k].compare_flushed(tables.flushed, table, stop, name)
            self.rows[k].hold(table._replace(steps=np.full(len(table.values), stop, np.int32)))


class _Tables:
    """Comparisons of a program's lazy tables with the simulation.

    Attributes:
      law: Law of the tables.
      rows: Compared row indices by table, int32[n].
      pending, flushed: Comparisons of rows with and without pending noise.
    """

    def __init__(self, probe: Probe, snapshot: TableSnapshot):
        self.probe, self.snapshot = probe, snapshot
        tables: Any = probe.algorithm.tables
        sampler = probe.mechanism.sampler
        self._end, self._b = sampler.num_steps, sampler.expected_batch_size
        sizes = step_sizes(tables.learning_rate, self._end)
        program_sizes = np.array(probe.table_optimizer.step_sizes)
        same = np.abs(program_sizes - sizes) <= 1e-5 * sizes + 1e-7 * sizes.max()
        self._wrong_steps = np.flatnonzero(~same)
        # A schedule near 0 has few digits: the run's own step sizes are taken.
        r = probe.mechanism.noise_multiplier * probe.mechanism.l2_clip_norm / self._b
        self.law = TableLaw(np.where(same, program_sizes, sizes), tables.momentum, r)
        self._configured, self._program_sizes = sizes, program_sizes
        self._large = sum(table.values.size for table in snapshot.tables.values()) > LARGE
        self.rows = {k: self._chosen(k) for k in snapshot.rows}
        self.pending, self.flushed = Comparison(LAW), Comparison(FLUSHED)
        self._unwritten = ""

    def unwritten(self, wrong: str) -> None:
        """Notes that a step wrote wrong rows."""
        self._unwritten = self._unwritten or wrong

    def _chosen(self, leaf: int) -> np.ndarray:
        """Returns the compared rows: looked-up rows, rows at borders of passes, and others."""
        values = self.snapshot.tables[leaf].values
        count = len(values)
        limit = max(64, _NUMBERS // (values[0].size * len(self.snapshot.tables)))
        if count <= limit:
            return np.arange(count, dtype=np.int32)
        shards, read = len(self.probe.layout.placement.devices), self.snapshot.rows[leaf]
        starts = [*range(0, count, _PASS), count - _PASS, *(np.arange(shards) * count // shards)]
        starts = np.array(starts)[spread_places(len(starts), max(shards, limit // 16))]
        borders = (starts[:, None] + np.arange(-2, 3)).ravel()
        read = read[spread_places(read.size, limit // 2)]
        rows = np.unique(np.concatenate([read, borders, spread_places(count, limit // 2)]))
        return rows[(rows >= 0) & (rows < count)].astype(np.int32)

    def checks(self) -> list[CheckResult]:
        """Compares rows, and returns the checks."""
        checks = [self._sizes_check(), self._fresh_check()]
        self._unwritten = self.snapshot.stray()  # before calls that keep the copy
        mechanism = noise_dominated(self.probe.mechanism)
        if mechanism is None:
            why = f"C = {self.probe.mechanism.l2_clip_norm:.3g} is too small to scale down"
            skipped = [CheckResult.skipped(n, why) for n in (WRITTEN, LAW, FLUSHED)]
            if self._unwritten:
                skipped[0] = CheckResult(WRITTEN, False, self._unwritten)
            return checks + skipped
        self._follow_steps(mechanism)
        checks += self._follow_blocks(mechanism)
        wrong = self._unwritten
        total = sum(map(len, (table.values for table in self.snapshot.tables.values())))
        checks.append(CheckResult(WRITTEN, not wrong, wrong or f"{total:,} rows"))
        for tests in (self.pending, self.flushed):
            checks.append(tests.check(f"{tests.compared:,} numbers, to {ALLOWED:.2g} sigma"))
        return checks

    def _sizes_check(self) -> CheckResult:
        detail = f"{self._end:,} steps"
        if self._wrong_steps.size:
            k = int(self._wrong_steps[0])
            detail = f"step {k:,} takes {self._program_sizes[k]:.6g}, not {self._configured[k]:.6g}"
        return CheckResult(SIZES, not self._wrong_steps.size, detail)

    def _fresh_check(self) -> CheckResult:
        """Checks that gradients are taken at rows with their pending noise."""
        probe, step, first = self.probe, self._reads[0], self.snapshot.first()
        numbers = [x.values for x in first.values() if x.values.size]
        size = max((float(np.sqrt(np.mean(np.square(x)))) for x in numbers), default=0.0) or 1.0
        moved = math.sqrt(self.law.gap(0, step)[1][1, 1])
        clip = probe.mechanism.l2_clip_norm
        try:
            sigma = size * self._b / (clip * moved)
            mechanism = dataclasses.replace(probe.mechanism, noise_multiplier=sigma)
        except (ValueError, ZeroDivisionError):
            return CheckResult.skipped(
                FRESH, "no valid noise multiplier moves rows by about their norm"
            )
        r = sigma * clip / self._b
        law, pending, fresh = TableLaw(self.law.sizes, self.law.momentum, r), {}, {}
        for k, x in first.items():
            pending[k] = x._replace(steps=np.zeros(len(x.values), np.int32))
            key, read = probe.root.noise_key(0), self.snapshot.rows[k]
            rows = ReferenceRows(law, key, k, read, pending[k])
            rows.catch_up(step)
            fresh[k] = rows.table(x)
        old = {k: x._replace(steps=fresh[k].steps) for k, x in pending.items()}
        actual, exact, stale = (
            probe.release(probe.full_batch, mechanism, step=step, rows=rows)
            for rows in (pending, fresh, old)
        )
        off, apart = (norm((1, x), (-1, exact)) for x in (actual, stale))
        cells = 2.0**-18 * r * math.sqrt(sum(probe.sizes))
        if not 64 * cells < apart < math.inf:
            why = "gradients of the generated rows hardly depend on the tables"
            return CheckResult.skipped(FRESH, why)
        return CheckResult(
            FRESH, off <= apart / 4, f"{off / apart:.2g} of the change that stale rows cause"
        )

    @property
    def _reads(self) -> list[int]:
        """Steps that look up rows, after gaps of 0, 1, 2 and many steps."""
        last, k = self._end - 1, max(1, math.isqrt(self._end))
        first = min(k + 1, last)
        far = first + 2 ** max(0, (last - first).bit_length() - 1)  # a multiple of all smaller 2^k
        candidates = (first, first + 1, first + 3, first + 6, 3 * k, 4 * k + k // 2, far, last)
        return sorted({step for step in candidates if first <= step <= last})

    def _begun(self, attempt: int, begin: int, starts: list[int]) -> tuple[Any, _Simulated]:
        """Returns a state at a step, whose rows begin at `starts`, and their simulation."""
        size, steps = self.law.r, np.array([max(0, start) for start in starts], np.int32)

        def pattern(shape: tuple[int, ...], stride: int) -> np.ndarray:
            """Returns numbers -2 to 2 in a pattern."""
            numbers = stride * np.arange(math.prod(shape)).reshape(shape)
            return (numbers % 5 - 2).astype(np.float32)

        now = {}
        for k, rows in self.rows.items():
            like, moved = self.snapshot.tables[k], np.float32(size * self.law.sizes.max())
            shape = rows.size, *like.values.shape[1:]
            momentum = None if like.momentum is None else np.float32(size) * pattern(shape, 2)
            row_steps = steps[np.arange(rows.size) % steps.size]
            now[k] = Table(moved * pattern(shape, 1), momentum, row_steps)
        state = self.probe.begun(begin)
        state = state.with_tables(put_rows(state.lazy_tables, self.rows, now))
        return state, _Simulated(self, attempt, begin, now)

    def _follow_steps(self, mechanism: Mechanism) -> None:
        """Compares rows after single steps, and after gaps of many lengths.

        Small tables are flushed once in between. Large tables are flushed only at the end of
        training, because a flush takes seconds.
        """
        probe, reads = self.probe, self._reads
        begin = reads[0]
        starts = [begin, begin - 1, begin - 2, 0, begin // 2, begin - begin % 3]
        state, rows = self._begun(_READS, begin, starts)
        for number, step in enumerate(reads):
            state = state._replace(step=jnp.int32(step))  # no row was read in between
            plan = probe.drawn_plan(step, _READS)
            state, _ = probe.called(state, plan, mechanism, _READS, return_gradient=False)
            rows.step(step, probe.looked_up(plan, step))
            rows.compare(state, f"after step {step:,}")
            if number == len(reads) // 2 and not self._large:
                state = probe.flush(state, mechanism, _READS)
                rows.compare_flushed(state, step + 1, "flushed")
                state = probe.layout.defer_noise(state)

    def _follow_blocks(self, mechanism: Mechanism) -> list[CheckResult]:
        """Compares blocks of the loop up to the last step.

        Small tables are also compared from the first step on. For large tables, the checks of the
        blocks' batches and steps are returned.
        """
        few = max(4, _EXAMPLES // self.probe.mechanism.sampler.padded_batch_size)
        steps = min(self._end, self.probe.layout.block_steps + 2, 4 if self._large else few)
        first = self._end - steps
        dispatched = self._train(mechanism, first, [first, first - 1, first // 2, 0], None)
        if not self._large:
            self._train(mechanism, 0, [0], _FLUSH_EVERY)
            return []
        detail = f"steps {first:,} to {self._end - 1:,}"
        wrong = dispatched.wrong_steps
        return [dispatched.check(detail), CheckResult(STEPS, not wrong, wrong or detail)]

    def _train(
        self, mechanism: Mechanism, first: int, starts: list[int], flush_every: int | None
    ) -> Dispatched:
        """Compares rows in training from step `first` on, through two flushes at most."""
        probe, flushes, stop = self.probe, 0, first
        attempt = _TRAINED + (flush_every or 0)
        state, rows = self._begun(attempt, first, starts)
        dispatched = Dispatched(probe, attempt)
        blocks = probe.blocks(
            state,
            mechanism,
            attempt=attempt,
            places=Watch.nothing(probe.state.params).places,
            flush_every=flush_every,
            declare=dispatched.declared.append,
        )
        with closing(blocks):
            for block in blocks:
                dispatched.compare(block, stop)
                stop = block.steps.stop
                for step in block.steps:
                    rows.step(step, probe.looked_up(probe.drawn_plan(step, attempt), step, attempt))
                pending = stop < self._end and (flush_every is None or stop % flush_every > 0)
                if block.state.pending != pending:
                    negation = "" if block.state.pending else "no "
                    self.flushed.fail(f"step {stop:,} leaves {negation}pending noise")
                    break
                if pending:
                    rows.compare(block.state, f"trained to step {stop:,}")
                    continue
                rows.compare_flushed(block.state, stop, "trained")
                flushes += 1
                if flushes == 2:
                    break
        return dispatched
