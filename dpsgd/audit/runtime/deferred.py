r"""Deferred noise of tables, compared with what key, steps and place give.

The law is simulated here, step by step and in float64, from the rule by which the optimizer moves a
row, m = mu m + g + w theta, theta = theta - a_t m, with g = r z, r = sigma C / b of the
configuration and a_t of its schedule. Over a gap from s to t, (m, theta) becomes A (m, theta) + r L
(x, y), L lower triangular and L L^T = V, with x and y the normals of step t for `MOMENTUM` and
`VALUE` (`dpsgd.audit.reference`). So each number that a row must have is known, and sums are far
below the noise. A flush rounds them by U of the same names to a public grid.

Compared are rows that begin at steps and with numbers of the audit's own, after reads at gaps of
many lengths and after flushes, and those that `train_blocks` itself trains and flushes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from contextlib import closing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.audit import reference
from dpsgd.audit.probe import Probe
from dpsgd.audit.report import CheckResult
from dpsgd.audit.runtime.noise import WATCHED_NOISE, Comparison, noise_dominated
from dpsgd.audit.runtime.sums import norm
from dpsgd.audit.runtime.update import close, looked_at
from dpsgd.audit.tables import TableSnapshot, put_rows, some_rows
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.state import Table, TrainState
from dpsgd.engine.step import Watch

SIZES = "tables take the step sizes of the configuration"
MOVED = "rows of tables move by their release alone"
FRESH = "gradients are taken at rows that are up to date"
LAW = "deferred noise is what key, steps and place give"
SILENT = "rows that are read without a gradient have the noise of the step"
FLUSHED = "what is flushed has the noise of every step"

_GRID_BITS = 10  # of a flush: cells of 2^-10 to 2^-11 of the noise since the run's first step
_MOST_CELLS = 13  # binary digits of a number beyond which its own size gives the cell
_EPS = 2.0**-21  # of float32, what a few operations round
_WHOLE = 2**17  # numbers of a table of which all rows are looked at
_LARGE = 2**26  # numbers of tables that are flushed as seldom as can be
_PASS = 2**16  # rows of a pass of a flush
_BORDERS = 32  # between passes, at most
_GENERATION, _TRAINED = 2, 40
_FLUSH_EVERY = 3
_EXAMPLES = 2**14  # of the steps of training that are looked at, about
_COLUMNS = 4  # of a row that is watched


def deferred_checks(program: Probe) -> list[CheckResult]:
    """Checks the noise of tables that comes late; of a program without such tables, nothing."""
    if program.snapshot is None:
        return []
    return [program.snapshot.check(), *_Late(program, program.snapshot).checks()]


class _Rule:
    """The optimizer's rule, and the law of its stretches by simulation."""

    def __init__(self, sizes: np.ndarray, momentum: float, decay: float):
        self.of, self._sizes = (momentum, decay), sizes
        self._paths: dict[int, list[tuple[float, ...]]] = {}

    def law(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns how (m, theta) moves in the steps start, ..., stop - 1, at r = 1: A and V."""
        if start not in self._paths:
            self._paths[start] = self._simulated(start)
        a, b, c, d, mm, mt, tt = self._paths[start][stop - start]
        return np.array([[a, b], [c, d]]), np.array([[mm, mt], [mt, tt]])

    def _simulated(self, start: int) -> list[tuple[float, ...]]:
        mu, w = self.of
        # (m, theta) from (1, 0) and from (0, 1), and their covariance from none.
        m1, t1, m2, t2 = 1.0, 0.0, 0.0, 1.0
        mm = mt = tt = 0.0
        path: list[tuple[float, ...]] = [(m1, m2, t1, t2, mm, mt, tt)]
        for a in self._sizes[start:].tolist():
            m1, m2 = mu * m1 + w * t1, mu * m2 + w * t2
            t1, t2 = t1 - a * m1, t2 - a * m2
            # m' = mu m + w theta + z, and theta' = theta - a m'.
            with_theta = mu * mt + w * tt
            mm = mu * mu * mm + 2 * mu * w * mt + w * w * tt + 1.0
            mt = with_theta - a * mm
            tt = tt - 2 * a * with_theta + a * a * mm
            path.append((m1, m2, t1, t2, mm, mt, tt))
        return path


class _Numbers(NamedTuple):
    """What coordinates of a table must hold: float64[coordinates]; and how far they may be off."""

    m: np.ndarray
    theta: np.ndarray
    off_m: Any = 0.0
    off_theta: Any = 0.0


class _Late:
    """What is seen of a program's tables, and the comparisons that it goes through."""

    def __init__(self, program: Probe, lent: TableSnapshot):
        self._program, self._snapshot = program, lent
        tables: Any = program.algorithm.tables
        self._end = program.mechanism.sampler.num_steps
        assert tables is not None
        sizes = _step_sizes(tables.learning_rate, self._end)
        given = np.array(program.table_optimizer.step_sizes)
        same = np.abs(given - sizes) <= 1e-5 * sizes + 1e-7 * sizes.max()
        self._others = np.flatnonzero(~same)
        # A schedule near 0 has few digits: those are taken that the run has.
        self._sizes = np.where(same, given, sizes)
        self._rule = _Rule(self._sizes, tables.momentum, tables.weight_decay)
        self._b = program.mechanism.sampler.expected_batch_size
        self._r = program.mechanism.noise_multiplier * program.mechanism.l2_clip_norm / self._b
        self._everybody = np.arange(program.places) % program.units
        self._large = sum(table.values.size for table in lent.tables.values()) > _LARGE
        self._rows = {k: self._looked_at(k) for k in lent.rows}
        self._names = {k: program.names[k] for k in self._rows}
        self._law, self._whole, self._silent = map(Comparison, (LAW, FLUSHED, SILENT))

    def _looked_at(self, leaf: int) -> np.ndarray:
        """Returns the rows of a table that are looked at: those that are read, and others."""
        values = self._snapshot.tables[leaf].values
        count, some = len(values), max(4, _WHOLE // values[0].size)
        if count <= some:
            return np.arange(count, dtype=np.int32)
        placement = self._program.layout.placement
        parts = 1 if placement is None else len(placement.devices)
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
        checks = [self._sizes_check(), self._moved_check(), self._fresh_check()]
        mechanism = noise_dominated(self._program.mechanism)
        if mechanism is None:
            why = f"C = {self._program.mechanism.l2_clip_norm:.3g} is next to the least there is"
            return checks + [CheckResult(n, True, why, made=False) for n in (SILENT, LAW, FLUSHED)]
        checks.append(self._silent_check(mechanism))
        self._look_at_reads(mechanism)
        self._look_at_blocks(mechanism)
        for found in (self._law, self._whole):
            checks.append(found.check(f"{found.compared:,} numbers, to {WATCHED_NOISE:.2g} sigma"))
        return checks

    # What the law gives.

    def _key(self, generation: int) -> np.ndarray:
        return self._program.mechanism.noise_key(self._program.root, generation)

    def _index(self, leaf: int, rows: np.ndarray) -> np.ndarray:
        """Returns the coordinates of some rows."""
        width = math.prod(self._snapshot.tables[leaf].values.shape[1:])
        return (rows.astype(np.int64)[:, None] * width + np.arange(width)).ravel()

    def _numbers(self, table: Table) -> _Numbers:
        """Returns what some rows hold."""
        theta = table.values.astype(np.float64).ravel()
        m = np.zeros_like(theta) if table.momentum is None else table.momentum.ravel()
        return _Numbers(m.astype(np.float64), theta)

    def _starts(self, table: Table) -> np.ndarray:
        """Returns the steps that are in each coordinate of some rows."""
        return np.repeat(table.steps, math.prod(table.values.shape[1:]))

    def _caught_up(
        self,
        leaf: int,
        index: np.ndarray,
        old: _Numbers,
        starts: np.ndarray,
        stop: int,
        generation: int,
        r: float | None = None,
    ) -> _Numbers:
        """Returns what coordinates hold after the gaps from `starts` to `stop`."""
        r, how = r or self._r, (self._key(generation), stop, leaf, index)
        x, y = (reference.normals(*how, of) for of in (reference.MOMENTUM, reference.VALUE))
        which, at = np.unique(np.append(stop, starts), return_inverse=True)
        laws = zip(*(self._rule.law(start, stop) for start in which.tolist()), strict=True)
        transitions, covariances = (np.stack(of)[at[1:]] for of in laws)
        (a, b), (c, d) = np.moveaxis(transitions, 0, -1)
        (mm, mt), (_, tt) = np.moveaxis(covariances, 0, -1)
        gap, of_m, of_theta = starts < stop, np.sqrt(mm), np.sqrt(tt)
        slope = np.where(gap, mt, 0.0) / np.where(gap, of_m, 1.0) if self._rule.of[0] else 0.0 * mt
        # What x leaves of a variance: where that is little, float32 has few digits of it.
        rest, digits = np.maximum(0.0, tt - slope**2), 2.0**-20 * tt
        own, lost = np.sqrt(rest), np.sqrt(rest + digits) - np.sqrt(np.maximum(0, rest - digits))

        def off(row: tuple[np.ndarray, np.ndarray], noise: np.ndarray) -> np.ndarray:
            carried = np.abs(row[0] * old.m) + np.abs(row[1] * old.theta)
            moved = np.abs(row[0]) * old.off_m + np.abs(row[1]) * old.off_theta
            return moved + gap * (r * noise + _EPS * carried)

        return _Numbers(
            a * old.m + b * old.theta + r * of_m * x,
            c * old.m + d * old.theta + r * (slope * x + own * y),
            off((a, b), WATCHED_NOISE * of_m),
            off((c, d), WATCHED_NOISE * of_theta + lost * np.abs(y)),
        )

    def _stepped(
        self, leaf: int, index: np.ndarray, old: _Numbers, step: int, generation: int
    ) -> tuple[np.ndarray, _Numbers]:
        """Returns the noise of a step, over r, and what coordinates hold after it."""
        (mu, w), a = self._rule.of, self._sizes[step]
        z = reference.normals(self._key(generation), step, leaf, index, reference.STEP)
        g = self._r * z
        m = mu * old.m + g + w * old.theta
        size = np.abs(mu * old.m) + np.abs(g) + np.abs(w * old.theta)
        off_m = mu * old.off_m + w * old.off_theta + self._r * WATCHED_NOISE + _EPS * size
        theta = old.theta - a * m
        off = old.off_theta + a * off_m + _EPS * (np.abs(old.theta) + np.abs(a * m))
        return z, _Numbers(m, theta, off_m, off)

    # What is known but for rounding.

    def _sizes_check(self) -> CheckResult:
        detail = f"{self._end:,} steps"
        if self._others.size:
            k = int(self._others[0])
            given = self._program.table_optimizer.step_sizes[k]
            detail = f"step {k:,} takes {given:.6g}, and {self._sizes[k]:.6g} was asked for"
        return CheckResult(SIZES, not self._others.size, detail)

    def _moved_check(self) -> CheckResult:
        """Checks that a step makes rows of what it releases, and of what they were."""
        program, (mu, w) = self._program, self._rule.of
        first = self._snapshot.first()
        for step in looked_at(program):
            shown, after = (
                program.advanced(self._everybody, reveals=reveals, step=step).lazy_tables
                for reveals in (True, False)
            )
            for k, old in first.items():
                read = shown[k].steps == step + 1
                name = f"{self._names[k]} at step {step:,}"
                kept = Table(old.values, old.momentum, np.where(read, step + 1, step))
                if not _same_but_for(read, after[k], kept) or not _same_but_for(
                    read, shown[k], kept
                ):
                    return CheckResult(MOVED, False, f"{name}: a row that was not read has moved")
                old_m = 0.0 if old.momentum is None else old.momentum[read]
                m = mu * old_m + shown[k].values[read] + w * old.values[read].astype(np.float64)
                theta = old.values[read] - self._sizes[step] * m
                if not _close(after[k].values, theta, old.values, read):
                    return CheckResult(
                        MOVED, False, f"{name}: rows are not what SGD makes of its sum"
                    )
                if old.momentum is not None and not all(
                    _close(x.momentum, m, old.momentum, read) for x in (shown[k], after[k])
                ):
                    return CheckResult(
                        MOVED, False, f"{name}: momentum is not what its sum makes of it"
                    )
        return CheckResult(MOVED, True, "after a full batch; others stay what they are")

    def _silent_check(self, mechanism: Mechanism) -> CheckResult:
        """Checks the noise of rows that a NaN example alone reads, whose sum is 0.

        Noise that waits for a gradient tells who had one.
        """
        program = self._program
        if program.poison is None:
            return CheckResult(SILENT, True, program.why_no_poison, made=False)
        members = np.full(program.places, program.poison)
        for step in looked_at(program):
            after = program.advanced(members, mechanism, reveals=True, step=step)
            for k, table in after.lazy_tables.items():
                read = table.steps == step + 1
                index = self._index(k, self._snapshot.rows[k][read])
                z = reference.normals(self._key(0), step, k, index, reference.STEP)
                found = table.values[read].astype(np.float64).ravel() / self._r
                self._silent.add(found, z, WATCHED_NOISE, f"{self._names[k]}, step {step:,}")
        return self._silent.check(f"{self._silent.compared:,} numbers")

    def _fresh_check(self) -> CheckResult:
        """Checks that gradients are those of rows whose gap has ended."""
        program, step = self._program, self._reads[0]
        first = self._snapshot.first()
        numbers = [x.values for x in first.values() if x.values.size]
        size = max((float(np.sqrt(np.mean(np.square(x)))) for x in numbers), default=0.0) or 1.0
        moved = math.sqrt(self._rule.law(0, step)[1][1, 1])
        clip = program.mechanism.l2_clip_norm
        try:
            sigma = size * self._b / (clip * moved)
            mechanism = dataclasses.replace(program.mechanism, noise_multiplier=sigma)
        except (ValueError, ZeroDivisionError):
            return CheckResult(
                FRESH, True, "no noise moves rows as far as they are long", made=False
            )

        def at(steps: int, rows: dict[int, Table]) -> Any:
            rows = {
                k: jax.tree.map(np.float32, x)._replace(
                    steps=np.full(len(x.values), steps, np.int32)
                )
                for k, x in rows.items()
            }
            return program.advanced(self._everybody, mechanism, reveals=True, step=step, rows=rows)

        fresh = {}
        for k, x in first.items():
            index, starts = (
                self._index(k, self._snapshot.rows[k]),
                np.zeros(x.values.size, np.int64),
            )
            new = self._caught_up(
                k, index, self._numbers(x), starts, step, 0, sigma * clip / self._b
            )
            m = None if x.momentum is None else new.m.reshape(x.values.shape)
            fresh[k] = Table(new.theta.reshape(x.values.shape), m, None)
        shown, there, stale = (_shown(at(*of)) for of in ((0, first), (step, fresh), (step, first)))
        off, apart = (norm((1, x), (-1, there)) for x in (shown, stale))
        cells = 2.0**-18 * sigma * clip / self._b * math.sqrt(sum(program.sizes))
        if not 64 * cells < apart < math.inf:
            why = "gradients of the generated rows hardly depend on those of tables"
            return CheckResult(FRESH, True, why, made=False)
        detail = f"{off / apart:.2g} of what stale rows would change"
        return CheckResult(FRESH, off <= apart / 4, detail)

    # Reads.

    @functools.cached_property
    def _reads(self) -> list[int]:
        """Steps at which rows are read: after gaps of none, one, two and many steps."""
        last, k = self._end - 1, max(1, math.isqrt(self._end))
        first = min(k + 1, last)
        far = first + 2 ** max(0, (last - first).bit_length() - 1)  # a multiple of all smaller 2^k
        some = (first, first + 1, first + 3, first + 6, 3 * k, 4 * k + k // 2, far, last)
        return sorted({step for step in some if first <= step <= last})

    def _look_at_reads(self, mechanism: Mechanism) -> None:
        """Reads rows after one gap after the other; flushes them now and then."""
        program, reads = self._program, self._reads
        begin = reads[0]
        starts = [begin, begin - 1, begin - 2, 0, begin // 2, begin - begin % 3]
        now = self._first(starts)
        state: Any = program.begun(begin)
        state = state.with_tables(put_rows(state.lazy_tables, self._rows, now))
        flushes = {self._end} if self._large else {self._end, (reads[-1] + reads[-2:][0]) // 2 + 1}
        for number, step in enumerate([*reads, self._end]):
            for stop in sorted(f for f in flushes if number and int(state.step) <= f <= step):
                state = state._replace(step=jnp.int32(stop))
                state = program.flushed(state, mechanism, _GENERATION)
                now = self._compare_flushed(now, self._rows_of(state, stop), stop)
                state = program.layout.opened(state)
                flushes.remove(stop)
            if step < self._end:
                state, now = self._read(state, now, step, mechanism)

    def _first(self, starts: list[int]) -> dict[int, Table]:
        """Returns rows to begin with, which begin at some steps."""
        size, steps = self._r, np.array([max(0, start) for start in starts], np.int32)

        def pattern(shape: tuple[int, ...], stride: int) -> np.ndarray:
            numbers = stride * np.arange(math.prod(shape)).reshape(shape)
            return (numbers % 5 - 2).astype(np.float32)

        found = {}
        for k, rows in self._rows.items():
            shape = (rows.size, *self._snapshot.tables[k].values.shape[1:])
            theta = np.float32(size * self._sizes.max()) * pattern(shape, 1)
            m = None
            if self._snapshot.tables[k].momentum is not None:
                m = np.float32(size) * pattern(shape, 2)
            found[k] = Table(theta, m, steps[np.arange(rows.size) % steps.size])
        return found

    def _read(self, state: Any, now: dict[int, Table], step: int, mechanism: Mechanism) -> Any:
        """Returns the state after everybody took part in a step, and its rows."""
        program, how = self._program, (mechanism, _GENERATION)
        state = state._replace(step=jnp.int32(step))  # nobody read a row in between
        state = program.called(state, self._everybody, *how, reveals=True)
        shown = some_rows(state.lazy_tables, self._rows)
        tables = put_rows(state.lazy_tables, self._rows, now)
        state = state._replace(step=jnp.int32(step)).with_tables(tables)
        state = program.called(state, self._everybody, *how, reveals=False)
        after = some_rows(state.lazy_tables, self._rows)
        for k, before in now.items():
            read = shown[k].steps == step + 1
            kept = before._replace(steps=np.where(read, step + 1, before.steps))
            if not _same_but_for(read, shown[k], kept) or not _same_but_for(read, after[k], kept):
                why = f"{self._names[k]}: step {step:,} moved rows that it left out"
                self._law.wrong = self._law.wrong or why
            old, g = _of(before, read), _of(shown[k], read)
            index = self._index(k, self._rows[k][read])
            caught_up = self._caught_up(
                k, index, self._numbers(old), self._starts(old), step, _GENERATION
            )
            z, new = self._stepped(k, index, caught_up, step, _GENERATION)
            found, name = self._numbers(_of(after[k], read)), f"{self._names[k]} in step {step:,}"
            r, of_step = self._r, g.values.astype(np.float64).ravel() / self._r
            self._law.add(of_step, z, WATCHED_NOISE, f"the noise of {name}")
            self._law.add(found.theta / r, new.theta / r, new.off_theta / r, name)
            if g.momentum is not None:
                self._law.add(found.m / r, new.m / r, new.off_m / r, f"momentum of {name}")
        return state, after

    # Flushes.

    def _compare_flushed(
        self, old: dict[int, Table], found: dict[int, Table], stop: int
    ) -> dict[int, Table]:
        """Compares rows after a flush, and returns them."""
        for k, rows in old.items():
            index, name = (
                self._index(k, self._rows[k]),
                f"{self._names[k]} flushed at step {stop:,}",
            )
            of = k, index, self._numbers(rows), self._starts(rows), stop, _GENERATION
            new = self._caught_up(*of)
            self._on_grid(self._law, k, index, found[k], new, stop, _GENERATION, name)
        return found

    def _rows_of(self, state: TrainState, stop: int) -> dict[int, Table]:
        """Returns the rows of a state that was flushed."""
        found = some_rows(state.lazy_tables, self._rows)
        return {
            k: x._replace(steps=np.full(len(x.values), stop, np.int32)) for k, x in found.items()
        }

    def _on_grid(
        self,
        tests: Comparison,
        leaf: int,
        index: np.ndarray,
        found: Table,
        new: _Numbers,
        stop: int,
        generation: int,
        name: str,
    ) -> None:
        """Compares flushed numbers with those that they were rounded from, x to ceil(x - U)."""
        spread = self._r * np.sqrt(np.diagonal(self._rule.law(0, stop)[1]))
        for x, values, exact, off, stddev, purpose in (
            ("theta", found.values, new.theta, new.off_theta, spread[1], reference.VALUE),
            ("m", found.momentum, new.m, new.off_m, spread[0], reference.MOMENTUM),
        ):
            if values is None:
                continue
            cell, sure = _cell(stddev)
            flat = values.astype(np.float64).ravel()
            u = reference.uniforms(self._key(generation), stop, leaf, index, purpose)
            low, high = (_own_cell(exact + sign * off) for sign in (-1, 1))
            size = np.maximum(cell, np.maximum(low, high))
            known = sure & (stddev > 0) & ((low == high) | (np.maximum(low, high) <= cell))
            least, most = (np.ceil((exact + sign * off) / size - u) for sign in (-1, 1))
            rounded = np.clip(np.rint(flat / size), least, most) * size
            expected = np.where(known, rounded, exact)
            allowed = np.where(known, 0.0, off + 2 * size * (stddev > 0))
            tests.add(flat / self._r, expected / self._r, allowed / self._r, f"{x} of {name}")

    def _look_at_blocks(self, mechanism: Mechanism) -> None:
        """Looks at what `train_blocks` leaves, and where it says that no noise is due."""
        program = self._program
        few = max(4, _EXAMPLES // program.mechanism.sampler.padded_batch_size)
        steps = min(self._end, program.layout.block_steps + 2, 4 if self._large else few)
        first = self._end - steps
        self._train(mechanism, first, [first, first - 1, first // 2, 0], None)
        if not self._large:
            self._train(mechanism, 0, [0], _FLUSH_EVERY)

    def _train(
        self, mechanism: Mechanism, first: int, starts: list[int], flush_every: int | None
    ) -> None:
        """Looks at two flushes of training that begins at a step, with rows that began before."""
        program, now, flushes = self._program, self._first(starts), 0
        state = program.begun(first)
        state = state.with_tables(put_rows(state.lazy_tables, self._rows, now))
        generation = _TRAINED + (flush_every or 0)
        watch = Watch.nothing(program.state.params)
        rows = {k: self._watched(k, watch.places[k].size) for k in self._rows}
        places = [
            self._index(k, self._rows[k])[rows[k]].astype(np.int32) if k in rows else at
            for k, at in enumerate(watch.places)
        ]
        seen = {k: _Watched(self, k, rows[k], now[k]) for k in rows}
        blocks = program.trained(
            state,
            mechanism,
            generation=generation,
            flush_every=flush_every,
            watch=watch._replace(places=tuple(places)),
        )
        borders = np.cumsum([len(at) for at in places])[:-1]
        with closing(blocks):
            for block in blocks:
                stop = block.steps.stop
                due = stop < self._end and (flush_every is None or stop % flush_every > 0)
                if block.state.pending != due:
                    why = f"step {stop:,} leaves {'no ' if due else ''}pending noise"
                    self._whole.wrong = self._whole.wrong or why
                    return
                shown = np.split(np.asarray(block.watched, np.float64), borders, axis=1)
                for k, of in seen.items():
                    for j, step in enumerate(block.steps):
                        of.step(step, shown[k][j], generation, self._whole)
                if due:
                    continue
                found = self._rows_of(block.state, stop)
                for k, of in seen.items():
                    of.flush(stop, found[k], generation, self._whole)
                flushes += 1
                if flushes == 2:
                    return

    def _watched(self, leaf: int, count: int) -> np.ndarray:
        """Returns coordinates, among those of the rows that are looked at, which blocks show."""
        read = np.isin(self._rows[leaf], self._snapshot.rows[leaf])
        width = math.prod(self._snapshot.tables[leaf].values.shape[1:])
        each = min(_COLUMNS, width)
        wanted = -(-count // each)
        some = [np.flatnonzero(read), np.flatnonzero(~read)]  # of both kinds, from end to end
        half = [x[np.linspace(0, x.size - 1, min(x.size, wanted)).astype(int)] for x in some]
        chosen = np.sort(np.concatenate(half)[: 2 * wanted])
        chosen = chosen[np.linspace(0, chosen.size - 1, min(chosen.size, wanted)).astype(int)]
        columns = np.linspace(0, width - 1, each).astype(int)
        return np.resize((chosen[:, None] * width + columns).ravel(), count)


class _Watched:
    """Coordinates of a table that blocks of training show after every step.

    A row was read in a step if one of them has changed. Where a read would change none, as steps
    are too short, nothing tells whether it was, and the row is left out until it is flushed.
    """

    def __init__(self, late: _Late, leaf: int, places: np.ndarray, now: Table):
        self._late, self._leaf, self._places = late, leaf, places
        self._index = late._index(leaf, late._rows[leaf])[places]
        self._row = places // math.prod(now.values.shape[1:])
        self._begin(now)

    def _begin(self, now: Table) -> None:
        at, numbers = self._places, self._late._numbers(now)
        self._now = _Numbers(numbers.m[at], numbers.theta[at], *np.zeros((2, at.size)))
        self._starts = self._late._starts(now)[at]
        self._known = np.ones(at.size, bool)

    def step(self, step: int, shown: np.ndarray, generation: int, tests: Comparison) -> None:
        """Compares what a step leaves: float64[places]."""
        late, leaf, old = self._late, self._leaf, self._now
        caught_up = late._caught_up(leaf, self._index, old, self._starts, step, generation)
        _, new = late._stepped(leaf, self._index, caught_up, step, generation)
        read = self._any(shown != old.theta)
        self._known &= read | self._any(np.abs(new.theta - old.theta) > 2 * new.off_theta)
        at, name = read & self._known, f"{late._names[leaf]} trained in step {step:,}"
        r = late._r
        tests.add(shown[at] / r, new.theta[at] / r, new.off_theta[at] / r, name)
        self._now = _Numbers(
            np.where(read, new.m, old.m), shown, np.where(read, new.off_m, old.off_m), 0 * shown
        )
        self._starts = np.where(read, step + 1, self._starts)

    def flush(self, stop: int, found: Table, generation: int, tests: Comparison) -> None:
        """Compares what a flush leaves of the rows that are looked at."""
        late, leaf, known = self._late, self._leaf, self._known
        new = late._caught_up(leaf, self._index, self._now, self._starts, stop, generation)
        of: Any = [None if x is None else x.ravel()[self._places][known] for x in found[:2]]
        parts = (
            self._index[known],
            Table(of[0], of[1], None),
            jax.tree.map(lambda x: x[known], new),
        )
        name = f"{late._names[leaf]} at step {stop:,} of training"
        late._on_grid(tests, leaf, *parts, stop, generation, name)
        self._begin(found)

    def _any(self, coordinates: np.ndarray) -> np.ndarray:
        """Returns of which coordinates one of the same row is among these."""
        return np.isin(self._row, self._row[coordinates])


def _shown(state: Any) -> list[np.ndarray]:
    """Returns the gradient that a step shows."""
    rows = [x.values[x.steps == int(state.step)].ravel() for x in state.lazy_tables.values()]
    return [*(np.ravel(np.asarray(x)) for x in jax.tree.leaves(state.dense_params)), *rows]


def _own_cell(x: np.ndarray) -> np.ndarray:
    """Returns the cell of a number's own power of two; 0 of 0."""
    _, order = np.frexp(x)
    return np.where(x == 0, 0.0, np.ldexp(1.0, order - 1 - _MOST_CELLS))


def _of(table: Table, some: np.ndarray) -> Table:
    return jax.tree.map(lambda x: x[some], table)


def _close(found: np.ndarray, expected: np.ndarray, old: np.ndarray, read: np.ndarray) -> bool:
    """Whether rows that were read are the expected ones up to rounding."""
    return close(found[read].ravel(), expected.astype(np.float32).ravel(), old[read].ravel())


def _same_but_for(read: np.ndarray, found: Table, kept: Table) -> bool:
    """Whether rows that were not read are the same to the bit, and steps those that are kept."""
    return np.array_equal(found.steps, kept.steps) and all(
        x[~read].tobytes() == y[~read].tobytes()
        for x, y in zip(found[:2], kept[:2], strict=True)
        if x is not None
    )


def _cell(stddev: float) -> tuple[float, bool]:
    """Returns the cell of the grid of noise of this deviation; whether rounding leaves no doubt."""
    order = math.log2(max(stddev, 2.0**-100))
    cell = 2.0 ** (math.floor(order) - _GRID_BITS)
    if 1e-5 < order % 1 < 1 - 1e-5:
        return cell, True
    return 2.0 ** (round(order) - _GRID_BITS), False


def _step_sizes(rate: Any, num_steps: int) -> np.ndarray:
    """Returns the step sizes of a run, as its configuration has them: float64[num_steps]."""
    if not callable(rate):
        return np.full(num_steps, float(rate))
    try:  # a schedule of JAX's, all at once
        return np.asarray(jax.vmap(rate)(jnp.arange(num_steps)), np.float64).reshape(num_steps)
    except Exception:  # or one of any other kind
        return np.array([float(rate(k)) for k in range(num_steps)])
