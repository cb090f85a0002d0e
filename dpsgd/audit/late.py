r"""Noise that comes late: what rows of tables are given for the steps in which nobody read them.

The law is simulated here, step by step and in float64, from the rule by which the optimizer moves a
row, m = mu m + g + w theta, theta = theta - a_t m, with g = r z, r = sigma C / b of the
configuration and a_t of its schedule: nothing is taken from `dpsgd.tables`. Sums are drowned: C
2^-k and sigma 2^k leave r as it is, so that all that moves is noise.

**Reads.** Rows begin at steps and with numbers of the audit's own. The executable reads them, again
and again, after gaps of none, one, two and many steps; between, nobody does. Each step is run twice
from one state: once it shows the private gradient g, once the numbers that it leaves. So m and
theta before the step are known, and with them the Gaussian pair of the gap. It is whitened by the
simulated law: two standard normals a coordinate, and g / r is a third. All are independent: of each
other, over steps, coordinates, tables and keys.

**Flushes.** `flushed` ends gaps of rows that were read and of rows that never were, and so does
`train_blocks` where it says so: whoever took part, and whenever, numbers that began at s as x are A
x plus noise of the whole stretch, of one law for all rows. What is flushed is rounded to a public
grid: noise of less than 16 cells is hidden in it, and left out. Of tables too large to look at,
rows at both ends, around the borders of the passes and in between are taken.

**Freshness.** Under much noise rows move far in a gap. Gradients that are taken where a gap ends
are those of rows that began there, and not those of what the rows held before.

Where a number is known but for rounding, it is compared: the tests of normality resolve nothing
near the rounding of float32, or cells, for which more is allowed.
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

from dpsgd.audit.checks import Check, Several, count_pvalue, variance_pvalue
from dpsgd.audit.lent import LentTables, SomeRows, put_rows, some_rows
from dpsgd.audit.noise import drowned_mechanism
from dpsgd.audit.normal import Counts, add_cosines, add_distribution, add_lags, magnitudes
from dpsgd.audit.program import AuditedProgram
from dpsgd.audit.sums import norm
from dpsgd.audit.update import close, looked_at
from dpsgd.core.state import TrainState, dense_numbers
from dpsgd.training.mechanism import Mechanism

SIZES = "tables take the step sizes of the configuration"
MOVED = "rows of tables move by their release alone"
FRESH = "gradients are taken at rows that are up to date"
LAW = "noise that comes late has the law of the steps that it stands for"
APART = "noise that comes late is independent of all other"
SILENT = "rows that are read without a gradient have the noise of the step"
FLUSHED = "what is flushed has the noise of every step"
GRID = "flushed rows lie on one public grid"

_GRID_BITS = 10  # of a flush: cells of 2^-10 to 2^-11 of the noise since the run's first step
_EPS = 2.0**-21  # of float32, what a few operations round
_SHARP = 2.0**-6  # rounding beside noise that is tested, at most
_CELLS = 2.0**-4  # a cell beside noise that is tested, at most
_THIN = 2.0**-7  # of theta's deviation, that which m does not tell, at least
_FAR = 12.0  # deviations beyond which nothing is
_WHOLE = 2**17  # numbers of a table of which all rows are looked at
_LARGE = 2**26  # numbers of tables that are flushed as seldom as can be
_PASS = 2**16  # rows of a pass of a flush
_BORDERS = 32  # between passes, at most
_STRETCH = 64  # rows of each that are compared with those of others
_TWINS = 2.0**-8  # how near two rows are that have the same noise
_COMPARED = 2**10  # rows of a step that are compared with each other
_WANTED = 2**13  # draws of gaps
_GENERATIONS = 2, 12
_TRAINED = 40  # generation of whole blocks
_FLUSH_EVERY = 3
_EXAMPLES = 2**14  # of the steps of training that are looked at, about
_DENSE = 2**10  # coordinates of a dense leaf
_SAMPLE = 2**18  # of draws, what is compared with the law


def late_checks(program: AuditedProgram) -> list[Check]:
    """Checks the noise of tables that comes late; of a program without such tables, nothing."""
    if program.lent is None:
        return []
    return [program.lent.check(), *_Late(program, program.lent).checks()]


class _Law(NamedTuple):
    """How (m, theta) moves over a stretch of steps, at r = 1."""

    transition: np.ndarray
    covariance: np.ndarray


class _Rule:
    """The optimizer's rule, and the law of its stretches by simulation."""

    def __init__(self, sizes: np.ndarray, momentum: float, decay: float):
        self.of, self._sizes = (momentum, decay), sizes
        self._paths: dict[int, list[tuple[float, ...]]] = {}

    def law(self, start: int, stop: int) -> _Law:
        """Returns that of the steps start, ..., stop - 1."""
        if start not in self._paths:
            self._paths[start] = self._simulated(start)
        a, b, c, d, mm, mt, tt = self._paths[start][stop - start]
        return _Law(np.array([[a, b], [c, d]]), np.array([[mm, mt], [mt, tt]]))

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


