"""The law of the noise, in every leaf and at every step that is run, by the program that trains.

What is added to a sum is seen where the sum is known: that of a batch of nobody is 0, and under
C 2^-k and sigma 2^k, which are arguments of the program, that of a full batch is next to 0 and the
noise is the same. Where both are the run's own, two releases of one batch under different keys have
a difference in which the sum cancels: noise of variance 2. sigma and C are those of the
configuration, never those that the program is given.

Two kinds of looks are taken. Blocks of the run, a full one and the last, run as in training
(`train_blocks`, with the sampler's batches), and show some coordinates of every leaf after every
step. Single steps, some of them 2^k before and after the first, show all coordinates.

Noise that is correlated over steps is whitened first, and what whitens it must be a matrix of the
bands and columns that are priced.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import linalg, special

from dpsgd.audit.blocks import PADDED
from dpsgd.audit.checks import FALSE_ALARM, Check, Several, variance_pvalue
from dpsgd.audit.normal import (
    Counts,
    Repeats,
    add_cosines,
    add_distribution,
    add_energies,
    add_lags,
    magnitudes,
)
from dpsgd.audit.program import AuditedProgram
from dpsgd.noise.keys import ROOT_BYTES, RootKey
from dpsgd.training.loop import WATCHED
from dpsgd.training.mechanism import SCALES, Mechanism

_ALIGNED = 96  # watched coordinates that are a leaf's first; the others lie anywhere
_DRAWS = 2**18  # wanted of single steps: resolves 1 % of sigma
_STEPS = 16  # most that are taken for it
_FEW = 2**13  # of fewer draws, steps of other generations are taken too: resolves 5 % of sigma
_GENERATIONS = 512  # at most
_ROWS = 2**20  # whose gradients are formed for these, about
_TAIL = 4  # steps of a last block, where the run's is a full one
_LARGE = 2**22  # coordinates of a model of which fewer steps are taken
_EXACT = 7  # binary orders by which those of exact noise, which is slow, are fewer
_SAMPLE = 2**14  # of each leaf: what is compared with the law
_LAGGED = 2**22  # of each leaf: what is compared with itself
_CELL = 2.0**-18  # of the grid of noise in float32, in standard deviations, at most
_COARSE = 2.0**-6  # cells that are too coarse for a comparison with a density
_FINE = 2.0**-10  # cells that are so fine that 0 is rare
_OTHERS = 2  # generations before those that are looked at for more draws
_MATRIX = 256  # steps of which M is looked at


def noise_checks(program: AuditedProgram) -> list[Check]:
    """Checks deviation, law and independence of the noise, and what its law costs."""
    return _Looks(program).checks()


class _Steps(NamedTuple):
    """Watched coordinates of steps, whitened and in standard deviations."""

    steps: range
    leaves: list[np.ndarray]
    """float64[generations * steps, coordinates] each."""
    generations: int = 1


class _Part(NamedTuple):
    """What is kept of a leaf of a release."""

    square: float
    counts: Counts
    sample: np.ndarray
    moved: float
    """How far rounding moves it, in standard deviations."""
    cast: float
    """How far, relative to it."""


class _Looks:
    """The looks that are taken at a program's noise, and the tests that it goes through."""

    def __init__(self, program: AuditedProgram):
        self._program, self._mechanism = program, program.mechanism
        self._noise = program.mechanism.noise
        paths = jax.tree_util.tree_leaves_with_path(program.state.params)
        self._names = [f"leaf {jax.tree_util.keystr(path)}" for path, _ in paths]
        self._everybody = np.arange(program.places) % program.units
        self._drowned = drowned_mechanism(program.mechanism)
        # Of tables whose noise comes late, rows that everybody reads together.
        self._shapes = program.shapes
        self._kept: list[Any] = [slice(None)] * len(paths)
        for k, release in enumerate(program.release(self._everybody) if program.tables else ()):
            if k in program.tables:
                read = np.any(release.reshape(self._shapes[k]), axis=_but_first(self._shapes[k]))
                read &= self._drowned is not None
                self._kept[k] = np.flatnonzero(np.repeat(read, math.prod(self._shapes[k][1:])))
                self._shapes[k] = (int(np.count_nonzero(read)), *self._shapes[k][1:])
        for k in program.frozen:  # `update_checks` looks at these
            self._kept[k], self._shapes[k] = np.arange(0), (0, *self._shapes[k][1:])
        self._sizes = [math.prod(shape) for shape in self._shapes]
        # How far casting moves a release, relative to it: nothing beside the noise's own grid.
        units = [float(jnp.finfo(dtype).eps) for dtype in program.dtypes]
        self._casts = [unit / 2 if unit > 2.0**-20 else 0.0 for unit in units]
        self._places = [_places(size) for size in self._sizes]
        self._end = program.mechanism.sampler.num_steps
        self._whitens = self._noise.bands == 1 or program.first_step <= PADDED
        self._first = program.first_step if self._whitens else 0
        # Of a coarse grid, magnitudes are not normal: 0 is common.
        self._signless = _law_of(program.mechanism)[1] <= _FINE
        large = _LARGE >> _EXACT if self._noise.exact else _LARGE
        self._cheap = sum(self._sizes) <= large
        self._linear = True  # what whitens is, as far as seen
        self._energy, self._law, self._lags = Several(), Several(), Several()
        self._square, self._draws = 0.0, 0  # of single steps, which are independent
        self._unseen: list[str] = []
        self._rng = np.random.default_rng(0)  # of digits that rounding took away

    def checks(self) -> list[Check]:
        """Takes all looks, and returns what was seen."""
        drowned = self._drowned
        blocks = self._blocks(drowned) if drowned else []
        self._look_at_batches(drowned)
        steps, repeats = self._look_at_steps(blocks)
        others = self._look_at_generations(repeats)
        looked_at = [*blocks, *steps]
        draws = self._draws
        scale = f"{math.sqrt(self._square / draws):.4g} sigma C over {draws:,} draws"
        quantile = -special.ndtri(FALSE_ALARM / 2 / max(1, self._energy.count))
        resolution = quantile / math.sqrt(2 * draws)
        scale += f" (resolves {100 * resolution:.2g} %)"
        tail = -special.ndtri(min(0.5, 10 / draws))
        return [
            _keys_check(self._mechanism, self._program.root),
            self._energy.check(
                "noise has standard deviation sigma C, in every leaf", scale
            )._replace(resolution=resolution),
            self._matrix_check(),
            self._law.check("noise is normal", f"tails to {tail:.2g} sigma"),
            self._steps_check(looked_at, others),
            self._leaves_check(looked_at + others),
            self._lags.check("noise of different coordinates is independent"),
            repeats.check("no noise is used twice"),
            *self._left_out(drowned),
        ]

    def _left_out(self, drowned: Mechanism | None) -> list[Check]:
        """Returns what could not be looked at, and why."""
        found = []
        if drowned is None:
            why = f"C = {self._mechanism.l2_clip_norm:.3g} is next to the least there is"
            found.append(("whole blocks have noise at every step", why))
        if not self._whitens:
            why = f"noise that is correlated is whitened up to step {PADDED:,}"
            found.append(("a run that goes on does so with its noise", why))
        if self._unseen:
            why = f"{', '.join(self._unseen[:3])}: the sum leaves no digits"
            found.append(("noise at full batches and the run's own C", why))
        return [Check(name, True, why, made=False) for name, why in found]

    # Looks at whole blocks.

    def _blocks(self, drowned: Mechanism) -> list[_Steps]:
        """Returns what a full block and the last show, their sums drowned.

        With the last goes the one before it, which hands over to it, where that is cheap.
        """
        size = self._program.layout.block_steps
        blocks = [self._block(drowned, self._first, min(size, self._end - self._first))]
        reached = blocks[0].steps.stop
        if reached < self._end:
            last = (self._end - self._first) % size or min(_TAIL, size)
            if self._cheap:
                last += size
            elif self._noise.exact:
                last = min(last, _TAIL)
            start = max(reached, self._end - last)
            blocks.append(self._block(drowned, start, self._end - start))
        for block in blocks:
            self._look_at_block(block, drowned)
        return blocks

    def _block(self, drowned: Mechanism, start: int, count: int) -> _Steps:
        if self._program.tables:
            steps = range(start, start + count)
            sums = self._of_one_batch(steps, generation=0)
        else:
            steps, sums = self._program.watched(start, count, drowned, coordinates=self._places)
        stddev, _ = _law_of(drowned)
        raw = [leaf / stddev for leaf in sums]
        matrix, before = self._whitening(steps)
        for leaf in raw:  # the noise says by itself what the matrix does
            some = np.zeros((before + len(steps), min(8, leaf.shape[1])))
            some[before:] = leaf[:, :8]
            found, expected = self._noise.whiten(some)[before:], matrix @ leaf[:, :8]
            self._linear &= bool(np.allclose(found, expected, atol=1e-6))
        return _Steps(steps, [matrix @ leaf for leaf in raw])

    def _of_one_batch(self, steps: range, generation: int) -> list[np.ndarray]:
        """Returns what steps of nobody show; or of everybody, where that noises tables."""
        program, shown = self._program, []
        who = self._everybody if program.tables and self._drowned else ()
        mechanism = self._drowned if len(who) else None
        at = [
            np.arange(size, dtype=np.int32)[kept][places]
            for size, kept, places in zip(program.sizes, self._kept, self._places, strict=True)
        ]
        for start in range(steps.start, steps.stop, program.layout.block_steps):
            here = range(start, min(steps.stop, start + program.layout.block_steps))
            shown.append(
                program.of_one_batch(who, here, mechanism, coordinates=at, generation=generation)
            )
        return [np.concatenate(leaf) for leaf in zip(*shown, strict=True)]

    def _released(self, members: Any = (), mechanism: Mechanism | None = None, **how: Any) -> Any:
        """Returns a release without rows of tables that everybody together does not read."""
        release = self._program.release(members, mechanism, **how)
        return [leaf[kept] for leaf, kept in zip(release, self._kept, strict=True)]

    def _whitening(self, steps: range) -> tuple[np.ndarray, int]:
        """Returns the rows and columns of M of these steps, and how many zeros go before them.

        An audit begins them with noise that has seen nothing: as if it had been 0 until then.
        """
        before = steps.start if self._noise.bands > 1 else 0
        unit = np.zeros((before + len(steps), len(steps)))
        unit[before:] = np.eye(len(steps))
        return self._noise.whiten(unit)[before:], before

    def _look_at_block(self, block: _Steps, drowned: Mechanism) -> None:
        first = block.steps.start
        total = np.zeros(len(block.steps))
        for leaf, name in zip(block.leaves, self._names, strict=True):
            squares = np.sum(leaf**2, axis=1)
            total += squares
            where = functools.partial(_at_step, f"{name}, ", first)
            self._energy.add(variance_pvalue(squares, leaf.shape[1]), where)
            self._energy.add(variance_pvalue(squares.sum(), leaf.size), f"{name}, in a block")
        every = np.concatenate(block.leaves, axis=1)
        where = functools.partial(_at_step, "", first)
        self._energy.add(variance_pvalue(total, every.shape[1]), where)
        self._energy.add(variance_pvalue(total.sum(), every.size), "a block")
        mean = every.sum(axis=1) / math.sqrt(every.shape[1])
        where = functools.partial(_at_step, "mean, ", first)
        self._law.add(special.erfc(np.abs(mean) / math.sqrt(2)), where)
        if _law_of(drowned)[1] <= _COARSE:
            smooth = [self._smooth(k, leaf, drowned) for k, leaf in enumerate(block.leaves)]
            add_distribution(self._law, np.concatenate(smooth, axis=1), "a block")

    # Looks at whole releases.

    def _look_at_batches(self, drowned: Mechanism | None) -> None:
        """Looks at the noise of full batches: with drowned sums, and at the run's own scales."""
        program, mechanism = self._program, self._mechanism
        if drowned:
            noise = self._released(self._everybody, drowned, step=self._first)
            self._look_at_batch(noise, drowned, "a full batch")
        one, other = (
            self._released(self._everybody, step=self._first, generation=g) for g in range(2)
        )
        stddev, cell = _law_of(mechanism)
        rounding = [
            2.0 * float(np.max(np.abs(leaf), initial=0)) * max(2.0**-24, cast) / stddev
            for leaf, cast in zip(one, self._casts, strict=True)
        ]
        sums_show = {k for k, moved in enumerate(rounding) if moved > _COARSE}
        noise = [(a - b) / np.float32(math.sqrt(2)) for a, b in zip(one, other, strict=True)]
        name = "a full batch at the run's own C"
        moved = 2 * cell + max((m for m in rounding if m <= _COARSE), default=0.0)
        self._look_at_batch(noise, mechanism, name, without=sums_show, moved=moved)
        if sums_show and program.poison is not None:  # whose gradients count as 0
            noise = self._released(np.full(program.places, program.poison), step=self._first)
            rest = set(range(len(self._names))) - sums_show | set(program.tables)
            self._look_at_batch(noise, mechanism, "a full batch of NaN", without=rest)
            sums_show &= set(program.tables)  # whose rows that batch does not read
        self._unseen += [self._names[k] for k in sorted(sums_show)]

    def _look_at_batch(
        self, noise: list[np.ndarray], mechanism: Mechanism, what: str, **how: Any
    ) -> None:
        for number, part in self._look(noise, mechanism, self._first, what, **how).items():
            self._add_law([part], f"{self._names[number]} of {what}")

    def _look_at_steps(self, blocks: list[_Steps]) -> tuple[list[_Steps], Several]:
        """Returns what steps by themselves show where blocks do too, and whether it repeats."""
        mechanism = self._mechanism
        stddev, _ = _law_of(mechanism)
        size = sum(self._sizes)
        numbers = self._step_numbers(blocks, size)
        repeats = {
            cast: Repeats(size * len(numbers), self._most_likely(cast)) for cast in set(self._casts)
        }
        in_blocks = {step for block in blocks for step in block.steps}
        shown, seen = [], []
        for number in numbers:
            sums = self._alone(number)
            steps = range(number, number + 1)
            scale = float(self._whitening(steps)[0][0, 0]) / stddev
            if number not in in_blocks:
                leaves = [
                    x[at] * np.float64(scale) for x, at in zip(sums, self._places, strict=True)
                ]
                shown.append(_Steps(steps, [leaf[None] for leaf in leaves]))
            for leaf, name, cast in zip(sums, self._names, self._casts, strict=True):
                repeats[cast].add(leaf, f"{name} at step {number:,}")
                if number == self._first:
                    add_lags(self._lags, leaf[:_LAGGED], name)
            seen.append(self._look(sums, mechanism, number, f"step {number:,}"))
        for place, name in enumerate(self._names):
            parts = [of_step[place] for of_step in seen if place in of_step]
            self._add_law(parts, f"{name} of all single steps")
        every = [part for of_step in seen for part in of_step.values()]
        self._add_law(every, "all single steps")
        self._square, self._draws = sum(part.square for part in every), size * len(seen)
        self._energy.add(variance_pvalue(self._square, self._draws), "all single steps")
        found = Several()
        for runs in repeats.values():
            runs.add_to(found)
        return shown, found

    def _alone(self, step: int) -> list[np.ndarray]:
        """Returns the noise of a step, of nobody or, for that of tables, of everybody, drowned."""
        if self._program.tables and self._drowned:
            return self._released(self._everybody, self._drowned, step=step)
        return self._released(step=step)

    def _look_at_generations(self, repeats: Several) -> list[_Steps]:
        """Returns what the same steps show of nobody in other generations, of a few coordinates.

        A sum of five numbers, released four times, is too little to tell half of a noise from all:
        so the axes of what is tested are generations, steps and coordinates.
        """
        program, mechanism = self._program, self._mechanism
        sampler = mechanism.sampler
        steps = range(self._first, min(self._end, self._first + program.layout.block_steps))
        a_generation = len(steps) * sum(map(len, self._places))
        rows = 0 if sampler.accumulates else len(steps) * sampler.padded_batch_size
        if program.layout.streamed:
            rows = program.layout.passes * sampler.padded_batch_size
        wanted = math.ceil((_FEW - self._draws) / a_generation)
        count = min(wanted, _GENERATIONS, _ROWS // max(1, rows))
        if count <= 0 or self._noise.bands > 1:
            return []
        shown = [self._of_one_batch(steps, generation=_OTHERS + number) for number in range(count)]
        leaves = [np.stack(leaf) for leaf in zip(*shown, strict=True)]
        stddev, cell = _law_of(mechanism)
        found, parts = Repeats(a_generation * count, self._most_likely(max(self._casts))), []
        for number, leaf in enumerate(leaves):
            if leaf.size:
                what = f"{self._names[number]} of {count} generations"
                found.add(leaf.ravel(), what)
                parts.append(self._part(number, leaf / np.float32(stddev), mechanism, what, cell))
                self._add_law(parts[-1:], what)
        found.add_to(repeats)
        self._add_law(parts, f"{count} generations")
        self._square += sum(part.square for part in parts)
        self._draws += a_generation * count
        every = [leaf.reshape(count * len(steps), -1) / stddev for leaf in leaves]
        for name, leaf in zip(self._names, every, strict=True):
            where = [f"coordinate {place} of {name}" for place in range(leaf.shape[1])]
            self._add_cosines(self._lags, list(leaf.T), where)
        return [_Steps(steps, every, count)]

    def _step_numbers(self, blocks: list[_Steps], size: int) -> list[int]:
        """Returns the first step, those 2^k before and after it, and more of a small model.

        Of a large one, the largest 2^k alone: it is a multiple of all others.
        """
        first, end = self._first, self._end if self._noise.bands == 1 else min(self._end, PADDED)
        apart = [2**k for k in range(end.bit_length())]
        after, before = (
            [first + d for d in apart if first + d < end],
            [first - d for d in apart if d <= first],
        )
        if not self._cheap:
            return sorted({first, *after[-1:], *before[-1:]})
        seen = {step for block in blocks for step in block.steps}
        wanted = min(_STEPS, _DRAWS // size)
        more = np.linspace(0, end - 1, wanted).astype(int).tolist()
        return sorted({first, *({*after, *before} - seen), *more})

    def _look(
        self,
        sums: list[np.ndarray],
        mechanism: Mechanism,
        step: int,
        what: str,
        *,
        without: Collection[int] = (),
        moved: float | None = None,
    ) -> dict[int, _Part]:
        """Tests the squares in whole leaves, and all together; returns what is known of each leaf.

        Args:
          sums: Noise, float32[size] each.
          mechanism: Whose it is.
          step: Its number.
          what: Whose noise it is, in words.
          without: Numbers of leaves that are left out.
          moved: How far rounding moves them, in standard deviations; by default a cell.
        """
        stddev, cell = _law_of(mechanism)
        scale = np.float32(float(self._whitening(range(step, step + 1))[0][0, 0]) / stddev)
        parts = {}
        for number, name in enumerate(self._names):
            if number not in without and sums[number].size:
                leaf = (sums[number] * scale).reshape(self._shapes[number])
                moved = cell if moved is None else moved
                parts[number] = self._part(number, leaf, mechanism, f"{name} of {what}", moved)
        self._add_law(list(parts.values()), what)
        return parts

    def _part(
        self, number: int, leaf: np.ndarray, mechanism: Mechanism, what: str, moved: float
    ) -> _Part:
        """Tests the squares in a leaf's noise, in standard deviations; returns what is known."""
        square, flat = add_energies(self._energy, leaf, what), leaf.ravel()
        sample = flat[:: -(-flat.size // _SAMPLE) or 1].astype(np.float64)
        # Of a coarser grid, none: it has no density that draws could be compared with.
        coarse = _law_of(mechanism)[1] > _COARSE
        sample = self._smooth(number, sample[: 0 if coarse else None], mechanism)
        return _Part(square, Counts(flat), sample, moved, self._casts[number])

    def _most_likely(self, cast: float) -> float:
        """Returns a bound on the probability of any one value, where casts have this roundoff."""
        return 2 * (0.4 * _law_of(self._mechanism)[1] + max(2.0**-24, cast))

    def _add_law(self, parts: list[_Part], what: str) -> None:
        """Tests the distribution of independent parts."""
        if parts:
            moved, cast = max(part.moved for part in parts), max(part.cast for part in parts)
            counts = functools.reduce(operator.add, (part.counts for part in parts))
            counts.add_to(self._law, what, moved, cast)
            sample = np.concatenate([part.sample for part in parts])
            if sample.size:
                add_distribution(self._law, sample, what)

    def _smooth(self, number: int, values: np.ndarray, mechanism: Mechanism) -> np.ndarray:
        """Returns draws with digits in the place of those that rounding took away."""
        stddev, cell = _law_of(mechanism)
        digits = self._rng.uniform(-0.5, 0.5, values.shape)
        if cell > _CELL:
            values = values + cell * digits
        if cast := self._casts[number]:
            unit = stddev / mechanism.sampler.expected_batch_size  # as the release has it
            binade = 2.0 ** np.floor(np.log2(np.maximum(np.abs(values) * unit, 2.0**-1000)))
            values = values + 2 * cast * binade / unit * digits
        return values

    # What belongs together.

    def _steps_check(self, looked_at: list[_Steps], others: list[_Steps]) -> Check:
        tests, vectors, names = Several(), [], []
        for steps, leaves, _ in looked_at:
            every = np.concatenate(leaves, axis=1)
            vectors += list(every)
            names += [f"step {step:,}" for step in steps]
            if len(steps) > 1:  # a little of every pair
                lags = range(1, len(steps) // 2 + 1)
                add_lags(tests, every, "the steps of a block", lags)
                if self._signless:
                    add_lags(tests, magnitudes(every), "the steps of a block but for signs", lags)
        for steps, leaves, _ in others:  # each of all generations
            every = np.concatenate(leaves, axis=1)
            vectors += [every[place :: len(steps)].ravel() for place in range(len(steps))]
            names += [f"step {step:,} of other generations" for step in steps]
        self._add_cosines(tests, vectors, names)
        blocks = [f"{s.start:,} to {s.stop - 1:,}" for s, *_ in looked_at if len(s) > 1]
        single = sum(len(s) == 1 for s, *_ in looked_at)
        detail = f"steps {', '.join(blocks)}" + (f" and {single} others" if single else "")
        return tests.check("noise of different steps is independent", detail)

    def _leaves_check(self, looked_at: list[_Steps]) -> Check:
        tests, vectors, names = Several(), [], []
        together = []
        for number, name in enumerate(self._names):
            leaf = np.concatenate([leaves[number][:, :_ALIGNED] for _, leaves, _ in looked_at])
            together.append(leaf.T.ravel())  # of two leaves, the first coordinates are compared
            vectors += list(leaf)
            names += [
                f"{name} at step {step:,}"
                for steps, _, generations in looked_at
                for step in [*steps] * generations
            ]
        self._add_cosines(tests, together, self._names)
        self._add_cosines(tests, vectors, names)
        return tests.check("noise of different leaves is independent", f"{len(together)} leaves")

    def _add_cosines(self, tests: Several, vectors: list[np.ndarray], names: list[str]) -> None:
        """Tests pairs of vectors for what they share, and for what they share but for signs."""
        add_cosines(tests, vectors, names)
        if self._signless:
            add_cosines(tests, [magnitudes(v) for v in vectors], names, " but for signs")

    def _matrix_check(self) -> Check:
        """Checks that what whitens the noise is a matrix M whose cost is the one that is priced.

        The noise says itself what whitens it: without this, half of the noise would be whitened by
        doubling it, and noise of two bands pass for independent noise.
        """
        matrix = self._noise.whiten(np.eye(min(self._end, _MATRIX)))
        longest = float(np.sqrt(np.max(np.sum(np.square(matrix), axis=0))))
        passed = (
            self._linear
            and longest <= 1 + 1e-9
            and not np.triu(matrix, 1).any()
            and not np.tril(matrix, -self._noise.bands).any()
            and self._column_is_priced(matrix)
        )
        reach = int(np.max(np.subtract(*np.nonzero(matrix)), initial=0)) + 1
        bands = min(self._noise.bands, len(matrix))
        detail = f"{reach} of {bands} bands, columns of norm {longest:.6g} of 1 allowed"
        return Check(
            "noise has the bands and the columns that were claimed",
            bool(passed),
            detail if self._linear else f"{detail}; and what whitens is no matrix",
        )

    def _column_is_priced(self, matrix: np.ndarray) -> bool:
        """Whether columns are all the one whose overlap is priced, where they may overlap."""
        if self._noise.bands <= self._mechanism.sampler.separation:
            return True
        impulse = np.eye(min(self._end, PADDED), 1)
        found, column = self._noise.whiten(impulse)[:, 0], self._noise.column(len(impulse))
        if column is None or not np.allclose(found, column, rtol=1e-6, atol=0):
            return False
        toeplitz = np.tril(linalg.toeplitz(column[: len(matrix)]))
        return bool(np.allclose(matrix, toeplitz, rtol=1e-6, atol=0))


def _but_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(range(1, len(shape)))


def _at_step(what: str, first: int, place: int) -> str:
    return f"{what}step {first + place:,}"


def _places(size: int) -> np.ndarray:
    """Returns the coordinates of a leaf that are watched: the first, and some up to the last."""
    if size <= WATCHED:
        return np.arange(size, dtype=np.int32)
    rest = np.linspace(_ALIGNED, size - 1, WATCHED - _ALIGNED).astype(np.int32)
    return np.concatenate([np.arange(_ALIGNED, dtype=np.int32), rest])


def drowned_mechanism(mechanism: Mechanism) -> Mechanism | None:
    """Returns the mechanism with C 2^-k and sigma 2^k, or None where there is no room for it.

    Its sums are below 2^-26 standard deviations of the noise: a fraction of a cell of its grid that
    hardly ever rounds it otherwise.
    """
    sampler = mechanism.sampler
    k = min(64, math.floor(math.log2(mechanism.l2_clip_norm / SCALES[0])))
    most = sampler.padded_batch_size * sampler.max_passes
    if most * 2.0**-k > mechanism.noise_multiplier * 2.0**-26:
        return None
    return dataclasses.replace(
        mechanism,
        noise_multiplier=mechanism.noise_multiplier * 2.0**k,
        l2_clip_norm=mechanism.l2_clip_norm * 2.0**-k,
    )


def _law_of(mechanism: Mechanism) -> tuple[float, float]:
    """Returns the standard deviation that noise must have, and its cell in units of that.

    That of the integer grid is rounded up to whole cells, as `sum_checks` checks, and is that of a
    normal that is rounded to them.
    """
    grid = mechanism.scales().grid
    if grid is None:
        return mechanism.noise_multiplier * mechanism.l2_clip_norm, _CELL
    cells = float(grid.cells)
    return float(grid.spacing) * math.sqrt(cells**2 + 1 / 12), 1 / cells


def _keys_check(mechanism: Mechanism, root: RootKey) -> Check:
    """Checks that another generation or root gives other keys; programs are seen to heed them.

    Among the roots are 0 and those that have one bit: each bit of a root must count.
    """
    generations = [*range(16), *(2**k for k in range(4, 64))]
    bits = [0, *(1 << k for k in range(8 * ROOT_BYTES))]
    roots = [RootKey(bit.to_bytes(ROOT_BYTES, "little"), insecure=False) for bit in bits]
    of = [(root, generation) for generation in generations] + [(other, 0) for other in roots]
    distinct = min(
        len({mechanism.noise_key(*one).tobytes() for one in of}),
        len({one.sampling_seed(generation) for one, generation in of}),
    )
    return Check(
        "other generations and roots have other keys",
        distinct == len(of),
        f"{distinct} of {len(of)}",
    )
