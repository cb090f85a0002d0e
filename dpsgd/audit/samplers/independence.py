"""Whether examples, epochs and seeds are drawn independently, by the entries that they share.

The laws of such counts: docs/explanation/tests-of-sampled-batches.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

from dpsgd.audit.report import CheckResult, count_pvalue, entropy_pvalue, order_pvalue
from dpsgd.audit.samplers.draws import Draw, Draws
from dpsgd.audit.samplers.participation import step_rates
from samplers.row_law import RowLaw

_Choice = Callable[[], tuple[np.ndarray, np.ndarray]]
_Counted = tuple[float, float, float]
"""Successes, trials, and how many successes are expected."""
_Found = tuple[list[Any], str]
"""p-values, and what was seen."""

_GROUPS = 8  # of steps, for what is no coincidence, as an order that is reversed
_LAGS = (*range(1, 9), *(2**k for k in range(4, 20)))
_PAIRS = 48  # of draws of units, at each lag
_COUPLED = 1024  # draws in which couples are looked for,
_ENTRIES = 1_500_000  # and their entries, about,
_TOGETHER = 8  # and those of the same couples


def coincidence_checks(draws: Draws, law: RowLaw) -> list[CheckResult]:
    """Returns the checks of pairs: of draws, and of examples."""
    of_seeds, of_epochs = _pairs(draws, law) if law.units is None else _unit_pairs(draws, law)
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


def _pairs(draws: Draws, law: RowLaw) -> list[_Found]:
    """Returns what is found of pairs of seeds, and of pairs of epochs, without units."""
    rates, some = step_rates(draws, law), draws.merged[0]
    seed, epoch = (np.array([draw[k] for draw in some]) for k in (0, 1))
    chunks = draws.chunk_rows.size
    first, second = np.triu_indices(len(some), 1)
    of = [(draws.chunks(draw.examples), rates[draw.steps]) for draw in some]
    trials = np.stack([np.bincount(at, minlength=chunks) for at, _ in of], axis=1)
    expected = np.stack([np.bincount(at, rate, chunks) for at, rate in of], axis=1)
    # Of each chunk, and of all.
    count, trials, expected = (
        np.concatenate([part, part.sum(axis=0)[None]])
        for part in (_shared(draws)[:, first, second], trials[:, first], expected[:, first])
    )
    pvalues = _of_counts(count, trials, expected, law)
    if law.once:
        pvalues = np.concatenate([pvalues, _grouped(draws, some, first, second, rates)])
    found, lag = [], np.abs(epoch[second] - epoch[first])
    for same in (False, True):
        mine = (seed[first] == seed[second]) == same
        values: list[Any] = [pvalues[:, mine]]
        for of_lag in np.unique(lag[mine]) if law.independent or not law.once else ():
            # Sums of pairs of which no two share a draw: of seeds 0 and 1, 2 and 3, ..., or epochs.
            if of_lag == 0:
                apart = (seed[first] % 2 == 0) & (seed[second] == seed[first] + 1)
            else:
                least = np.minimum(epoch[first], epoch[second])
                apart = (seed[first] == seed[second]) & (least % (2 * of_lag) < of_lag)
            pooled = mine & (lag == of_lag) & apart
            counted = np.stack([x[-1, pooled] for x in (count, trials, expected)], axis=-1)
            values.append(_pooled(counted))
        shared, wanted = count[-1, mine].sum(), expected[-1, mine].sum()
        detail = (
            f"{int(mine.sum()):,} pairs by {chunks} chunks: {int(shared):,} coincidences, "
            f"{wanted:,.1f} expected"
        )
        found.append((values, detail))
    return found


def _pooled(counted: Any) -> float:
    """Returns the p-value of the sums of `_Counted` numbers."""
    seen, trials, expected = np.sum(np.reshape(counted, (-1, 3)), axis=0)
    return float(count_pvalue(seen, trials, min(1.0, expected / trials))) if trials else 1.0


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
        return order_pvalue(count, expected)
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


def _unit_pairs(draws: Draws, law: RowLaw) -> list[_Found]:
    """Returns what is found of pairs of seeds, and of pairs of epochs, of draws of units."""
    by_place = {(draw.seed, draw.epoch): draw for draw in draws.all}

    def pairs(seeds: int, epochs: int) -> list[tuple[Draw, Draw]]:
        """Returns pairs that are so far apart, of which no two share a draw."""
        return [
            (one, by_place[other])
            for one in draws.all
            if (other := (one.seed + seeds, one.epoch + epochs)) in by_place
            and (one.epoch % (2 * epochs) < epochs if epochs else one.seed % 2 == 0)
        ]

    of_seeds, of_epochs = [pairs(1, 0)], [pairs(0, lag) for lag in _LAGS]
    return [_of_units(draws, law, several) for several in (of_seeds, of_epochs)]


def _of_units(draws: Draws, law: RowLaw, several: list[list[tuple[Draw, Draw]]]) -> _Found:
    """Returns what is found of lists of pairs, in none of which two share a draw.

    Of the first of a pair: one random entry of each outermost unit; and all entries in the
    innermost units that both have, which are draws without replacement, given how many they are.
    """
    pvalues, total = list[Any](), list[_Counted]()
    for pairs in several:
        alone, within = [], []
        for one, other in pairs[:: max(1, len(pairs) // _PAIRS)]:
            entries = draws.choice.shuffled(one.examples)
            chosen = entries[np.unique(draws.choice.of(0, entries), return_index=True)[1]]
            seen = int(np.isin(chosen, other.examples).sum())
            alone.append((seen, chosen.size, float(np.sum(law.rate(chosen, 0)))))
            within.append(_within(draws, one, other))
        pvalues += [_pooled([of_pair]) for of_pair in within] + [_pooled(alone), _pooled(within)]
        total += within
    count, _, expected = np.sum(np.reshape(total, (-1, 3)), axis=0)
    detail = f"{len(total):,} pairs: {int(count):,} coincidences, {expected:,.1f} expected"
    return pvalues, detail


def _within(draws: Draws, one: Draw, other: Draw) -> _Counted:
    (units, counts), (others, of_others) = map(draws.choice.units, (one.examples, other.examples))
    both, here, there = np.intersect1d(units, others, assume_unique=True, return_indices=True)
    first, second = counts[here], of_others[there]
    shared = np.intersect1d(one.examples, other.examples, assume_unique=True).size
    return shared, int(first.sum()), float(np.sum(first * second / draws.choice.sizes[both]))


def _examples(draws: Draws, law: RowLaw) -> list[CheckResult]:
    """Two rows take part in one step as often as claimed: in units, and across them."""
    if draws.rows == 1:
        return []
    choices: dict[str, list[_Choice]]
    if law.units is None:
        name = "pairs of examples take part together as often as claimed"
        if law.independent:
            name = "examples are independent of one another"
        distances = {d for d in (1, 2, 16, 256, 4096, int(draws.chunk_rows[0])) if d < draws.rows}
        choices = {name: [functools.partial(_couples, draws.rows, d) for d in sorted(distances)]}
    else:
        together = "{} take part together as often as claimed".format
        choices = {
            together("neighbours in a unit"): [lambda: draws.choice.together(next_one=True)],
            together("examples of a unit"): [lambda: draws.choice.together(next_one=False)],
            together("examples of different units"): [lambda: _neighbours(draws.choice.apart())],
        }
    return [_joint(name, draws, law, of) for name, of in choices.items()]


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
    pvalues, found, wanted = list[Any](), 0.0, 0.0
    for choose in choices:
        count, expected, trials = (np.zeros(draws.steps) for _ in range(3))
        some = draws.independent[:most]
        for start in range(0, len(some), _TOGETHER):
            few = some[start : start + _TOGETHER]
            first, second = choose()
            partner = np.full(draws.rows, -1, np.int64)
            partner[first] = second
            for draw in few:
                paired = partner[draw.examples] >= 0
                at = draw.steps[paired]
                both = draws.has(draw, partner[draw.examples[paired]], at)
                count += np.bincount(at, both, minlength=draws.steps)
            if law.units is None:
                chance = law.joint(first[:1], second[:1], steps)
            else:
                chance = np.mean(law.joint(first, second, 0))
            expected += np.broadcast_to(chance, draws.steps) * first.size * len(few)
            trials += first.size * len(few)
        if law.independent or not law.once:
            # Steps are independent; or a couple that shares one shares no other.
            trials = trials[:1] if law.once else trials.sum(keepdims=True)
            count, expected = count.sum(keepdims=True), expected.sum(keepdims=True)
        any_of = trials > 0
        chance = np.minimum(1.0, expected[any_of] / trials[any_of])
        pvalues.append(count_pvalue(count[any_of], trials[any_of], chance))
        found, wanted = found + count.sum(), wanted + expected.sum()
    return CheckResult.of(name, pvalues, f"{int(found):,} couples, {wanted:.5g} expected")
