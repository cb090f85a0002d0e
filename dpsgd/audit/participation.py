"""Tests participations of examples and units under the law of a sampler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from scipy import special, stats

from dpsgd.audit.subsets import Draw, RatedSubsets, Subsets, binomial
from samplers import BatchSampler
from samplers.row_law import IndependentRows, RowLaw
from samplers.shards import Shards

_SEED = 0x9E3779B97F4A7C15F39CC0605CEDC835
_EACH = 4096  # participations counted in a draw, about
_DRAWS = 64, 1024  # fewest and most epochs drawn, over all seeds
_PAIRED = 32  # draws that are compared in pairs
_GROUPS = 64  # groups of examples and of steps
_COARSE = 8  # groups of steps of two orders that are compared
_QUANTILES = 0.02, 0.17, 0.5, 0.83, 0.98  # quantiles of batch sizes
_CELLS = 2**22  # approximate number of rates, of examples by step


def law_seed(number: int) -> int:
    """Returns the 128-bit seed of a number.

    Seeds 1 to 127 differ from seed 0 in one bit.
    """
    if 0 < number < 128:
        return _SEED ^ (1 << (127 - number))
    return _SEED ^ (number * 0xD1342543DE82EF95D1342543DE82EF95) % 2**128


class RowTests:
    """Tests of draws under a law without units.

    Args:
      sampler: Sampler of the run.
      law: Law that is claimed.
      entries: Approximate number of participations to count.
    """

    def __init__(self, sampler: BatchSampler, law: RowLaw, entries: int):
        self._sampler, self._law, self._length = sampler, law, law.steps_per_epoch
        rows_per_step = sampler.expected_batch_size * np.prod(sampler.clipped_shape, initial=1.0)
        self._each = float(rows_per_step) * sampler.steps_per_epoch  # participations of an epoch
        count = int(np.clip(entries / min(_EACH, self._each), *_DRAWS))
        self._watched = self._chosen()
        self._cycle = law.cycle_length if isinstance(law, IndependentRows) else 1
        if self._cycle > 1 and isinstance(law, IndependentRows):
            self._law = law.folded()
            self._length = self._law.steps_per_epoch
        epochs: list[Sequence[int]] = [range(1)]
        if law.redrawn:
            powers = [x for k in range(31) for x in (2**k - 1, 2**k) if x < sampler.epochs]
            first = range(min(count * 3 // 8, sampler.epochs))
            last = range(max(0, sampler.epochs - count * 3 // 8), sampler.epochs)
            epochs = [sorted({*first, *powers, *last})]
        while sum(map(len, epochs)) < count or len(epochs) < 2:
            epochs.append(range(min(2 if law.redrawn else 1, sampler.epochs)))
        pairs = [(seed, epoch) for seed, seed_epochs in enumerate(epochs) for epoch in seed_epochs]
        self._by_step = np.zeros(self._length, np.int64)  # participations in whole chunks
        self._draws = [self._draw(*pair) for pair in pairs]

    def _chosen(self) -> np.ndarray:
        """Returns the counted examples; of many, both ends of the first and the last chunk.

        Fewer are counted in epochs of many steps if the rates of examples may differ.
        """
        sampler, n = self._sampler, self._sampler.num_examples
        most = int(_EACH * n / self._each)
        if not isinstance(self._law, IndependentRows):
            most = min(most, _CELLS // self._length)
        most = max(64, most)
        if n <= most:
            return np.arange(n)
        ranges = [sampler.chunk_range(chunk) for chunk in {0, sampler.num_chunks - 1}]
        rows_per_edge = max(16, most // (2 * len(ranges)))
        edges = [r for rows in ranges for r in (rows[:rows_per_edge], rows[-rows_per_edge:])]
        return np.unique(np.concatenate([np.arange(r.start, r.stop) for r in edges]))

    def _draw(self, seed: int, epoch: int) -> Draw:
        sampler, watched = self._sampler, self._watched
        epoch = sampler.drawn_epoch(epoch) if self._law.redrawn else epoch
        rows = [sampler.participations(law_seed(seed), epoch, chunk) for chunk in self._chunks]
        examples, steps = (
            np.concatenate(pieces).astype(np.int64) for pieces in zip(*rows, strict=True)
        )
        self._by_step += np.bincount(steps // self._cycle, minlength=self._length)
        positions = np.searchsorted(watched, examples)
        is_watched = watched[np.minimum(positions, watched.size - 1)] == examples
        return Draw(seed, epoch, positions[is_watched], steps[is_watched] // self._cycle)

    @property
    def _size(self) -> int:
        return self._watched.size

    @cached_property
    def _chunks(self) -> list[int]:
        """Numbers of the drawn chunks."""
        return np.unique(self._watched // len(self._sampler.chunk_range(0))).tolist()

    @cached_property
    def _rates(self) -> np.ndarray:
        """Probability of each entry: float64[examples, T], or [1, T] for independent rows."""
        steps = np.arange(self._length)
        same = isinstance(self._law, IndependentRows)
        examples = self._watched[:1] if same else self._watched
        rates = self._law.rate(examples[:, None], steps[None])
        return np.broadcast_to(rates, (examples.size, steps.size))

    def pvalues(self) -> Iterator[tuple[str, list[Any]]]:
        """Yields the name and the p-values of each check."""
        yield "examples and steps are drawn at the rates of the law", [*self._shares()]
        yield "no example returns to a step more often than by chance", [self._returns()]
        if self._law.independent and np.ptp(self._rates) == 0:
            yield "batch sizes vary as the law says", [self._sizes()]
        yield from self._joint_pvalues([*self._subsets(self._draws)])

    def _joint_pvalues(self, levels: list[Subsets]) -> Iterator[tuple[str, list[Any]]]:
        """Yields the checks of subsets."""
        again = [pvalue for subsets in levels for pvalue in subsets.repeated()]
        yield "epochs and seeds are drawn independently", [*again, *self._orders()]
        together = [subsets.pairs() for subsets in levels]
        together += [subsets.neighbours() for subsets in levels]
        name = "examples take part together as often as the law says"
        yield name, [*itertools.chain.from_iterable(together)]

    def _subsets(self, draws: list[Draw]) -> Iterator[Subsets]:
        """Yields the subsets, drawn by steps, of a chunk's examples of one shard and equal rates.

        If rates differ within a shard, yields the subsets of all counted examples, too.
        """
        shards = Shards(self._sampler.num_examples, self._sampler.num_shards)
        kinds, shard = np.zeros(self._size, np.int64), shards.shard_of(self._watched)
        if len(self._rates) > 1:
            kinds = np.unique(self._rates, axis=0, return_inverse=True)[1].ravel()
        kinds = kinds * self._sampler.num_shards + shard
        kind, rank = _ranked(self._watched // len(self._sampler.chunk_range(0)), kinds)
        num_kinds = int(kind.max()) + 1
        number, examples = _entries(draws)
        steps = np.concatenate([examples[:0], *(draw.steps for draw in draws)])
        sizes = np.tile(np.bincount(kind), self._length)
        group = steps * num_kinds + kind[examples]
        yield Subsets(draws, (number, group, rank[examples]), sizes, num_kinds)
        law = self._law
        if np.unique(kinds).size > np.unique(shard).size and (law.independent or not law.once):
            entries = number, steps, examples
            yield RatedSubsets(draws, entries, self._rates.T, two_sided=law.independent)

    def _shares(self) -> Iterator[Any]:
        """Yields p-values of counts over groups of examples and of steps."""
        examples = np.concatenate([draw.examples for draw in self._draws])
        steps = np.concatenate([draw.steps for draw in self._draws])
        one_group, single = np.zeros(self._size, int), np.arange(self._size)
        ranges = single * min(_GROUPS, self._size) // self._size
        by_step = np.arange(self._length)
        coarse = by_step * min(_GROUPS, self._length) // self._length
        halves = by_step * min(2, self._length) // self._length
        once = self._law.once
        chunks = self._watched // len(self._sampler.chunk_range(0))
        chunks = np.unique(chunks, return_inverse=True)[1]
        groupings = (one_group, by_step), (ranges, coarse), (single, halves), (chunks, halves)
        for rows, columns in groupings:
            count, trials, expected = self._table(examples, steps, rows, columns)
            yield binomial(count, trials, expected / trials)
            count, trials, expected = (np.cumsum(x, axis=1) for x in (count, trials, expected))
            trials = trials[:, :1] if once else trials
            last = -1 if once else None
            yield binomial(count, trials, expected / trials)[:, :last]
        if isinstance(self._law, IndependentRows):
            yield self._whole_chunks()
        if not once:
            count, trials, expected = self._table(examples, steps, single, 0 * by_step)
            yield binomial(count, trials, expected / trials)
            count, trials, expected = (np.cumsum(x, axis=0) for x in (count, trials, expected))
            yield binomial(count, trials, expected / trials)
            yield self._participation()

    def _whole_chunks(self) -> Any:
        """Returns p-values of all rows' participations in the first t steps."""
        rows = sum(len(self._sampler.chunk_range(chunk)) for chunk in self._chunks)
        steps = np.arange(1, self._length + (not self._law.once))
        trials = len(self._draws) * rows * (1 if self._law.once else steps)
        rate = self._rates[0, : steps.size]
        chance = np.cumsum(rate) if self._law.once else np.cumsum(rate) / steps
        return binomial(np.cumsum(self._by_step)[: steps.size], trials, chance)

    def _table(
        self, examples: np.ndarray, steps: np.ndarray, rows: np.ndarray, columns: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns counts, trials and expected counts of groups: float64[rows, columns]."""
        shape = int(rows.max()) + 1, int(columns.max()) + 1
        cell = rows[examples] * shape[1] + columns[steps]
        count = np.bincount(cell, minlength=shape[0] * shape[1]).reshape(shape)
        rates = np.zeros((len(self._rates), shape[1]))
        np.add.at(rates.T, columns, self._rates.T)
        sizes, draws = np.bincount(rows), len(self._draws)
        if len(rates) == 1:
            expected = draws * sizes[:, None] * rates
        else:
            expected = np.zeros(shape)
            np.add.at(expected, rows, draws * rates)
        width = np.ones(shape[1]) if self._law.once else np.bincount(columns)
        return count, draws * sizes[:, None] * width, expected

    def _participation(self) -> Any:
        """Returns p-values of examples with at least 1, 2 and 3 participations."""
        trials, times = self._size * len(self._draws), np.arange(1, 4)
        counts = [np.bincount(draw.examples, minlength=self._size) for draw in self._draws]
        observed = np.sum([[np.count_nonzero(x >= k) for k in times] for x in counts], axis=0)
        fewer = np.zeros((3, len(self._rates)))  # probability of 0, 1 and 2 participations
        fewer[0] = 1
        for rate in self._rates.T:
            fewer += rate * (np.concatenate([0 * fewer[:1], fewer[:-1]]) - fewer)
        return binomial(observed, trials, 1 - np.cumsum(fewer.mean(axis=1)))

    def _keys(self, draw: Draw) -> np.ndarray:
        return draw.examples * self._length + draw.steps

    def _returns(self) -> float:
        keys, counts = np.unique(
            np.concatenate([self._keys(draw) for draw in self._draws]), return_counts=True
        )
        examples, steps = np.divmod(keys, self._length)
        rates = self._rates[0, steps] if len(self._rates) == 1 else self._rates[examples, steps]
        tails = stats.binom.sf(counts - 1, len(self._draws), np.clip(rates, 0, 1))
        cells = self._size * self._length
        return float(np.minimum(1.0, cells * np.min(tails, initial=1.0)))

    def _sizes(self) -> float:
        """Returns the chi-square p-value of the sizes of whole batches."""
        n, sampler = self._sampler.num_examples, self._sampler
        draws = int(np.clip(2**20 // (n * float(self._rates.sum()) + 1), 2, len(self._draws)))
        plans = [sampler.plan(law_seed(d.seed), d.epoch) for d in self._draws[:draws]]
        length = sampler.steps_per_epoch
        members = np.bincount(np.arange(n) % self._cycle, minlength=self._cycle)
        steps = np.arange(length)
        size = members[steps % self._cycle]
        rate = float(self._rates.max())
        edges = np.unique(stats.binom.ppf(_QUANTILES, size.min(), rate))
        observed, expected = np.zeros(edges.size + 1), np.zeros(edges.size + 1)
        for plan in plans:
            bins = np.searchsorted(edges, np.diff(plan.starts))
            observed += np.bincount(bins, minlength=edges.size + 1)
        for number in np.unique(size):
            below = np.append(stats.binom.cdf(edges, number, rate), 1.0)
            expected += np.diff(below, prepend=0.0) * np.count_nonzero(size == number) * draws
        possible = expected > 1e-9
        if not possible.sum() > 1:
            return 1.0
        if observed[~possible].any():
            return 0.0
        total = observed[possible].sum() / expected[possible].sum()
        return float(stats.chisquare(observed[possible], expected[possible] * total).pvalue)

    def _orders(self) -> Iterator[float]:
        """Yields chi-square p-values of steps in two draws, if each example has one step."""
        compared = [*self._draws[: _PAIRED * 5 // 8], *self._draws[-_PAIRED * 3 // 8 :]]
        if not self._law.once or self._length == 1:
            return
        groups = min(_COARSE, self._length)
        step_groups = np.full((len(compared), self._size), -1)
        for row, draw in zip(step_groups, compared, strict=True):
            row[draw.examples] = draw.steps * groups // self._length
        for first, second in itertools.combinations(step_groups, 2):
            is_drawn = (first >= 0) & (second >= 0)
            cell = first[is_drawn] * groups + second[is_drawn]
            table = np.bincount(cell, minlength=groups**2).reshape(groups, groups)
            table = table[table.any(axis=1)][:, table.any(axis=0)]
            if min(table.shape) > 1 and table.sum() >= 5 * table.size:
                expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / table.sum()
                misfit = np.sum((table - expected) ** 2 / expected)
                yield float(special.chdtrc(math.prod(np.subtract(table.shape, 1)), misfit))


class UnitTests(RowTests):
    """Tests of draws down a tree of units; an epoch has one step."""

    def _chosen(self) -> np.ndarray:
        return np.arange(self._sampler.num_examples)

    def _draw(self, seed: int, epoch: int) -> Draw:
        examples = self._sampler.plan(law_seed(seed), epoch).members(0).astype(np.int64)
        return Draw(seed, epoch, examples, 0 * examples)

    def pvalues(self) -> Iterator[tuple[str, list[Any]]]:
        """Yields the name and the p-values of each check."""
        yield "units and their examples are drawn at the rates of the law", [*self._unit_shares()]
        late = [draw for draw in self._draws if 2 * draw.epoch + 1 >= self._sampler.epochs]
        levels = [*self._subsets(self._draws), *self._subsets(late)]
        ranks = [pvalue for subsets in levels for pvalue in subsets.ranks()]
        yield "examples of a unit are drawn at equal rates", ranks
        yield from self._joint_pvalues(levels)

    @cached_property
    def _parents(self) -> list[np.ndarray]:
        """Parent of each unit and example, by level; the root is 0."""
        units: Any = self._law.units
        paths = [np.zeros(self._size, np.int64), *units, np.arange(self._size)]
        parents = []
        for parent, child in itertools.pairwise(paths):
            parents.append(np.zeros(int(child.max()) + 1, np.int64))
            parents[-1][child] = parent
        return parents

    def _subsets(self, draws: list[Draw]) -> Iterator[Subsets]:
        """Yields the drawn subsets of exchangeable siblings, level by level.

        If examples are independent, a drawn unit may have none in the batch. Units are exchangeable
        if equally many examples of each are counted. Two numbers are counted: the smallest unit's
        size; and the median size, without the units below it.
        """
        units: Any = self._law.units
        last, sizes = len(units), np.bincount(units[-1])
        rank = _ranked(units[-1], 0 * units[-1])[1]
        for level in range(last + 1):
            if level == last or self._law.leaf_probability is None:
                yield self._children(draws, level, rank >= 0)
                continue
            counted = {int(sizes.min())}
            counted |= {int(np.median(sizes))} if level == last - 1 else set()
            for most in sorted(counted):
                yield self._children(draws, level, (rank < most) & (sizes[units[-1]] >= most))

    def _children(self, draws: list[Draw], level: int, is_counted: np.ndarray) -> Subsets:
        """Returns the drawn subsets of the children of each unit above a level.

        Args:
          draws: Draws.
          level: Level of the children, from 0; examples are the last level.
          is_counted: True for examples that are counted; bool[examples].
        """
        units: Any = self._law.units
        child = [*units, np.arange(self._size)][level]
        has_counted = np.zeros(self._parents[level].size, np.int64)
        has_counted[child[is_counted]] = 1
        group, rank = _ranked(self._parents[level], has_counted)
        number, examples = _entries(draws)
        number, child = number[is_counted[examples]], child[examples[is_counted[examples]]]
        sizes = np.bincount(group)
        return Subsets(draws, (number, group[child], rank[child]), sizes, sizes.size)

    def _unit_shares(self) -> Iterator[Any]:
        """Yields p-values of participations of units and of examples."""
        law: Any = self._law
        num_draws = len(self._draws)
        for of_example, rate in zip(law.units, law.unit_rates, strict=True):
            observed = np.zeros(rate.size)
            for draw in self._draws:
                observed[np.unique(of_example[draw.examples])] += 1
            above = stats.binom.sf(observed - 1, num_draws, np.clip(rate, 0, 1))
            yield np.minimum(1.0, 2 * above)
        count = np.bincount(np.concatenate([d.examples for d in self._draws]), minlength=self._size)
        yield binomial(count, num_draws, law.rate(np.arange(self._size), 0))
        everyone = np.ones(self._size, bool)
        *_, innermost, leaves = levels = [
            self._children(self._draws, level, everyone) for level in range(len(law.units) + 1)
        ]
        for subsets, num_drawn in zip(levels, law.draws, strict=False):
            exact = law.leaf_probability is None
            yield float(np.all(subsets.count == num_drawn if exact else subsets.count <= num_drawn))
        none = 0.0  # largest probability that a drawn unit has no example in the batch
        if law.leaf_probability is not None:
            none = (1 - law.leaf_probability) ** int(np.bincount(law.units[-1]).min())
            yield from leaves.halves(law.leaf_probability)
        trials = num_draws * law.most_units[-1]
        yield stats.binom.sf(trials - innermost.rank.size - 1, trials, none)


def _entries(draws: list[Draw]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of the draw and the example of each entry."""
    number = np.repeat(np.arange(len(draws)), [draw.examples.size for draw in draws])
    return number, np.concatenate([number[:0], *(draw.examples for draw in draws)])


def _ranked(parent: np.ndarray, kind: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the group of each child by parent and kind, and its rank in the group."""
    order = np.lexsort((kind, parent))
    begins = np.diff(parent[order], prepend=-1) != 0
    begins |= np.diff(kind[order], prepend=-1) != 0
    group, rank = np.empty((2, order.size), np.int64)
    group[order] = np.cumsum(begins) - 1
    rank[order] = np.arange(order.size) - np.flatnonzero(begins)[group[order]]
    return group, rank
