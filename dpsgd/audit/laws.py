"""Tests a sampler's draws statistically under the law of its cost.

Binomial and chi-square tests count many draws under fixed seeds, so that their results depend on
the code alone. A check corrects its p-values by their number (Bonferroni), and fails by chance with
probability 1e-8. Which counts are binomial: docs/explanation/tests-of-sampled-batches.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from dpsgd.audit.draws import cuts, some_members
from dpsgd.audit.report import CheckResult
from samplers import BatchSampler
from samplers.base import stated_law
from samplers.row_law import IndependentRows, RowLaw

FALSE_ALARM = 1e-8
"""Largest probability that a statistical check of a sound sampler fails."""

ENTRIES = 2**18
"""Approximate number of participations that an audit before a run counts."""

THOROUGH = 2**21
"""Approximate number of participations that `check_sampler` counts."""

_SEED = 0x9E3779B97F4A7C15F39CC0605CEDC835
_EACH = 4096  # participations counted in a draw, about
_DRAWS = 64, 1024  # fewest and most epochs drawn, over all seeds
_PAIRED = 32  # draws that are compared in pairs
_GROUPS = 64  # groups of examples and of steps
_COARSE = 8  # groups of steps of two orders that are compared
_QUANTILES = 0.02, 0.17, 0.5, 0.83, 0.98  # quantiles of batch sizes
_CUTS = 96
_CELLS = 2**22


class _Draw(NamedTuple):
    """One epoch under one seed.

    Attributes:
      seed: Number of the seed.
      epoch: Number of the epoch.
      examples: Positions among the counted examples: int64[entries].
      steps: Steps of the epoch: int64[entries].
    """

    seed: int
    epoch: int
    examples: np.ndarray
    steps: np.ndarray


def law_checks(
    sampler: BatchSampler, claimed: BatchSampler | None = None, *, entries: int = ENTRIES
) -> list[CheckResult]:
    """Tests the draws of `sampler` under the law of `claimed`.

    Args:
      sampler: Sampler of the run, at its own size.
      claimed: Sampler whose guarantee is claimed; by default `sampler`.
      entries: Approximate number of participations to count.
    """
    law = stated_law(claimed or sampler)
    if law is None or law.certain or (law.any_order and claimed not in (None, sampler)):
        return []
    if law.steps_per_epoch != sampler.steps_per_epoch:
        return []  # an exact check says so
    kind = _Tests if law.units is None else _UnitTests
    tests = kind(sampler, law, entries)
    named = [*tests.pvalues(), *_cut_pvalues(sampler, law)]
    return [_check(name, pvalues) for name, pvalues in named]


def _check(name: str, pvalues: list[Any]) -> CheckResult:
    """Returns a check of groups of p-values, with Bonferroni corrections."""
    groups = [np.ravel(group) for group in pvalues if np.size(group)]
    smallest = [float(np.min(group) * group.size) for group in groups]
    pvalue = min(1.0, min(smallest, default=1.0) * len(groups))
    return CheckResult(name, pvalue > FALSE_ALARM, f"p = {pvalue:.2g}")


def _binomial(count: Any, trials: Any, probability: Any) -> Any:
    """Returns two-sided p-values of binomial counts."""
    p = np.clip(probability, 0.0, 1.0)
    count, trials = np.asarray(count), np.maximum(np.asarray(trials), 0)
    below, above = stats.binom.cdf(count, trials, p), stats.binom.sf(count - 1, trials, p)
    return np.minimum(1.0, 2 * np.minimum(below, above))


def _seed(number: int) -> int:
    """Returns the 128-bit seed of a number.

    Seeds 1 to 127 differ from seed 0 in one bit.
    """
    if 0 < number < 128:
        return _SEED ^ (1 << (127 - number))
    return _SEED ^ (number * 0xD1342543DE82EF95D1342543DE82EF95) % 2**128


class _Tests:
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
        """Returns the counted examples: both ends of the first and last chunk, if many."""
        sampler, n = self._sampler, self._sampler.num_examples
        most = max(64, int(_EACH * n / self._each))
        if n <= most:
            return np.arange(n)
        ranges = [sampler.chunk_range(chunk) for chunk in {0, sampler.num_chunks - 1}]
        rows_per_edge = max(16, most // (2 * len(ranges)))
        edges = [r for rows in ranges for r in (rows[:rows_per_edge], rows[-rows_per_edge:])]
        return np.unique(np.concatenate([np.arange(r.start, r.stop) for r in edges]))

    def _draw(self, seed: int, epoch: int) -> _Draw:
        sampler, watched = self._sampler, self._watched
        epoch = sampler.drawn_epoch(epoch) if self._law.redrawn else epoch
        rows = [sampler.participations(_seed(seed), epoch, chunk) for chunk in self._chunks]
        examples, steps = (
            np.concatenate(pieces).astype(np.int64) for pieces in zip(*rows, strict=True)
        )
        self._by_step += np.bincount(steps // self._cycle, minlength=self._length)
        positions = np.searchsorted(watched, examples)
        is_watched = watched[np.minimum(positions, watched.size - 1)] == examples
        return _Draw(seed, epoch, positions[is_watched], steps[is_watched] // self._cycle)

    @property
    def _size(self) -> int:
        return self._watched.size

    @cached_property
    def _chunks(self) -> list[int]:
        """Numbers of the drawn chunks."""
        return np.unique(self._watched // len(self._sampler.chunk_range(0))).tolist()

    @cached_property
    def _rates(self) -> np.ndarray:
        """Probability of each entry: float64[examples, T].

        float64[1, T] if all examples have equal rates, or the table would be large.
        """
        steps = np.arange(self._length)
        same = isinstance(self._law, IndependentRows) or self._size * steps.size > _CELLS
        examples = self._watched[:1] if same else self._watched
        rates = self._law.rate(examples[:, None], steps[None])
        return np.broadcast_to(rates, (examples.size, steps.size))

    def pvalues(self) -> Iterator[tuple[str, list[Any]]]:
        """Yields the name and the p-values of each check."""
        yield "examples and steps are drawn at the rates of the law", [*self._shares()]
        yield "no example returns to a step more often than by chance", [self._returns()]
        if self._law.independent:
            yield "batch sizes vary as the law says", [self._sizes()]
        yield "epochs and seeds are drawn independently", [*self._pairs()]
        yield "examples take part together as often as the law says", [*self._joint()]

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
            yield _binomial(count, trials, expected / trials)
            count, trials, expected = (np.cumsum(x, axis=1) for x in (count, trials, expected))
            trials = trials[:, :1] if once else trials
            last = -1 if once else None
            yield _binomial(count, trials, expected / trials)[:, :last]
        if isinstance(self._law, IndependentRows):
            yield self._whole_chunks()
        if not once:
            count, trials, expected = self._table(examples, steps, single, 0 * by_step)
            yield _binomial(count, trials, expected / trials)
            count, trials, expected = (np.cumsum(x, axis=0) for x in (count, trials, expected))
            yield _binomial(count, trials, expected / trials)
            yield self._participation()

    def _whole_chunks(self) -> Any:
        """Returns p-values of all rows' participations in the first t steps."""
        rows = sum(len(self._sampler.chunk_range(chunk)) for chunk in self._chunks)
        steps = np.arange(1, self._length + (not self._law.once))
        trials = len(self._draws) * rows * (1 if self._law.once else steps)
        rate = self._rates[0, : steps.size]
        chance = np.cumsum(rate) if self._law.once else np.cumsum(rate) / steps
        return _binomial(np.cumsum(self._by_step)[: steps.size], trials, chance)

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
        chance = stats.binom.sf(times - 1, self._length, float(self._rates.mean()))
        return _binomial(observed, trials, chance)

    def _keys(self, draw: _Draw) -> np.ndarray:
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
        plans = [sampler.plan(_seed(d.seed), d.epoch) for d in self._draws[:draws]]
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

    def _pairs(self) -> Iterator[Any]:
        """Yields p-values of shared entries and step orders, by draw pairs."""
        compared = self._draws[: _PAIRED * 5 // 8] + self._draws[-_PAIRED * 3 // 8 :]
        compared = list({(draw.seed, draw.epoch): draw for draw in compared}.values())
        counted: dict[tuple[bool, int], list[tuple[float, float, float]]] = {}
        for first, second in itertools.combinations(compared, 2):
            shared = np.intersect1d(self._keys(first), self._keys(second), assume_unique=True).size
            row = 0 * first.examples if len(self._rates) == 1 else first.examples
            expected = float(self._rates[row, first.steps].sum())
            kind = first.seed == second.seed, abs(first.epoch - second.epoch)
            counted.setdefault(kind, []).append((shared, first.examples.size, expected))
            if self._law.once and self._length > 1:
                yield self._orders(first, second)
        for several in counted.values():
            count, trials, expected = np.array(several).T
            trials = np.maximum(trials, 1)
            yield _binomial(count, trials, expected / trials)
            if self._law.independent or not self._law.once:
                yield _binomial(count.sum(), trials.sum(), expected.sum() / trials.sum())

    def _orders(self, first: _Draw, second: _Draw) -> float:
        """Returns the chi-square p-value for independent steps in two draws."""
        groups = min(_COARSE, self._length)
        step_groups = np.full((2, self._size), -1)
        for row, draw in zip(step_groups, (first, second), strict=True):
            row[draw.examples] = draw.steps * groups // self._length
        step_groups = step_groups[:, (step_groups >= 0).all(axis=0)]
        table = np.bincount(step_groups[0] * groups + step_groups[1], minlength=groups**2).reshape(
            groups, -1
        )
        table = table[table.sum(axis=1) > 0][:, table.sum(axis=0) > 0]
        if table.shape < (2, 2) or min(table.shape) < 2 or table.sum() < 5 * table.size:
            return 1.0
        return float(stats.chi2_contingency(table, correction=False).pvalue)

    def _joint(self) -> Iterator[Any]:
        """Yields p-values of two examples in one step, at several distances."""
        law, n, steps = self._law, self._sampler.num_examples, np.arange(self._length)
        width = len(self._sampler.chunk_range(0))
        shard = len(self._sampler.shard_range(0))
        apart = {1, 2, 16, 256, width, (self._sampler.num_chunks - 1) * width, shard}
        for distance in sorted(d * self._cycle for d in apart if 0 < d * self._cycle < n):
            positions = np.searchsorted(self._watched, self._watched + distance)
            has_partner = (
                self._watched[np.minimum(positions, self._size - 1)] == self._watched + distance
            )
            first = np.flatnonzero(has_partner & (self._watched // distance % 2 == 0))
            if not first.size:
                continue
            partner = np.full(self._size, -1)
            partner[first] = positions[first]
            count = 0
            for draw in self._draws:
                keys, in_pairs = self._keys(draw), partner[draw.examples] >= 0
                partner_keys = (
                    partner[draw.examples[in_pairs]] * self._length + draw.steps[in_pairs]
                )
                count += np.isin(partner_keys, keys).sum()
            few = first[:: max(1, first.size * steps.size // _CELLS)]
            if isinstance(law, IndependentRows):
                few = few[:1]
            pairs = self._watched[few][:, None], self._watched[few][:, None] + distance
            chance = np.broadcast_to(law.joint(*pairs, steps[None]), (few.size, steps.size))
            trials = len(self._draws) * first.size * (1 if law.once else steps.size)
            expected = len(self._draws) * first.size * float(chance.sum(axis=1).mean())
            yield _binomial(count, trials, expected / trials)


class _UnitTests(_Tests):
    """Tests of draws down a tree of units; an epoch has one step."""

    def _chosen(self) -> np.ndarray:
        return np.arange(self._sampler.num_examples)

    def _draw(self, seed: int, epoch: int) -> _Draw:
        examples = self._sampler.plan(_seed(seed), epoch).members(0).astype(np.int64)
        return _Draw(seed, epoch, examples, 0 * examples)

    def pvalues(self) -> Iterator[tuple[str, list[Any]]]:
        """Yields the name and the p-values of each check."""
        late = [draw for draw in self._draws if 2 * draw.epoch + 1 >= self._sampler.epochs]
        levels = [*self._levels(self._draws), *self._levels(late)]
        yield "units and their examples are drawn at the rates of the law", [*self._unit_shares()]
        yield (
            "examples of a unit are drawn at equal rates",
            [pvalue for subsets in levels for pvalue in subsets.ranks()],
        )
        yield (
            "epochs and seeds are drawn independently",
            [pvalue for subsets in levels for pvalue in self._lags(subsets)],
        )
        yield (
            "examples take part together as often as the law says",
            [pvalue for subsets in levels for pvalue in (*subsets.pairs(), subsets.neighbours())],
        )

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

    @cached_property
    def _siblings(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Group of exchangeable siblings of each unit and example, and its rank there, by level.

        If examples are independent, a drawn unit may have none in the batch, and siblings are
        exchangeable only if their subtrees have equal sizes.
        """
        kinds = [np.zeros(self._size)]
        for parent in self._parents[:0:-1]:
            alike = self._law.leaf_probability is None
            kinds.append(np.bincount(parent, 0 * kinds[-1] if alike else np.sin(kinds[-1] + 1)))
        siblings = []
        for parent, kind in zip(self._parents, reversed(kinds), strict=True):
            order = np.lexsort((kind, parent))
            begins = np.diff(parent[order], prepend=-1) != 0
            begins |= np.diff(kind[order], prepend=-1) != 0
            group, rank = np.empty((2, order.size), np.int64)
            group[order] = np.cumsum(begins) - 1
            rank[order] = np.arange(order.size) - np.flatnonzero(begins)[group[order]]
            siblings.append((group, rank))
        return siblings

    def _levels(self, draws: list[_Draw]) -> Iterator[_Subsets]:
        """Yields the drawn subsets of each level."""
        units: Any = self._law.units
        number = np.repeat(np.arange(len(draws)), [draw.examples.size for draw in draws])
        examples = np.concatenate([np.zeros(0, np.int64), *(draw.examples for draw in draws)])
        for path, siblings in zip((*units, np.arange(self._size)), self._siblings, strict=True):
            yield _Subsets(draws, number, path[examples], *siblings)

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
        yield _binomial(count, num_draws, law.rate(np.arange(self._size), 0))
        *_, innermost, leaves = levels = [*self._levels(self._draws)]
        for subsets, drawn in zip(levels, law.draws, strict=False):
            exact = law.leaf_probability is None
            yield float(np.all(subsets.count == drawn if exact else subsets.count <= drawn))
        none = 0.0  # largest probability that a drawn unit has no example in the batch
        if law.leaf_probability is not None:
            none = (1 - law.leaf_probability) ** int(np.bincount(law.units[-1]).min())
            yield from leaves.halves(law.leaf_probability)
        trials = num_draws * law.most_units[-1]
        yield stats.binom.sf(trials - innermost.rank.size - 1, trials, none)

    def _lags(self, subsets: _Subsets) -> Iterator[Any]:
        """Yields p-values of members that two draws share, for each lag of seeds and epochs."""
        for lag in [(1, 0), *((0, 2**k) for k in range(20)), *((0, k) for k in range(3, 9))]:
            yield subsets.repeated(*lag)


class _Subsets:
    """Subsets of siblings that draws take, one for each draw and each group with members.

    Given its size, a subset is uniform among the subsets of its group, and independent of all
    others. Numbers of members at given ranks are sums of negatively associated indicators, and so
    are numbers of disjoint pairs: their tails are those of binomial counts.

    Attributes:
      rank: Rank of each member among the siblings of its group: int64[members].
      subset: Subset of each member: int64[members].
      count: Number of members of each subset: int64[subsets].
      size: Number of siblings in the group of each subset: int64[subsets].
    """

    def __init__(
        self,
        draws: list[_Draw],
        number: np.ndarray,
        child: np.ndarray,
        group: np.ndarray,
        rank: np.ndarray,
    ):
        """Divides members into subsets.

        Args:
          draws: Draws.
          number: Draw of each entry: int64[entries].
          child: Unit or example of each entry: int64[entries].
          group: Group of each unit or example.
          rank: Rank of each unit or example in its group.
        """
        self._draws, self._sizes = draws, np.bincount(group)
        num_groups, self._width = self._sizes.size, 2 * int(self._sizes.max())
        keys = np.unique((number * num_groups + group[child]) * self._width + rank[child])
        block, self.rank = np.divmod(keys, self._width)
        self._block, self.subset, self.count = np.unique(
            block, return_inverse=True, return_counts=True
        )
        self._draw, self._group = np.divmod(self._block, num_groups)
        self.size, self._keys = self._sizes[self._group], self.subset * self._width + self.rank

    def ranks(self) -> Iterator[Any]:
        """Yields p-values of members by rank and by sibling."""
        share, width = self.count / self.size, self._width // 2
        count = np.bincount(self.rank, minlength=width)
        trials, expected = (
            np.cumsum(np.bincount(self.size - 1, weights, width)[::-1])[::-1]
            for weights in (None, share)
        )
        for total in (np.asarray, np.cumsum):
            yield _binomial(total(count), total(trials), _ratio(total(expected), total(trials)))
        last = np.count_nonzero(self.rank == self.size[self.subset] - 1)
        yield _binomial(last, share.size, share.mean() if share.size else 0.0)
        first = np.cumsum(self._sizes) - self._sizes
        sibling = first[self._group[self.subset]] + self.rank
        count = np.bincount(sibling, minlength=int(self._sizes.sum()))
        trials, expected = (
            np.repeat(np.bincount(self._group, weights, self._sizes.size), self._sizes)
            for weights in (None, share)
        )
        yield _binomial(count, trials, _ratio(expected, trials))

    def pairs(self) -> Iterator[Any]:
        """Yields p-values of disjoint pairs of members at distances of powers of two."""
        share = self.count * (self.count - 1) / (self.size * np.maximum(1, self.size - 1))
        for distance in (2**k for k in range((self._width // 2 - 1).bit_length())):
            for shift in (0, distance):
                end = self.size + shift
                pairs = end // (2 * distance) * distance - np.minimum(self.size, shift)
                pairs += np.maximum(0, end % (2 * distance) - distance)
                is_first = (self.rank + shift) & distance == 0
                partner = self.rank[is_first] + distance
                count = np.count_nonzero(self._holds(self.subset[is_first], partner))
                yield _binomial(count, pairs.sum(), _ratio(share @ pairs, pairs.sum()))

    def neighbours(self) -> float:
        """Returns the p-value of ranks that subsets of neighbouring groups in a draw share."""
        partner = np.arange(1, self.count.size + 1)
        return self._shared(np.where(np.diff(self._draw, append=-1) == 0, partner, -1))

    def repeated(self, seeds: int, epochs: int) -> float:
        """Returns the p-value of members that are drawn again after some seeds and epochs."""
        if not self.size.size:
            return 1.0
        number = {(draw.seed, draw.epoch): k for k, draw in enumerate(self._draws)}
        later = [number.get((d.seed + seeds, d.epoch + epochs), -1) for d in self._draws]
        draw = np.array(later, np.int64)[self._draw]
        block = np.where(draw < 0, -1, draw * self._sizes.size + self._group)
        place = np.minimum(np.searchsorted(self._block, block), self._block.size - 1)
        return self._shared(np.where(self._block[place] == block, place, -1))

    def halves(self, probability: float) -> Iterator[Any]:
        """Yields p-values of independent members of half of each group.

        Subsets count whose other half has members, so that an empty one is not overlooked.

        Args:
          probability: Probability of each member.
        """
        is_lower = 2 * self.rank < self.size[self.subset]
        for in_half, sizes in ((is_lower, -(-self.size // 2)), (~is_lower, self.size // 2)):
            counts = np.bincount(self.subset[~in_half], minlength=self.size.size) > 0
            count = np.count_nonzero(in_half & counts[self.subset])
            yield _binomial(count, sizes[counts].sum(), probability)

    def _shared(self, partner: np.ndarray) -> Any:
        """Returns the p-value of ranks that are in a subset and its partner; -1 is none."""
        second = partner[self.subset]
        is_trial = (second >= 0) & (self.rank < self.size[second])
        second, rank = second[is_trial], self.rank[is_trial]
        expected = (self.count[second] / self.size[second]).sum()
        count = np.count_nonzero(self._holds(second, rank))
        return _binomial(count, second.size, _ratio(expected, second.size))

    def _holds(self, subset: np.ndarray, rank: np.ndarray) -> np.ndarray:
        return np.isin(subset * self._width + rank, self._keys, assume_unique=True)


def _ratio(numerator: Any, denominator: Any) -> Any:
    return numerator / np.maximum(1, denominator)


def _cut_pvalues(sampler: BatchSampler, law: RowLaw) -> Iterator[tuple[str, list[Any]]]:
    """Yields p-values of the rows that remain in truncated batches."""
    if sampler.accumulates or not cuts(sampler):
        return
    n, cap, last = len(sampler.shard_range(0)), sampler.shard_batch_size, sampler.num_shards - 1
    size = min(n, 2 * cap)
    members, share = some_members(np.random.default_rng(0), n, size), cap / size
    num_steps, length = sampler.num_steps, sampler.steps_per_epoch
    second_epoch = range(length, min(length + 8, num_steps))
    steps = sorted({*range(min(_CUTS, num_steps)), *second_epoch, num_steps - 1})
    draws = [(0, step, 0) for step in steps]
    draws += [(0, step, shard) for step in steps[:8] for shard in sorted({last, (last + 1) // 2})]
    draws += [(seed, step, 0) for seed in range(1, 9) for step in steps[:8]]
    draws = list(dict.fromkeys(draws))
    survived = np.zeros((len(draws), size))
    for row, (seed, step, shard) in zip(survived, draws, strict=True):
        row[np.isin(members, sampler.passes(members, _seed(seed), step, shard)[0])] = 1
    count = survived.sum(axis=0)
    groups = np.arange(size) * min(_GROUPS, size) // size
    of_group, sizes = np.bincount(groups, count), np.bincount(groups)
    residues = members % _GROUPS
    by_residue, of_residue = np.bincount(residues, count), np.bincount(residues)
    yield (
        "rows that survive truncation are uniform",
        [
            _binomial(count, len(draws), share),
            _binomial(np.cumsum(count)[:-1], len(draws) * np.arange(1, size), share),
            _binomial(of_group, len(draws) * sizes, share),
            _binomial(by_residue[of_residue > 0], len(draws) * of_residue[of_residue > 0], share),
        ],
    )
    first, second = np.triu_indices(len(draws), 1)
    common = (survived @ survived.T)[first, second]
    step, of_shard = (np.array([draw[k] for draw in draws]) for k in (1, 2))
    seeds = np.array([draw[0] for draw in draws])
    same = (step[first] == step[second]) & (seeds[first] == seeds[second])
    pooled = [
        common[(first % 2 == 0) & (second == first + 1)],
        common[same & (of_shard[first] == 0)],
    ]
    alone = (of_shard[first] == 0) & (of_shard[second] == 0) & (seeds[first] == seeds[second])
    pooled.append(common[alone & (step[second] == step[first] + length)])
    yield (
        "every step, shard and seed truncates independently",
        [
            _binomial(common, cap, share),
            *(_binomial(x.sum(), cap * x.size, share) for x in pooled if x.size),
        ],
    )
