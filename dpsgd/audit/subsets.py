"""Tests subsets that a sampler draws from groups of exchangeable members."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

LAGS = ((1, 0), *((0, 2**k) for k in range(20)), *((0, k) for k in range(3, 9) if k & (k - 1)))
"""Distances between the seeds and the epochs of two compared draws."""


class Draw(NamedTuple):
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


def binomial(count: Any, trials: Any, probability: Any) -> Any:
    """Returns two-sided p-values of binomial counts.

    Args:
      count: Counts.
      trials: Numbers of trials.
      probability: Probability of success of a trial.

    >>> binomial([50, 90], 100, 0.5).round(2).tolist()
    [1.0, 0.0]
    """
    p = np.clip(probability, 0.0, 1.0)
    count, trials = np.asarray(count), np.maximum(np.asarray(trials), 0)
    below, above = stats.binom.cdf(count, trials, p), stats.binom.sf(count - 1, trials, p)
    return np.minimum(1.0, 2 * np.minimum(below, above))


class Subsets:
    """Drawn subsets of groups of exchangeable members.

    Given its size, a subset is uniform among the subsets of its group, and independent of other
    draws. Numbers of members at given ranks are sums of negatively associated indicators, and so
    are numbers of disjoint pairs: their tails are those of binomial counts.

    Attributes:
      rank: Rank of each member in its group: int64[members].
      subset: Subset of each member: int64[members].
      count: Number of members of each subset, at least 1: int64[subsets].
      size: Size of the group of each subset: int64[subsets].
    """

    def __init__(
        self,
        draws: list[Draw],
        entries: tuple[np.ndarray, np.ndarray, np.ndarray],
        sizes: np.ndarray,
        family: int,
    ):
        """Divides entries into subsets.

        Args:
          draws: Draws.
          entries: Draw, group and rank of each entry: int64[entries].
          sizes: Size of each group: int64[groups].
          family: Number of consecutive groups that a draw takes independently.
        """
        number, group, rank = entries
        self._draws, self._sizes, self._family = draws, sizes, family
        self._width = 2 * int(sizes.max())
        keys = np.unique((number * sizes.size + group) * self._width + rank)
        block, self.rank = np.divmod(keys, self._width)
        self._block, self.subset, self.count = np.unique(
            block, return_inverse=True, return_counts=True
        )
        self._draw, self._group = np.divmod(self._block, sizes.size)
        self.size, self._keys = sizes[self._group], self.subset * self._width + self.rank

    def ranks(self) -> Iterator[Any]:
        """Yields p-values of members by rank and by sibling."""
        share, width = self.count / self.size, self._width // 2
        count = np.bincount(self.rank, minlength=width)
        trials, expected = (
            np.cumsum(np.bincount(self.size - 1, weights, width)[::-1])[::-1]
            for weights in (None, share)
        )
        for total in (np.asarray, np.cumsum):
            yield binomial(total(count), total(trials), _ratio(total(expected), total(trials)))
        last = np.count_nonzero(self.rank == self.size[self.subset] - 1)
        yield binomial(last, share.size, share.mean() if share.size else 0.0)
        first = np.cumsum(self._sizes) - self._sizes
        sibling = first[self._group[self.subset]] + self.rank
        count = np.bincount(sibling, minlength=int(self._sizes.sum()))
        trials, expected = (
            np.repeat(np.bincount(self._group, weights, self._sizes.size), self._sizes)
            for weights in (None, share)
        )
        yield binomial(count, trials, _ratio(expected, trials))

    def pairs(self) -> Iterator[Any]:
        """Yields p-values of member pairs at distances 2^k."""
        share = self.count * (self.count - 1) / (self.size * np.maximum(1, self.size - 1))
        for distance in (2**k for k in range((self._width // 2 - 1).bit_length())):
            for shift in (0, distance):
                end = self.size + shift
                pairs = end // (2 * distance) * distance - np.minimum(self.size, shift)
                pairs += np.maximum(0, end % (2 * distance) - distance)
                is_first = (self.rank + shift) & distance == 0
                partner = self.rank[is_first] + distance
                count = np.count_nonzero(self._holds(self.subset[is_first], partner))
                yield binomial(count, pairs.sum(), _ratio(share @ pairs, pairs.sum()))

    def neighbours(self) -> Iterator[Any]:
        """Yields p-values of ranks shared by neighbouring groups."""
        family, partner = self._block // self._family, np.arange(1, self.count.size + 1)
        yield from self._shared(np.where(np.diff(family, append=-1) == 0, partner, -1))

    def repeated(self, lags: Iterable[tuple[int, int]] = LAGS) -> Iterator[Any]:
        """Yields p-values of members that two draws share.

        Args:
          lags: Distances between the seeds and the epochs of two draws; draws of every seed are
            also compared with draws of seed 0.
        """
        number = {(draw.seed, draw.epoch): k for k, draw in enumerate(self._draws)}
        pairs = [
            [(d.seed + seeds, d.epoch + epochs) for d in self._draws] for seeds, epochs in lags
        ]
        pairs.append([(0, d.epoch) if d.seed else (-1, 0) for d in self._draws])
        for later in pairs if self._block.size else []:
            numbers = np.array([number.get(pair, -1) for pair in later])
            if numbers.max() >= 0:
                yield from self._repeated(numbers)

    def _repeated(self, later: np.ndarray) -> Iterator[Any]:
        """Yields p-values of members shared with other draws (-1: no other draw)."""
        draw = later[self._draw]
        block = np.where(draw < 0, -1, draw * self._sizes.size + self._group)
        place = np.minimum(np.searchsorted(self._block, block), self._block.size - 1)
        yield from self._shared(np.where(self._block[place] == block, place, -1))

    def halves(self, probability: float) -> Iterator[Any]:
        """Yields p-values of the independent members in each half of the groups.

        Only subsets with members in the other half count, because empty subsets are not recorded.

        Args:
          probability: Probability of each member.
        """
        is_lower = 2 * self.rank < self.size[self.subset]
        for in_half, sizes in ((is_lower, -(-self.size // 2)), (~is_lower, self.size // 2)):
            counts = np.bincount(self.subset[~in_half], minlength=self.size.size) > 0
            count = np.count_nonzero(in_half & counts[self.subset])
            yield binomial(count, sizes[counts].sum(), probability)

    def _shared(self, partner: np.ndarray) -> Iterator[Any]:
        """Yields p-values of ranks shared with a partner subset (-1: none), by draw and overall."""
        second = partner[self.subset]
        is_trial = (second >= 0) & (self.rank < self.size[second])
        second, rank = second[is_trial], self.rank[is_trial]
        draw = self._draw[self.subset[is_trial]]
        count, trials, expected = (
            np.bincount(draw, weights)
            for weights in (self._holds(second, rank), None, self.count[second] / self.size[second])
        )
        yield binomial(count, trials, _ratio(expected, trials))
        yield binomial(count.sum(), trials.sum(), _ratio(expected.sum(), trials.sum()))

    def _holds(self, subset: np.ndarray, rank: np.ndarray) -> np.ndarray:
        keys = subset * self._width + rank
        place = np.minimum(np.searchsorted(self._keys, keys), self._keys.size - 1)
        return self._keys[place] == keys


class RatedSubsets(Subsets):
    """Subsets of members that take part at different rates, negatively associated.

    The size of such a subset tells which members are likely, so pairs and repetitions are compared
    with the rates over draws of all sizes. Two members co-occur at most as often as if independent.
    """

    def __init__(
        self,
        draws: list[Draw],
        entries: tuple[np.ndarray, np.ndarray, np.ndarray],
        rates: np.ndarray,
        *,
        two_sided: bool,
    ):
        """Divides entries into subsets.

        Args:
          draws: Draws.
          entries: Draw, group and rank of each entry: int64[entries].
          rates: Rate of each member: float64[groups, members].
          two_sided: True if members are independent, so that too few pairs are a fault, too.
        """
        super().__init__(draws, entries, np.full(len(rates), rates.shape[1]), 1)
        self._rates, self._two_sided = rates, two_sided

    def pairs(self) -> Iterator[Any]:
        """Yields p-values of member pairs at distances 2^k."""
        members = np.arange(self._rates.shape[1])
        for distance in (2**k for k in range((members.size - 1).bit_length())):
            for shift in (0, distance):
                is_first = ((members + shift) & distance == 0) & (members + distance < members.size)
                first = members[is_first]
                chance = np.sum(self._rates[:, first] * self._rates[:, first + distance])
                subset, rank = (x[is_first[self.rank]] for x in (self.subset, self.rank))
                count: Any = np.count_nonzero(self._holds(subset, rank + distance))
                expected, trials = len(self._draws) * chance, len(self._draws) * first.size
                count = count if self._two_sided else max(count, int(expected))
                trials *= len(self._rates)
                yield binomial(count, trials, _ratio(expected, trials))

    def neighbours(self) -> Iterator[Any]:
        """Yields nothing: all members of a step are in one group."""
        return iter(())

    def _repeated(self, later: np.ndarray) -> Iterator[Any]:
        """Yields p-values of members that draws share, by draw and in disjoint pairs of draws."""
        draw, group = (x[self.subset] for x in (self._draw, self._group))
        place = np.searchsorted(self._block, later[draw] * self._sizes.size + group)
        place = np.minimum(place, self._block.size - 1)
        same = self._block[place] == later[draw] * self._sizes.size + group
        is_trial = later[draw] >= 0
        weights = (same & self._holds(place, self.rank), None, self._rates[group, self.rank])
        count, trials, expected = (
            np.bincount(draw[is_trial], w if w is None else w[is_trial], later.size)
            for w in weights
        )
        yield binomial(count, trials, _ratio(expected, trials))
        is_second = np.zeros(later.size, bool)
        for number, following in enumerate(later):
            if following > number:
                is_second[following] = not is_second[number]
        for firsts in (is_second, ~is_second):
            chosen = firsts & (later > np.arange(later.size))
            total = [x[chosen].sum() for x in (count, trials, expected)]
            yield binomial(total[0], total[1], _ratio(total[2], total[1]))


def _ratio(numerator: Any, denominator: Any) -> Any:
    return numerator / np.maximum(1, denominator)
