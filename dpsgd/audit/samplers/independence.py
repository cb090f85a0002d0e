"""Whether examples, epochs and seeds are drawn independently, by the entries that they share.

The laws of such counts: docs/explanation/tests-of-sampled-batches.md.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import special

from dpsgd.audit.report import CheckResult, count_pvalue, entropy_pvalue, smallest
from dpsgd.audit.samplers.draws import Draw, Draws
from dpsgd.audit.samplers.participation import step_rates
from samplers import RowLaw

_GROUPS = 8  # of steps, for what is no coincidence, as an order that is reversed
_LAGS = (*range(1, 9), *(2**k for k in range(4, 20)))
_Choice = Callable[[], tuple[np.ndarray, np.ndarray]]
_PAIRS = 48  # of draws of units, at each lag
_COUPLED = 1024  # draws in which couples are looked for,
_ENTRIES = 1_500_000  # and their entries, about


class _Counted(NamedTuple):
    """A count with its number of trials and their mean number of successes."""

    seen: float
    trials: float
    expected: float

    def pvalue(self) -> float:
        if not self.trials:
            return 1.0
        return float(count_pvalue(self.seen, self.trials, min(1.0, self.expected / self.trials)))

    @classmethod
    def sum(cls, some: list[_Counted]) -> _Counted:
        return cls(*(sum(part) for part in zip(*some, strict=True))) if some else cls(0, 0, 0)


def coincidence_checks(draws: Draws, law: RowLaw) -> list[CheckResult]:
    """Returns the checks of pairs: of draws, and of examples."""
    of_seeds, of_epochs = _unit_pairs(draws, law) if law.units is not None else _pairs(draws, law)
    checks = [CheckResult.of("draws of different seeds are independent", *of_seeds)]
    if draws.sampler.epochs > 1 and law.redrawn:
        checks.append(CheckResult.of("epochs are independent, as claimed", *of_epochs))
    elif draws.sampler.epochs > 1:
        checks.append(_alike(draws))
    return checks + _examples(draws, law)


def _alike(draws: Draws) -> CheckResult:
    """Whether all epochs of the first seed have the same entries."""
    first, *others = (draws.keys(draw) for draw in draws.all if draw.seed == 0)
    kept = sum(np.intersect1d(first, other, assume_unique=True).size for other in others)
    entries = max(sum(other.size for other in others), first.size * len(others))
    detail = f"{kept:,} of {entries:,} entries are kept in other epochs"
    return CheckResult("epochs are alike, as claimed", kept == entries, detail)


# ---------------------------------------------------------------------------- draws, in pairs


def _pairs(draws: Draws, law: RowLaw) -> tuple[tuple[float, str], tuple[float, str]]:
    """Returns p-value and detail of pairs of seeds, and of pairs of epochs, without units."""
    rates, some = step_rates(draws, law), draws.merged[0]
    seed, epoch = (np.array([draw[k] for draw in some]) for k in (0, 1))
    chunks = draws.chunk_rows.size
    trials, expected = np.zeros((2, chunks, len(some)))
    for k, draw in enumerate(some):
        of = draws.chunks(draw.examples)
        trials[:, k] = np.bincount(of, minlength=chunks)
        expected[:, k] = np.bincount(of, rates[draw.steps], minlength=chunks)
    hits = _shared(draws)
    first, second = np.triu_indices(len(some), 1)
    count = np.concatenate([hits, hits.sum(axis=0)[None]])[:, first, second]
    trials, expected = (np.concatenate([a, a.sum(axis=0)[None]]) for a in (trials, expected))
    pvalues = _of_counts(count, trials[:, first], expected[:, first], law)
    if law.once:
        pvalues = np.concatenate([pvalues, _grouped(draws, some, first, second, rates)])
    found = []
    for same in (False, True):
        mine = (seed[first] == seed[second]) == same
        values = [smallest(pvalues[:, mine])]
        lag = np.abs(epoch[second] - epoch[first])
        for of_lag in np.unique(lag[mine]):
            pooled = mine & (lag == of_lag) & _apart(seed, epoch, first, second, int(of_lag))
            if law.independent or not law.once:
                of_first = (a[-1, first[pooled]].sum() for a in (trials, expected))
                one = _Counted(count[-1, pooled].sum(), *of_first)
                values.append(one.pvalue())
        shared, wanted = count[-1, mine].sum(), expected[-1, first[mine]].sum()
        detail = (
            f"{int(mine.sum()):,} pairs by {chunks} chunks: {int(shared):,} coincidences, "
            f"{wanted:,.1f} expected"
        )
        found.append((smallest(values), detail))
    return found[0], found[1]


def _apart(
    seed: np.ndarray, epoch: np.ndarray, first: np.ndarray, second: np.ndarray, lag: int
) -> np.ndarray:
    """Returns which pairs to sum up: those of which no two share a draw."""
    if lag == 0:  # of seeds 0 and 1, 2 and 3, ...
        return (seed[first] % 2 == 0) & (seed[second] == seed[first] + 1)
    return (seed[first] == seed[second]) & (
        np.minimum(epoch[first], epoch[second]) % (2 * lag) < lag
    )


def _shared(draws: Draws) -> np.ndarray:
    """Returns how many entries any two draws share in each chunk: int64[chunks, draws, draws]."""
    some, keys, numbers = draws.merged
    count, chunks = len(some), draws.chunk_rows.size
    found = np.zeros(chunks * count**2, np.int64)
    for lag in range(1, count):
        at = np.flatnonzero(keys[lag:] == keys[:-lag])
        if not at.size:
            break
        chunk = draws.chunks(keys[at] // draws.steps)
        cell = (chunk * count + numbers[at]) * count + numbers[at + lag]
        found += np.bincount(cell, minlength=found.size)
    return found.reshape(chunks, count, count)


def _of_counts(
    count: np.ndarray, trials: np.ndarray, expected: np.ndarray, law: RowLaw
) -> np.ndarray:
    if law.once and not law.independent:
        apart = np.abs(count - expected)
        return np.minimum(1, 2 * np.exp(-(apart**2) / np.maximum(4 * expected + 2 * apart, 1e-9)))
    trials = np.maximum(trials, 1)
    return count_pvalue(count, trials, np.minimum(1, expected / trials))


def _grouped(
    draws: Draws, some: list[Draw], first: np.ndarray, second: np.ndarray, rates: np.ndarray
) -> np.ndarray:
    """Returns p-values of where examples of the same steps go in another draw: [groups, pairs].

    Of the examples of each of some groups of steps in the first draw: in the groups of the second,
    they are a multinomial, or draws without replacement.
    """
    groups = min(_GROUPS, draws.steps)
    of_step = np.arange(draws.steps) * groups // draws.steps
    law = np.bincount(of_step, rates, minlength=groups)
    of = [of_step[draw.steps].astype(np.uint8) for draw in some]
    table = np.stack([
        np.bincount(of[one] * np.uint8(groups) + of[other], minlength=groups**2)
        for one, other in zip(first, second, strict=True)
    ]).reshape(-1, groups, groups)  # fmt: skip
    gained = special.rel_entr(table, table.sum(axis=2, keepdims=True) * law).sum(axis=2)
    return entropy_pvalue(gained, groups - 1).T


def _unit_pairs(draws: Draws, law: RowLaw) -> tuple[tuple[float, str], tuple[float, str]]:
    """Returns p-value and detail of pairs of seeds, and of pairs of epochs, of draws of units."""
    by_place = {(draw.seed, draw.epoch): draw for draw in draws.all}
    seeds = [
        (one, by_place[one.seed + 1, one.epoch])
        for one in draws.all
        if one.seed % 2 == 0 and (one.seed + 1, one.epoch) in by_place
    ]
    lags = [
        [
            (one, by_place[one.seed, one.epoch + lag])
            for one in draws.all
            if one.epoch % (2 * lag) < lag and (one.seed, one.epoch + lag) in by_place
        ]
        for lag in _LAGS
    ]
    return _of_units(draws, law, [seeds]), _of_units(draws, law, lags)


def _of_units(
    draws: Draws, law: RowLaw, several: list[list[tuple[Draw, Draw]]]
) -> tuple[float, str]:
    """Returns p-value and detail of lists of pairs, in none of which two share a draw.

    Of the first of a pair: one random entry of each outermost unit; and all entries in the
    innermost units that both have, which are draws without replacement, given how many they are.
    """
    pvalues, total = [], []
    for pairs in several:
        alone, within = [], []
        for one, other in pairs[:: max(1, len(pairs) // _PAIRS)]:
            alone.append(_one_of_each(draws, law, one, other))
            within.append(_within(draws, one, other))
            pvalues.append(within[-1].pvalue())
        pvalues += [_Counted.sum(alone).pvalue(), _Counted.sum(within).pvalue()]
        total += within
    count, _, expected = _Counted.sum(total)
    return smallest(pvalues), (
        f"{len(total):,} pairs: {int(count):,} coincidences, {expected:,.1f} expected"
    )


def _one_of_each(draws: Draws, law: RowLaw, one: Draw, other: Draw) -> _Counted:
    entries = draws.choice.shuffled(one.examples)
    _, first = np.unique(draws.choice.of(0, entries), return_index=True)
    chosen = entries[first]
    expected = float(np.sum(law.rate(chosen, 0)))
    return _Counted(int(np.isin(chosen, other.examples).sum()), chosen.size, expected)


def _within(draws: Draws, one: Draw, other: Draw) -> _Counted:
    (units, counts), (others, of_others) = map(draws.choice.units, (one.examples, other.examples))
    both, here, there = np.intersect1d(units, others, assume_unique=True, return_indices=True)
    first, second = counts[here], of_others[there]
    shared = np.intersect1d(one.examples, other.examples, assume_unique=True).size
    return _Counted(
        shared, int(first.sum()), float(np.sum(first * second / draws.choice.sizes[both]))
    )


# ------------------------------------------------------------------------- examples, in pairs


def _examples(draws: Draws, law: RowLaw) -> list[CheckResult]:
    """Two rows take part in one step as often as claimed: in units, and across them."""
    if draws.rows == 1:
        return []
    if law.units is None:
        name = "pairs of examples take part together as often as claimed"
        if law.independent:
            name = "examples are independent of one another"
        chunk = int(draws.chunk_rows[0])
        distances = {d for d in (1, 2, 16, 256, 4096, chunk) if d < draws.rows}
        choices: list[_Choice] = [
            functools.partial(_couples, draws.rows, d) for d in sorted(distances)
        ]
        return [_joint(name, draws, law, choices)]
    within = "neighbours in a unit take part together as often as claimed"
    any_two = "examples of a unit take part together as often as claimed"
    across = "examples of different units take part together as often as claimed"
    return [
        _joint(within, draws, law, [lambda: draws.choice.together(next_one=True)]),
        _joint(any_two, draws, law, [lambda: draws.choice.together(next_one=False)]),
        _joint(across, draws, law, [lambda: _neighbours(draws.choice.apart())]),
    ]


def _couples(rows: int, distance: int) -> tuple[np.ndarray, np.ndarray]:
    first = np.arange(rows - distance)
    first = first[first % (2 * distance) < distance]
    return first, first + distance


def _neighbours(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return rows[: rows.size // 2 * 2 : 2], rows[1::2]


def _joint(name: str, draws: Draws, law: RowLaw, choices: list[_Choice]) -> CheckResult:
    """Counts couples of which both take part, for each of several ways to choose them."""
    steps = np.arange(draws.steps)
    entries = np.mean([draw.examples.size for draw in draws.independent]) + 1
    most = int(np.clip(_ENTRIES / entries, 4, _COUPLED))
    pvalues, found, wanted = [], 0.0, 0.0
    for choose in choices:
        count, expected, trials = (np.zeros(draws.steps) for _ in range(3))
        for _, few in itertools.groupby(
            enumerate(draws.independent[:most]), lambda pair: pair[0] // 8
        ):
            first, second = choose()
            partner = np.full(draws.rows, -1, np.int64)
            partner[first] = second
            some = [draw for _, draw in few]
            for draw in some:
                paired = partner[draw.examples] >= 0
                at = draw.steps[paired]
                both = draws.has(draw, partner[draw.examples[paired]], at)
                count += np.bincount(at, both, minlength=draws.steps)
            if law.units is None:
                chance = law.joint(first[:1], second[:1], steps)
            else:
                chance = np.mean(law.joint(first, second, 0))
            expected += np.broadcast_to(chance, draws.steps) * first.size * len(some)
            trials += first.size * len(some)
        if law.independent or not law.once:
            # Steps are independent; or a couple that shares one shares no other.
            trials = trials[:1] if law.once else trials.sum(keepdims=True)
            count, expected = count.sum(keepdims=True), expected.sum(keepdims=True)
        any_of = trials > 0
        chance = np.minimum(1.0, expected[any_of] / trials[any_of])
        pvalues.append(smallest(count_pvalue(count[any_of], trials[any_of], chance)))
        found, wanted = found + count.sum(), wanted + expected.sum()
    return CheckResult.of(name, smallest(pvalues), f"{int(found):,} couples, {wanted:.5g} expected")