class _Draws(NamedTuple):
    """What should be standard normals of some rows of a table; NaN where it is not seen."""

    event: str
    leaf: int
    values: np.ndarray
    """float64[rows, ...]."""
    generation: int


class _Late:
    """What is seen of a program's tables, and the tests that it goes through."""

    def __init__(self, program: AuditedProgram, lent: LentTables):
        self._program, self._lent = program, lent
        tables: Any = program.algorithm.tables
        self._end = program.mechanism.sampler.num_steps
        assert tables is not None
        self._sizes = _step_sizes(tables.learning_rate, self._end)
        self._rule = _Rule(self._sizes, tables.momentum, tables.weight_decay)
        self._b = program.mechanism.sampler.expected_batch_size
        self._r = program.mechanism.noise_multiplier * program.mechanism.l2_clip_norm / self._b
        self._everybody = np.arange(program.places) % program.units
        self._large = sum(table.values.size for table in lent.tables.values()) > _LARGE
        self._begun = {k: self._stretches(k) for k in lent.rows}
        self._rows = {k: self._looked_at(k) for k in lent.rows}
        paths = jax.tree_util.tree_leaves_with_path(program.state.params)
        self._names = {k: f"leaf {jax.tree_util.keystr(paths[k][0])}" for k in self._rows}
        self._law, self._apart, self._whole, self._grid = (Several() for _ in range(4))
        self._flushed: list[np.ndarray] = []
        self._off_grid = ""
        self._rng = np.random.default_rng(0)  # of what is not seen, and of digits within cells

    def _looked_at(self, leaf: int) -> np.ndarray:
        """Returns the rows of a table that are looked at: those that are read, and others."""
        values = self._lent.tables[leaf].values
        count, some = len(values), max(4, _WHOLE // values[0].size)
        if count <= some:
            return np.arange(count, dtype=np.int32)
        begun = self._begun[leaf]
        parts = [
            self._lent.rows[leaf],
            np.arange(some // 2),
            np.linspace(0, count - 1, some // 4),
            np.arange(count - some // 4, count),
            *(begun + k for k in range(_STRETCH)),
            begun[begun > 0] - 1,
        ]
        rows = np.unique(np.concatenate(parts).astype(np.int32))
        return rows[rows < count]

    def _stretches(self, leaf: int) -> np.ndarray:
        """Returns the rows with which passes of a flush begin, and what other devices hold."""
        count, placement = len(self._lent.tables[leaf].values), self._program.layout.placement
        devices = 1 if placement is None else len(placement.devices)
        if devices > 1 and count % devices == 0:
            return np.arange(devices) * (count // devices)
        begun = np.append(np.arange(0, max(1, count - _PASS + 1), _PASS), max(0, count - _PASS))
        begun = np.unique(begun[:: -(-begun.size // _BORDERS)])
        return begun[np.append(True, np.diff(begun) >= _STRETCH)]

    def checks(self) -> list[Check]:
        """Takes all looks, and returns what was seen."""
        checks = [self._sizes_check(), self._moved_check(), self._fresh_check()]
        drowned = drowned_mechanism(self._program.mechanism)
        if drowned is None:
            why = f"C = {self._program.mechanism.l2_clip_norm:.3g} is next to the least there is"
            left_out = (SILENT, LAW, APART, FLUSHED, GRID)
            return checks + [Check(name, True, why, made=False) for name in left_out]
        checks.append(self._silent_check(drowned))
        seen = self._look_at_reads(drowned)
        self._look_at_blocks(drowned)
        grid = Check(GRID, False, self._off_grid) if self._off_grid else self._grid.check(GRID)
        return [
            *checks,
            self._law.check(LAW, f"{seen:,} draws"),
            self._apart.check(APART),
            self._whole.check(FLUSHED),
            grid,
        ]

    def _silent_check(self, drowned: Mechanism) -> Check:
        """Checks the noise of rows that a NaN example alone reads, whose sum is 0.

        Noise that waits for a gradient tells who had one.
        """
        program, tests = self._program, Several()
        if program.poison is None:
            return Check(SILENT, True, program.why_no_poison, made=False)
        members, seen = np.full(program.places, program.poison), 0
        for step in looked_at(program):
            after = program.advanced(members, drowned, reveals=True, step=step)
            for k, table in after.tables.items():
                z = table.values[table.steps == step + 1].astype(np.float64) / self._r
                tests.add(variance_pvalue(np.sum(z**2), z.size), f"{self._names[k]}, step {step:,}")
                seen += z.size
        return tests.check(SILENT, f"{seen:,} draws")

    # What is known but for rounding.

    def _sizes_check(self) -> Check:
        given = np.array(self._program.table_optimizer.step_sizes)
        off = np.abs(given - self._sizes)
        wrong = np.flatnonzero(~(off <= 1e-5 * self._sizes + 1e-7 * self._sizes.max()))
        detail = f"{self._end:,} steps"
        if wrong.size:
            k = int(wrong[0])
            detail = f"step {k:,} takes {given[k]:.6g}, and {self._sizes[k]:.6g} was asked for"
        return Check(SIZES, not wrong.size, detail)

    def _moved_check(self) -> Check:
        """Checks that a step makes rows of what it releases, and of what they were."""
        program, (mu, w) = self._program, self._rule.of
        first = self._lent.first()
        for step in looked_at(program):
            shown, after = (
                program.advanced(self._everybody, reveals=reveals, step=step).tables
                for reveals in (True, False)
            )
            for k, old in first.items():
                read = shown[k].steps == step + 1
                name = f"{self._names[k]} at step {step:,}"
                kept = SomeRows(old.values, old.momentum, np.where(read, step + 1, step))
                if not _same_but_for(read, after[k], kept) or not _same_but_for(
                    read, shown[k], kept
                ):
                    return Check(MOVED, False, f"{name}: a row that was not read has moved")
                old_m = 0.0 if old.momentum is None else old.momentum[read]
                m = mu * old_m + shown[k].values[read] + w * old.values[read].astype(np.float64)
                theta = old.values[read] - self._sizes[step] * m
                if not _close(after[k].values, theta, old.values, read):
                    return Check(MOVED, False, f"{name}: rows are not what SGD makes of its sum")
                if old.momentum is not None and not all(
                    _close(x.momentum, m, old.momentum, read) for x in (shown[k], after[k])
                ):
                    return Check(MOVED, False, f"{name}: momentum is not what its sum makes of it")
        return Check(MOVED, True, "after a full batch; others stay what they are")

    def _fresh_check(self) -> Check:
        """Checks that gradients are those of rows whose gap has ended."""
        program, step = self._program, self._reads[0]
        first = self._lent.first()
        numbers = [x.values for x in first.values() if x.values.size]
        size = max((float(np.sqrt(np.mean(np.square(x)))) for x in numbers), default=0.0) or 1.0
        moved = math.sqrt(self._rule.law(0, step).covariance[1, 1])
        clip = program.mechanism.l2_clip_norm
        try:
            sigma = size * self._b / (clip * moved)
            mechanism = dataclasses.replace(program.mechanism, noise_multiplier=sigma)
        except (ValueError, ZeroDivisionError):
            return Check(FRESH, True, "no noise moves rows as far as they are long", made=False)

        def at(steps: int, rows: dict[int, SomeRows], *, reveals: bool = True) -> Any:
            rows = {
                k: jax.tree.map(np.float32, x)._replace(
                    steps=np.full(len(x.values), steps, np.int32)
                )
                for k, x in rows.items()
            }
            return program.advanced(
                self._everybody, mechanism, reveals=reveals, step=step, rows=rows
            )

        shown, after = (at(0, first, reveals=reveals) for reveals in (True, False))
        fresh = {k: self._before(step, shown.tables[k], after.tables[k])[0] for k in first}
        there, stale = at(step, fresh), at(step, first)
        off, apart = (norm((1, _shown(x)), (-1, _shown(there))) for x in (shown, stale))
        cells = 2.0**-18 * sigma * clip / self._b * math.sqrt(sum(program.sizes))
        if not 64 * cells < apart < math.inf:
            why = "gradients of the generated rows hardly depend on those of tables"
            return Check(FRESH, True, why, made=False)
        detail = f"{off / apart:.2g} of what stale rows would change"
        return Check(FRESH, off <= apart / 4, detail)

    def _before(
        self, step: int, shown: SomeRows, after: SomeRows
    ) -> tuple[SomeRows, tuple[float, float]]:
        """Returns what rows that were read held before a step, and how far it is rounded.

        Args:
          step: t.
          shown: What the step leaves where it shows the gradient: values g, and the momentum.
          after: What it leaves: values theta, and the momentum.
        """
        (mu, w), a, r = self._rule.of, self._sizes[step], self._r
        g, theta = (x.values.astype(np.float64) for x in (shown, after))
        size = float(np.max(np.abs(g), initial=0))
        if after.momentum is None:
            kept = 1 - a * w
            return SomeRows((theta + a * g) / kept, None, after.steps), (
                0.0, _EPS * (np.max(np.abs(theta), initial=0) + a * size) / (r * kept)
            )  # fmt: skip
        m = after.momentum.astype(np.float64)
        theta = theta + a * m
        most = float(np.max(np.abs(m), initial=0))
        far = float(np.max(np.abs(theta), initial=0))
        errors = _EPS * (most + size + w * far) / (r * mu), _EPS * (far + a * most) / r
        return SomeRows(theta, (m - g - w * theta) / mu, after.steps), errors

    # Reads.

    @functools.cached_property
    def _reads(self) -> list[int]:
        """Steps at which rows are read: after gaps of none, one, two and many steps."""
        last, k = self._end - 1, max(1, math.isqrt(self._end))
        first = min(k + 1, last)
        far = first + 2 ** max(0, (last - first).bit_length() - 1)  # a multiple of all smaller 2^k
        some = (first, first + 1, first + 3, first + 6, 3 * k, 4 * k + k // 2, far, last)
        return sorted({step for step in some if first <= step <= last})

    def _look_at_reads(self, drowned: Mechanism) -> int:
        """Looks at rows that are read after gaps, under several keys; returns how many draws."""
        draws = self._chain(drowned, 0)
        once = sum(np.isfinite(one.values).sum() for one in draws if one.event.startswith("gap"))
        least, most = _GENERATIONS
        for generation in range(1, min(most, max(least, math.ceil(_WANTED / max(1, once))))):
            draws += self._chain(drowned, generation)
        by_event: dict[tuple[str, int], list[np.ndarray]] = {}
        by_key: dict[int, list[np.ndarray]] = {}
        for one in draws:
            by_event.setdefault((one.event, one.leaf), []).append(one.values)
            by_key.setdefault(one.generation, []).append(one.values)
        names, vectors = [], []
        for (event, leaf), parts in by_event.items():
            name = f"{event} of {self._names.get(leaf, 'dense leaves')}"
            z = np.stack(parts)
            _add_energies(self._law, z, name)
            if leaf >= 0:
                _add_twins(self._apart, z, name)
            names.append(name)
            vectors.append(self._filled(z))
            add_lags(self._apart, vectors[-1], name)
        keys = [self._filled(np.concatenate([x.ravel() for x in of])) for of in by_key.values()]
        self._add_cosines(vectors, names)
        self._add_cosines(keys, [f"generation {g}" for g in by_key])
        for kind in ("gap", "step", ""):
            of = [x.values.ravel() for x in draws if x.event.startswith(kind) and x.leaf >= 0]
            _add_law(self._law, np.concatenate(of), f"{kind or 'draw'}s", _CELLS)
        return sum(int(np.isfinite(one.values).sum()) for one in draws)

    def _filled(self, z: np.ndarray) -> np.ndarray:
        """Returns draws with others of the audit's own where they are not seen: of one law."""
        return np.where(np.isfinite(z), z, self._rng.standard_normal(z.shape)).ravel()

    def _add_cosines(self, vectors: list[np.ndarray], names: list[str]) -> None:
        add_cosines(self._apart, vectors, names)
        add_cosines(self._apart, [magnitudes(x) for x in vectors], names, " but for signs")

    def _chain(self, drowned: Mechanism, generation: int) -> list[_Draws]:
        """Reads rows after one gap after the other; flushes them now and then."""
        program, reads, draws = self._program, self._reads, []
        begin = reads[0]
        starts = [begin, begin - 1, begin - 2, 0, begin // 2, begin - begin % 3]
        now = self._first(starts, generation)
        state = program.begun(begin)
        state = state._replace(tables=put_rows(state.tables, self._rows, now))
        flushes = {self._end} if self._large else {self._end, (reads[-1] + reads[-2:][0]) // 2 + 1}
        for number, step in enumerate([*reads, self._end]):
            stops = [f for f in sorted(flushes) if int(state.step) <= f <= step]
            for stop in stops if generation == 0 and number else ():
                state, now, found = self._flush(state, now, stop, drowned, generation)
                draws += found
                flushes.remove(stop)
            if step < self._end:
                state, now, found = self._read(state, now, step, drowned, generation)
                draws += found
        return draws

    def _first(self, starts: list[int], shift: int) -> dict[int, SomeRows]:
        """Returns rows to begin with, which begin at some steps."""
        size, steps = self._r, np.array([max(0, start) for start in starts], np.int32)

        def pattern(shape: tuple[int, ...], stride: int) -> np.ndarray:
            numbers = stride * np.arange(math.prod(shape)).reshape(shape)
            return (numbers % 5 - 2).astype(np.float32)

        found = {}
        for k, rows in self._rows.items():
            shape = (rows.size, *self._lent.tables[k].values.shape[1:])
            theta = np.float32(size * self._sizes.max()) * pattern(shape, 1)
            m = None
            if self._lent.tables[k].momentum is not None:
                m = np.float32(size) * pattern(shape, 2)
            found[k] = SomeRows(theta, m, steps[(np.arange(rows.size) + shift) % steps.size])
        return found

    def _read(self, state, now, step, drowned, generation):
        """Returns the state after everybody took part in a step, its rows, and their draws."""
        program, how = self._program, (drowned, generation)
        state = state._replace(step=jnp.int32(step))  # nobody read a row in between
        state = program.called(state, self._everybody, *how, reveals=True)
        shown = some_rows(state.tables, self._rows)
        frozen = dense_numbers(self._program.frozen, self._program.tables)
        noised = [x for k, x in enumerate(jax.tree.leaves(state.dense)) if k not in frozen]
        leaves = [np.ravel(np.asarray(x))[:_DENSE] for x in noised]
        dense = np.concatenate([np.zeros(0), *leaves])
        tables = put_rows(state.tables, self._rows, now)
        state = state._replace(step=jnp.int32(step), tables=tables)
        state = program.called(state, self._everybody, *how, reveals=False)
        after = some_rows(state.tables, self._rows)
        draws = [_Draws(f"step {step:,}", -1, dense.astype(np.float64) / self._r, generation)]
        for k, before in now.items():
            read = shown[k].steps == step + 1
            kept = before._replace(steps=np.where(read, step + 1, before.steps))
            if not _same_but_for(read, shown[k], kept) or not _same_but_for(read, after[k], kept):
                self._law.add(0.0, f"{self._names[k]}: step {step:,} moved rows that it left out")
            old, new, g = (_of(x, read) for x in (before, after[k], shown[k]))
            found, errors = self._before(step, g, new)
            z = self._whitened(k, old, found, step, errors, _SHARP, self._law)
            names = (f"gap to step {step:,}", f"gap to step {step:,}, momentum")
            draws += [_Draws(*x, generation) for x in zip(names, (k, k), z, strict=True)]
            draws.append(_Draws(f"step {step:,}", k, g.values / self._r, generation))
        return state, after, draws

    def _flush(self, state, now, stop, drowned, generation):
        """Returns the state after a flush, its rows, and the draws of those that are read."""
        state = state._replace(step=jnp.int32(stop))
        state = self._program.flushed(state, drowned, generation)
        after, z = self._look_at_flushed(state, now, stop, "a flush", self._law)
        draws = []
        for k, pair in z.items():
            read = np.isin(self._rows[k], self._lent.rows[k])
            names = (f"flush at step {stop:,}", f"flush at step {stop:,}, momentum")
            for name, one in zip(names, pair, strict=True):
                draws.append(_Draws(name, k, one[read], generation))
        return self._program.layout.opened(state), after, draws

    # Flushes.

    def _look_at_blocks(self, drowned: Mechanism) -> None:
        """Looks at what `train_blocks` leaves where it says that no noise is due."""
        program = self._program
        few = max(4, _EXAMPLES // program.mechanism.sampler.padded_batch_size)
        steps = min(self._end, program.layout.block_steps + 2, 4 if self._large else few)
        first = self._end - steps
        self._trained(drowned, first, [first, first - 1, first // 2, 0], None)
        if not self._large:
            self._trained(drowned, 0, [0], _FLUSH_EVERY)
        _add_law(self._whole, np.concatenate(self._flushed), "that is flushed", _CELLS)

    def _trained(
        self, drowned: Mechanism, first: int, starts: list[int], flush_every: int | None
    ) -> None:
        """Looks at two flushes of training that begins at a step, with rows that began before."""
        program, now, flushes = self._program, self._first(starts, 0), 0
        state = program.begun(first)
        state = state._replace(tables=put_rows(state.tables, self._rows, now))
        generation = _TRAINED + (flush_every or 0)
        blocks = program.trained(state, drowned, generation=generation, flush_every=flush_every)
        with closing(blocks):
            for block in blocks:
                stop = block.steps.stop
                due = stop < self._end and (flush_every is None or stop % flush_every > 0)
                if isinstance(block.state, TrainState) == due:
                    self._whole.add(0.0, f"step {stop:,} leaves a {type(block.state).__name__}")
                    return
                if not due:
                    flushes += 1
                    what = f"training from step {first:,}"
                    now, _ = self._look_at_flushed(block.state, now, stop, what, self._whole)
                if flushes == 2:
                    return

    def _look_at_flushed(
        self, state: TrainState, now: dict[int, SomeRows], stop: int, what: str, tests: Several
    ) -> tuple[dict[int, SomeRows], dict[int, tuple[np.ndarray, np.ndarray]]]:
        """Tests rows that were flushed; returns them, and their draws of theta and of m.

        Args:
          state: After `stop` steps.
          now: What the rows were, and at which steps.
          stop: Steps that are done.
          what: Whose flush it is.
          tests: To which those of the law are added.
        """
        leaves, momenta = jax.tree.leaves(state.params), state.opt_state.momenta
        tables = {k: SomeRows(leaves[k], momenta[k], None) for k in now}
        found, draws = some_rows(tables, self._rows), {}
        spread = np.sqrt(np.diagonal(self._rule.law(0, stop).covariance))
        names, vectors = [], []
        for k, before in now.items():
            name = f"{self._names[k]} at step {stop:,} of {what}"
            theta, cell = self._in_cells(found[k].values, spread[1], name)
            m, cell_of_m = None, 0.0
            if found[k].momentum is not None:
                m, cell_of_m = self._in_cells(found[k].momentum, spread[0], name)
            moved, cells = SomeRows(theta, m, None), (cell_of_m, cell)
            z = draws[k] = self._whitened(k, before, moved, stop, cells, _CELLS, tests)
            read = np.isin(self._rows[k], self._lent.rows[k])
            for of, one in zip(("theta", "m"), z, strict=True):
                for which, some in ((read, "read"), (~read, "unread")):
                    _add_energies(tests, one[which], f"{of} of {some} rows of {name}")
                _add_law(tests, one, f"{of} of {name}", _CELLS)
                if tests is self._whole:
                    self._flushed.append(one.ravel())
                if np.isfinite(one).any():
                    vectors.append(self._filled(one))
                    names.append(f"{of} of {name}")
                    _add_shifts(self._apart, vectors[-1], names[-1])
                    self._compare_stretches(k, vectors[-1], names[-1])
            self._look_at_cells(found[k], z, spread, read, name)
        self._add_cosines(vectors, names)
        steps = {k: np.full(len(rows), stop, np.int32) for k, rows in self._rows.items()}
        return {k: x._replace(steps=steps[k]) for k, x in found.items()}, draws

    def _compare_stretches(self, leaf: int, z: np.ndarray, name: str) -> None:
        """Tests rows with which passes begin against each other: each could be numbered anew."""
        rows, begun = self._rows[leaf], self._begun[leaf]
        length = min(_STRETCH, int(np.min(np.diff(begun), initial=_STRETCH)))
        width = z.size // rows.size
        at = np.searchsorted(rows, begun)
        some = [z[start * width : (start + length) * width] for start in at]
        names = [f"rows from {row:,} on, {name}" for row in begun]
        whole = [k for k, x in enumerate(some) if x.size == length * width]
        self._add_cosines([some[k] for k in whole], [names[k] for k in whole])

    def _in_cells(self, x: np.ndarray, spread: float, name: str) -> tuple[np.ndarray, float]:
        """Returns flushed numbers with digits below the cells of the grid; and a cell, over r."""
        cell, sure = _cell(self._r * spread)
        count = x.astype(np.float64) / (cell if sure else cell / 2)
        if np.any((np.abs(count) < 2.0**23) & (count != np.rint(count))):
            self._off_grid = self._off_grid or f"{name}: numbers that are no whole cells"
        return x + cell * self._rng.uniform(-0.5, 0.5, x.shape), cell / self._r

    def _look_at_cells(
        self, found: SomeRows, z: Any, spread: np.ndarray, read: np.ndarray, name: str
    ) -> None:
        """Tests whether every other number is odd, in cells, in rows of every kind."""
        for x, seen, size in zip((found.values, found.momentum), z, spread[::-1], strict=True):
            cell, sure = _cell(self._r * size)
            if x is None or not sure:
                continue
            odd = np.rint(x.astype(np.float64) / cell) % 2 == 1
            number = np.arange(len(x))
            for some in (read, ~read, number % 2 == 0, number % 2 == 1):
                among = np.isfinite(seen[some])
                if among.any():
                    count = np.count_nonzero(odd[some] & among)
                    self._grid.add(count_pvalue(count, among.sum(), 0.5), name)

    def _whitened(
        self,
        leaf: int,
        before: SomeRows,
        after: SomeRows,
        stop: int,
        errors: tuple[float, float],
        share: float,
        tests: Several,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns what should be standard normals of theta and of m: NaN where rounding hides it.

        Args:
          leaf: Number of the table.
          before: Rows, and at which steps.
          after: The same after `stop` steps, with noise alone: float64.
          stop: When.
          errors: How far m and theta are rounded, over r.
          share: Of the noise that is tested, what rounding may be.
          tests: To which those numbers are added that cannot be.
        """
        shape = after.values.shape
        of_theta, of_m = np.full(shape, np.nan), np.full(shape, np.nan)
        error_m, error = errors
        for start in np.unique(before.steps).tolist():
            some = before.steps == start
            (a, v), old = self._rule.law(start, stop), _of(before, some)
            old_m = 0.0 if old.momentum is None else old.momentum.astype(np.float64)
            moved = after.values[some] - a[1, 0] * old_m - a[1, 1] * old.values.astype(np.float64)
            rest, deviation, spread = moved / self._r, math.sqrt(v[1, 1]), math.sqrt(v[1, 1])
            own = error + _EPS * _size(old) / self._r
            if after.momentum is not None:
                moved = after.momentum[some] - a[0, 0] * old_m - a[0, 1] * old.values
                moved, of = moved / self._r, math.sqrt(v[0, 0])
                own_m = error_m + _EPS * _size(old) / self._r
                slope = v[0, 1] / v[0, 0] if v[0, 0] else 0.0
                left = math.sqrt(max(0.0, v[1, 1] - slope * v[0, 1]))
                tests.add(float(np.all(np.abs(moved) <= _FAR * of + 4 * own_m)), self._names[leaf])
                if own_m <= share * of and (
                    abs(slope) * own_m <= share * left or own > share * spread
                ):
                    of_m[some] = moved / of
                    rest, deviation = rest - slope * moved, left
                    own += abs(slope) * own_m
            thin = _THIN * spread
            far = np.abs(rest) <= _FAR * max(deviation, thin) + 4 * own
            tests.add(float(np.all(far)), f"{self._names[leaf]}, from step {start:,} to {stop:,}")
            if own <= share * deviation and deviation >= thin:
                of_theta[some] = rest / deviation
        return of_theta, of_m


def _shown(state: Any) -> list[np.ndarray]:
    """Returns the gradient that a step shows."""
    rows = [x.values[x.steps == int(state.step)].ravel() for x in state.tables.values()]
    return [*(np.ravel(np.asarray(x)) for x in jax.tree.leaves(state.dense)), *rows]


def _of(table: SomeRows, some: np.ndarray) -> SomeRows:
    return jax.tree.map(lambda x: x[some], table)


def _close(found: np.ndarray, expected: np.ndarray, old: np.ndarray, read: np.ndarray) -> bool:
    """Whether rows that were read are the expected ones up to rounding."""
    return close(found[read].ravel(), expected.astype(np.float32).ravel(), old[read].ravel())


def _size(table: SomeRows) -> float:
    return max(float(np.max(np.abs(x), initial=0)) for x in table[:2] if x is not None)


def _same_but_for(read: np.ndarray, found: SomeRows, kept: SomeRows) -> bool:
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


def _add_energies(tests: Several, z: np.ndarray, name: str) -> None:
    """Tests the squares of draws in all, and along each axis, where they are seen."""
    seen = np.isfinite(z)
    squares, along = np.where(seen, z, 0.0) ** 2, Several()
    tests.add(variance_pvalue(squares.sum(), seen.sum()), name)
    for axis, length in enumerate(z.shape):
        others = tuple(k for k in range(z.ndim) if k != axis)
        if others and length > 1:
            pvalues = variance_pvalue(squares.sum(axis=others), seen.sum(axis=others))
            along.add(pvalues, functools.partial("{2:,} along axis {0} of {1}".format, axis, name))
    tests.add(along.pvalue, along.where)  # one test: many rows are not to outweigh all of them


def _add_twins(tests: Several, z: np.ndarray, name: str) -> None:
    """Tests whether two rows have the same draws, or opposite ones.

    A difference of two normals has a density of at most 0.29: that it is below d in w coordinates
    has probability (0.57 d)^w at most, for each of two signs and each pair.
    """
    rows = z.reshape(z.shape[0] * z.shape[1], math.prod(z.shape[2:]))
    rows = rows[np.isfinite(rows).all(axis=1)][:_COMPARED].astype(np.float32)
    if len(rows) < 2:
        return
    apart = np.full((len(rows), len(rows)), np.inf, np.float32)
    apart[np.triu_indices(len(rows), 1)] = 0
    other = apart.copy()
    for column in rows.T:
        np.maximum(apart, np.abs(column[:, None] - column), out=apart)
        np.maximum(other, np.abs(column[:, None] + column), out=other)
    alike = min(apart.min(), other.min()) <= _TWINS
    chance = len(rows) ** 2 * (0.57 * _TWINS) ** rows.shape[1]
    tests.add(min(1.0, chance) if alike else 1.0, f"two rows of {name}")


def _add_shifts(tests: Several, z: np.ndarray, name: str) -> None:
    """Tests draws in a line with themselves, further on by any number of places.

    For l > 0, sum_i z_i z_{i+l} is a form z^T A z of trace 0, |A|_F^2 = (n - l) / 2 and |A| <= 1,
    so that it exceeds 2 |A|_F sqrt(x) + 2 x with probability e^-x at most (B. Laurent, P. Massart,
    2000, Lemma 1); and so does its negative.
    """
    n = z.size
    found = np.fft.irfft(np.abs(np.fft.rfft(z, 2 * n)) ** 2)[1:n]
    spread = np.sqrt((n - np.arange(1, n)) / 2)
    root = (np.sqrt(spread**2 + 2 * np.abs(found)) - spread) / 2
    where = functools.partial(_shifted, name)
    tests.add(np.minimum(1.0, 2 * np.exp(-(root**2))), where)


def _shifted(name: str, place: int) -> str:
    return f"{place + 1:,} apart in {name}"


def _add_law(tests: Several, z: np.ndarray, name: str, moved: float) -> None:
    """Tests the distribution of draws, which rounding moves so far."""
    z = z[np.isfinite(z)]
    if z.size:
        tests.add(variance_pvalue(z @ z, z.size), f"all {name}")
        Counts(z).add_to(tests, name, moved)
        add_distribution(tests, z[:: -(-z.size // _SAMPLE)], name)
