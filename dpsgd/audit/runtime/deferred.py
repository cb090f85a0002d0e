"""Deferred noise of tables, compared with what key, steps and place give (`deferred_law`).

Compared are rows that begin at steps and with numbers of the audit's own, after reads at gaps of
many lengths and after flushes, and those that `train_blocks` itself trains and flushes. Sums are
far below the noise.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.audit.probe import Probe
from dpsgd.audit.report import CheckResult
from dpsgd.audit.runtime.blocks import STEPS, Dispatched
from dpsgd.audit.runtime.deferred_law import (
    DeferredLaw,
    Numbers,
    RowsLaw,
    WatchedRows,
    starts,
    step_sizes,
)
from dpsgd.audit.runtime.expected import ALLOWED, Comparison
from dpsgd.audit.runtime.releases import LARGE, noise_dominated, norm
from dpsgd.audit.tables import TableSnapshot, put_rows, some_rows
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import Table, TrainState
from dpsgd.engine.step import Watch

SIZES = "tables take the step sizes of the configuration"
FRESH = "gradients are taken at rows that are up to date"
LAW = "deferred noise is what key, steps and place give"
SILENT = "rows that are read without a gradient have the noise of the step"
FLUSHED = "what is flushed has the noise of every step"

_WHOLE = 2**17  # numbers of a table of which all rows are looked at
_PASS = 2**16  # rows of a pass of a flush
_BORDERS = 32  # between passes, at most
_READS, _TRAINED = 2, 40  # attempts
_FLUSH_EVERY = 3
_EXAMPLES = 2**14  # of the steps of training that are looked at, about
_COLUMNS = 4  # of a row that is watched


def deferred_checks(probe: Probe) -> list[CheckResult]:
    """Checks the deferred noise of tables; of a program without such tables, nothing."""
    if probe.snapshot is None:
        return []
    return [probe.snapshot.check(), *_Tables(probe, probe.snapshot).checks()]


class _Tables:
    """What is seen of a program's tables, and the comparisons that it goes through."""

    def __init__(self, probe: Probe, snapshot: TableSnapshot):
        self.probe, self._snapshot = probe, snapshot
        tables: Any = probe.algorithm.tables
        sampler = probe.mechanism.sampler
        self._end, self._b = sampler.num_steps, sampler.expected_batch_size
        sizes = step_sizes(tables.learning_rate, self._end)
        given = np.array(probe.table_optimizer.step_sizes)
        same = np.abs(given - sizes) <= 1e-5 * sizes + 1e-7 * sizes.max()
        self._others = np.flatnonzero(~same)
        # A schedule near 0 has few digits: those are taken that the run has.
        sizes = np.where(same, given, sizes)
        key = probe.root.noise_key
        r = probe.mechanism.noise_multiplier * probe.mechanism.l2_clip_norm / self._b
        self.law = DeferredLaw(sizes, tables.momentum, r, key)
        self._large = sum(table.values.size for table in snapshot.tables.values()) > LARGE
        self.rows = {k: self._looked_at(k) for k in snapshot.rows}
        self.names = {k: probe.names[k] for k in self.rows}
        self._found, self._whole, self._silent = map(Comparison, (LAW, FLUSHED, SILENT))

    def _looked_at(self, leaf: int) -> np.ndarray:
        """Returns the rows of a table that are looked at: those that are read, and others."""
        values = self._snapshot.tables[leaf].values
        count, some = len(values), max(4, _WHOLE // values[0].size)
        if count <= some:
            return np.arange(count, dtype=np.int32)
        parts = len(self.probe.layout.placement.devices)
        begun = np.append(np.arange(0, count, _PASS), count - _PASS)  # passes of a flush
        begun = np.append(begun[:: -(-begun.size // _BORDERS)], np.arange(parts) * count // parts)
        rest = np.arange(some // 2)
        inside = np.random.default_rng(0).random(rest.size)  # one row of each stretch
        every = [
            self._snapshot.rows[leaf],
            np.arange(some // 8),
            count - 1 - np.arange(some // 8),
            *(begun + k for k in range(-2, 3)),
            (rest + inside) * count / rest.size,
        ]
        rows = np.unique(np.concatenate(every).astype(np.int64))
        return rows[(rows >= 0) & (rows < count)].astype(np.int32)

    def checks(self) -> list[CheckResult]:
        """Takes all looks, and returns what was seen."""
        checks = [self._sizes_check(), self._fresh_check()]
        mechanism = noise_dominated(self.probe.mechanism)
        if mechanism is None:
            why = f"C = {self.probe.mechanism.l2_clip_norm:.3g} is next to the least there is"
            return checks + [CheckResult.skipped(n, why) for n in (SILENT, LAW, FLUSHED)]
        checks.append(self._silent_check(mechanism))
        self._look_at_reads(mechanism)
        end = self._look_at_blocks(mechanism)
        for found in (self._found, self._whole):
            checks.append(found.check(f"{found.compared:,} numbers, to {ALLOWED:.2g} sigma"))
        return checks + end

    def rows_law(self, leaf: int, rows: np.ndarray | None = None, attempt: int = 0) -> RowsLaw:
        """Returns the law of some rows of a table, by default of those that are looked at."""
        width = math.prod(self._snapshot.tables[leaf].values.shape[1:])
        rows = self.rows[leaf] if rows is None else rows
        index = (rows.astype(np.int64)[:, None] * width + np.arange(width)).ravel()
        return RowsLaw(self.law, leaf, index, attempt)

    def _sizes_check(self) -> CheckResult:
        detail = f"{self._end:,} steps"
        if self._others.size:
            k = int(self._others[0])
            given = self.probe.table_optimizer.step_sizes[k]
            detail = f"step {k:,} takes {given:.6g}, and {self.law.sizes[k]:.6g} was asked for"
        return CheckResult(SIZES, not self._others.size, detail)

    def _silent_check(self, mechanism: Mechanism) -> CheckResult:
        """Checks the noise of rows that a NaN example alone reads, whose sum is 0.

        Noise that waits for a gradient tells who had one.
        """
        probe = self.probe
        if probe.poison is None:
            return CheckResult.skipped(SILENT, probe.why_no_poison)
        members = np.full(probe.places, probe.poison)
        for step in sorted({probe.first_step, self._end - 1}):
            after = probe.advanced(members, mechanism, return_gradient=True, step=step)
            for k, table in after.lazy_tables.items():
                read = table.steps == step + 1
                z = self.rows_law(k, self._snapshot.rows[k][read]).of_step(step)
                found = table.values[read].astype(np.float64).ravel() / self.law.r
                self._silent.add(found, z, ALLOWED, f"{self.names[k]}, step {step:,}")
        return self._silent.check(f"{self._silent.compared:,} numbers")

    def _fresh_check(self) -> CheckResult:
        """Checks that gradients are those of rows whose gap has ended."""
        probe, step, first = self.probe, self._reads[0], self._snapshot.first()
        numbers = [x.values for x in first.values() if x.values.size]
        size = max((float(np.sqrt(np.mean(np.square(x)))) for x in numbers), default=0.0) or 1.0
        moved = math.sqrt(self.law.gap(0, step)[1][1, 1])
        clip = probe.mechanism.l2_clip_norm
        try:
            sigma = size * self._b / (clip * moved)
            mechanism = dataclasses.replace(probe.mechanism, noise_multiplier=sigma)
        except (ValueError, ZeroDivisionError):
            why = "no noise moves rows as far as they are long"
            return CheckResult.skipped(FRESH, why)

        def gradient(steps: int, rows: dict[int, Table]) -> list[np.ndarray]:
            """Returns what the step shows where rows hold these numbers, of so many steps."""
            held = {
                k: jax.tree.map(np.float32, x)._replace(
                    steps=np.full(len(x.values), steps, np.int32)
                )
                for k, x in rows.items()
            }
            of: Any = {"return_gradient": True, "step": step, "rows": held}
            after = probe.advanced(probe.full_batch, mechanism, **of)
            read = [x.values[x.steps == step + 1].ravel() for x in after.lazy_tables.values()]
            return [*(np.ravel(np.asarray(x)) for x in jax.tree.leaves(after.dense_params)), *read]

        fresh, r = {}, sigma * clip / self._b
        for k, x in first.items():
            law, begun = self.rows_law(k, self._snapshot.rows[k]), np.zeros(x.values.size, np.int64)
            new = law.caught_up(Numbers.of(x), begun, step, r)
            fresh[k] = new.like(x)
        shown, there, stale = (gradient(*of) for of in ((0, first), (step, fresh), (step, first)))
        off, apart = (norm((1, x), (-1, there)) for x in (shown, stale))
        cells = 2.0**-18 * r * math.sqrt(sum(probe.sizes))
        if not 64 * cells < apart < math.inf:
            why = "gradients of the generated rows hardly depend on those of tables"
            return CheckResult.skipped(FRESH, why)
        return CheckResult(FRESH, off <= apart / 4, f"{off / apart:.2g} of what stale rows change")

    @functools.cached_property
    def _reads(self) -> list[int]:
        """Steps at which rows are read: after gaps of none, one, two and many steps."""
        last, k = self._end - 1, max(1, math.isqrt(self._end))
        first = min(k + 1, last)
        far = first + 2 ** max(0, (last - first).bit_length() - 1)  # a multiple of all smaller 2^k
        some = (first, first + 1, first + 3, first + 6, 3 * k, 4 * k + k // 2, far, last)
        return sorted({step for step in some if first <= step <= last})

    def _look_at_reads(self, mechanism: Mechanism) -> None:
        """Reads rows after one gap after the other; flushes them now and then.

        A large table is flushed once, at the end of training: it takes seconds.
        """
        probe, reads = self.probe, self._reads
        begin = reads[0]
        now = self._first([begin, begin - 1, begin - 2, 0, begin // 2, begin - begin % 3])
        state: Any = probe.begun(begin)
        state = state.with_tables(put_rows(state.lazy_tables, self.rows, now))
        flushes = set() if self._large else {self._end, (reads[-1] + reads[-2:][0]) // 2 + 1}
        for number, step in enumerate([*reads, self._end]):
            for stop in sorted(f for f in flushes if number and int(state.step) <= f <= step):
                state = state._replace(step=jnp.int32(stop))
                state = probe.flushed(state, mechanism, _READS)
                found = self._flushed(state, stop)
                for k, old in now.items():
                    law = self.rows_law(k, attempt=_READS)
                    new = law.caught_up(Numbers.of(old), starts(old), stop)
                    name = f"{self.names[k]} flushed at step {stop:,}"
                    law.compare_flushed(self._found, found[k], new, stop, name)
                now = found
                state = probe.layout.defer_noise(state)
                flushes.remove(stop)
            if step < self._end:
                state, now = self._read(state, now, step, mechanism)

    def _first(self, starts: list[int]) -> dict[int, Table]:
        """Returns rows to begin with, which begin at some steps."""
        size, steps = self.law.r, np.array([max(0, start) for start in starts], np.int32)

        def pattern(shape: tuple[int, ...], stride: int) -> np.ndarray:
            numbers = stride * np.arange(math.prod(shape)).reshape(shape)
            return (numbers % 5 - 2).astype(np.float32)

        found = {}
        for k, rows in self.rows.items():
            shape = (rows.size, *self._snapshot.tables[k].values.shape[1:])
            like, moved = self._snapshot.tables[k], np.float32(size * self.law.sizes.max())
            found[k] = Table(
                moved * pattern(shape, 1),
                None if like.momentum is None else np.float32(size) * pattern(shape, 2),
                steps[np.arange(rows.size) % steps.size],
            )
        return found

    def _read(self, state: Any, now: dict[int, Table], step: int, mechanism: Mechanism) -> Any:
        """Returns the state after a step of a full batch, and its rows."""
        probe, how = self.probe, (self.probe.full_batch, mechanism, _READS)
        state = state._replace(step=jnp.int32(step))  # no row was read in between
        state, _ = probe.called(state, *how, return_gradient=True)
        shown = some_rows(state.lazy_tables, self.rows)
        tables = put_rows(state.lazy_tables, self.rows, now)
        state = state._replace(step=jnp.int32(step)).with_tables(tables)
        state, _ = probe.called(state, *how, return_gradient=False)
        after = some_rows(state.lazy_tables, self.rows)
        for k, before in now.items():
            read = shown[k].steps == step + 1
            kept = before._replace(steps=np.where(read, step + 1, before.steps))
            if not _same_but_for(read, shown[k], kept) or not _same_but_for(read, after[k], kept):
                why = f"{self.names[k]}: step {step:,} moved rows that it left out"
                self._found.wrong = self._found.wrong or why
            old, g = _of(before, read), _of(shown[k], read)
            law = self.rows_law(k, self.rows[k][read], _READS)
            z, new = law.stepped(law.caught_up(Numbers.of(old), starts(old), step), step)
            name, of_step = f"{self.names[k]} in step {step:,}", g.values.astype(np.float64).ravel()
            self._found.add(of_step / self.law.r, z, ALLOWED, f"the noise of {name}")
            law.compare(self._found, _of(after[k], read), new, name)
        return state, after

    def _flushed(self, state: TrainState, stop: int) -> dict[int, Table]:
        """Returns the rows of a state that was flushed."""
        found = some_rows(state.lazy_tables, self.rows)
        return {
            k: x._replace(steps=np.full(len(x.values), stop, np.int32)) for k, x in found.items()
        }

    def _look_at_blocks(self, mechanism: Mechanism) -> list[CheckResult]:
        """Looks at what `train_blocks` leaves, and where it says that no noise is pending.

        Returns, of large tables, the checks of what blocks are given.
        """
        few = max(4, _EXAMPLES // self.probe.mechanism.sampler.padded_batch_size)
        steps = min(self._end, self.probe.layout.block_steps + 2, 4 if self._large else few)
        first = self._end - steps
        given = self._train(mechanism, first, [first, first - 1, first // 2, 0], None)
        if not self._large:
            self._train(mechanism, 0, [0], _FLUSH_EVERY)
            return []
        detail = f"steps {first:,} to {self._end - 1:,}"
        wrong = given.wrong_steps
        return [given.check(detail), CheckResult(STEPS, not wrong, wrong or detail)]

    def _train(
        self, mechanism: Mechanism, first: int, starts: list[int], flush_every: int | None
    ) -> Dispatched:
        """Looks at two flushes of training that begins at a step, with rows that began before."""
        probe, now, flushes, stop = self.probe, self._first(starts), 0, first
        state = probe.begun(first)
        state = state.with_tables(put_rows(state.lazy_tables, self.rows, now))
        attempt = _TRAINED + (flush_every or 0)
        given = Dispatched(probe, attempt)
        places = [np.asarray(at) for at in Watch.nothing(probe.state.params).places]
        rows = {k: self._watched(k, places[k].size) for k in self.rows}
        seen = {}
        for k, at in rows.items():
            law = self.rows_law(k, attempt=attempt)
            law = law._replace(at=law.at[at])
            places[k] = law.at.astype(np.int32)
            seen[k] = WatchedRows(law, self.names[k], at, now[k])
        blocks = probe.blocks(
            state,
            mechanism,
            attempt=attempt,
            places=places,
            flush_every=flush_every,
            declare=given.declared.append,
        )
        borders = np.cumsum([len(at) for at in places])[:-1]
        with closing(blocks):
            for block in blocks:
                given.compare(block, stop)
                stop = block.steps.stop
                pending = stop < self._end and (flush_every is None or stop % flush_every > 0)
                if block.state.pending != pending:
                    why = (
                        f"step {stop:,} leaves {'' if block.state.pending else 'no '}pending noise"
                    )
                    self._whole.wrong = self._whole.wrong or why
                    break
                shown = np.split(np.asarray(block.watched, np.float64), borders, axis=1)
                for k, of in seen.items():
                    for j, step in enumerate(block.steps):
                        of.step(step, shown[k][j], self._whole)
                if pending:
                    continue
                found = self._flushed(block.state, stop)
                for k, of in seen.items():
                    of.flush(stop, found[k], self._whole)
                flushes += 1
                if flushes == 2:
                    break
        return given

    def _watched(self, leaf: int, count: int) -> np.ndarray:
        """Returns coordinates, among those of the rows that are looked at, which blocks show."""
        read = np.isin(self.rows[leaf], self._snapshot.rows[leaf])
        width = math.prod(self._snapshot.tables[leaf].values.shape[1:])
        each = min(_COLUMNS, width)
        wanted = -(-count // each)
        some = [np.flatnonzero(read), np.flatnonzero(~read)]  # of both kinds, from end to end
        half = [x[np.linspace(0, x.size - 1, min(x.size, wanted)).astype(int)] for x in some]
        chosen = np.sort(np.concatenate(half)[: 2 * wanted])
        chosen = chosen[np.linspace(0, chosen.size - 1, min(chosen.size, wanted)).astype(int)]
        columns = np.linspace(0, width - 1, each).astype(int)
        return np.resize((chosen[:, None] * width + columns).ravel(), count)


def _of(table: Table, some: np.ndarray) -> Table:
    return jax.tree.map(lambda x: x[some], table)


def _same_but_for(read: np.ndarray, found: Table, kept: Table) -> bool:
    """Whether rows that were not read are the same to the bit, and steps those that are kept."""
    return np.array_equal(found.steps, kept.steps) and all(
        x[~read].tobytes() == y[~read].tobytes()
        for x, y in zip(found[:2], kept[:2], strict=True)
        if x is not None
    )
