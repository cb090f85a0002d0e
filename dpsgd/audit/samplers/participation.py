"""How often steps, chunks, examples and units take part, against the law that was claimed.

Why the counts obey `count_pvalue`: docs/explanation/tests-of-sampled-batches.md.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import scipy

from dpsgd.audit.report import FALSE_ALARM, CheckResult, count_pvalue, entropy_pvalue, smallest
from dpsgd.audit.samplers.draws import Draws
from samplers.row_law import RowLaw

SHARES = "all steps take their share of the examples"

_CELLS = 2**20  # of a table, at most: beyond, consecutive steps are looked at together
_RANKS = 4096
_QUANTILES = (1 / 50, 1 / 6, 1 / 2)


def share_checks(draws: Draws, law: RowLaw) -> list[CheckResult]:
    """Returns the checks of a law that leaves something to chance."""
    made = {
        _participation: law.units is None and not law.once,
        _step_shares: law.units is None and law.batch_sizes is None,
        _chunk_shares: law.units is None,
        _unit_shares: law.units is not None,
        _ranks: law.units is not None,
        _example_shares: not law.once,
        _favourite: draws.steps > 1,
        _sizes: law.independent,
    }
    return [check(draws, law) for check, wanted in made.items() if wanted]


def step_rates(draws: Draws, law: RowLaw) -> np.ndarray:
    """Returns the probability of each step for any example, where there are no units."""
    return np.broadcast_to(law.rate(np.zeros(1, int), np.arange(draws.steps)), draws.steps)


def _resolution(expected: float, tests: int) -> str:
    """Returns how large a relative error `count_pvalue` finds out, with even odds at least."""
    error = math.sqrt(2 * math.log(2 * tests / FALSE_ALARM) / max(expected, 1e-9))
    return f"{100 * error:.2g} %" if error < 1 else "none"


def _more_than(number: Any, trials: int, chance: Any) -> np.ndarray:
    """Returns the probability that a binomial number of so many trials is larger than `number`."""
    return np.asarray(scipy.special.bdtrc(np.minimum(number, trials), trials, chance))


def _participation(draws: Draws, law: RowLaw) -> CheckResult:
    """How often an example takes part in an epoch, over all examples: binomial."""
    trials, seen = draws.rows * len(draws.independent), np.zeros(3, np.int64)
    for draw in draws.independent:
        count = np.bincount(draw.examples, minlength=draws.rows)
        seen += [np.count_nonzero(count >= k) for k in (1, 2, 3)]
    chances = _more_than(np.arange(3), draws.steps, np.mean(step_rates(draws, law)))
    some = chances > 0
    listed = (" / ".join(f"{count:,.0f}" for count in of) for of in (seen, trials * chances))
    return CheckResult.of(
        "how often an example takes part is binomial",
        count_pvalue(seen[some], trials, chances[some]),
        "of {:,}, {} take part 1, 2 and 3 times an epoch at least, {} expected".format(
            trials, *listed
        ),
    )


def _step_shares(draws: Draws, law: RowLaw) -> CheckResult:
    """How many take part in each step, in each prefix of the steps, and in all."""
    rates, rows = step_rates(draws, law), draws.sampler.num_examples * len(draws.independent)
    count = np.sum([draw.sizes for draw in draws.independent], axis=0)
    steps = np.ones(draws.steps, np.int64)
    pvalues = _cells_and_prefixes(count[None], np.array([rows]), rates, steps, law)
    expected, tests = rows * float(rates.sum()), 2 * draws.steps
    resolved = "" if law.once else f"{_resolution(expected, tests)} of the rate, "
    resolved += f"{_resolution(expected / draws.steps, tests)} of one step's"
    detail = f"{int(count.sum()):,} participations, {expected:,.1f} expected (resolved: {resolved})"
    return CheckResult.of(SHARES, pvalues, detail)


def _cells_and_prefixes(
    count: np.ndarray, rows: np.ndarray, rates: np.ndarray, trials: np.ndarray, law: RowLaw
) -> list[Any]:
    """Returns p-values of counts [groups of examples, groups of steps] and sums of first ones.

    Args:
      count: Participations.
      rows: Examples of each group, times draws.
      rates: Of each group of steps, the expected participations of an example.
      trials: How many they are, for examples that do not take part once.
      law: For examples that take part once, a group of steps, or a prefix, is one trial.
    """
    rows, trials = rows[:, None], np.ones_like(trials) if law.once else trials
    cells = count_pvalue(count, rows * trials, np.minimum(1.0, rates / trials))
    up_to = np.ones_like(trials) if law.once else np.cumsum(trials)
    share = np.minimum(1.0, np.cumsum(rates) / up_to)
    prefixes = count_pvalue(np.cumsum(count, axis=1), rows * up_to, share)
    return [cells, prefixes[:, : -1 if law.once else None]]  # once: all, in the end


def _chunk_shares(draws: Draws, law: RowLaw) -> CheckResult:
    """Chunk by step, and examples up to each one, which see what examples by themselves hide."""
    independent, chunks = draws.independent, draws.chunk_rows.size
    width = -(-chunks * draws.steps // _CELLS)
    starts = np.arange(0, draws.steps, width)
    trials = np.diff(starts, append=draws.steps)
    table = np.zeros((chunks, starts.size), np.int64)
    for draw in independent:
        cell = draws.chunks(draw.examples).astype(np.int64) * starts.size + draw.steps // width
        table += np.bincount(cell, minlength=table.size).reshape(table.shape)
    rates = np.add.reduceat(step_rates(draws, law), starts)
    rows = draws.chunk_rows * len(independent)
    expected = rows[:, None] * rates
    gained, freedom = scipy.special.rel_entr(table, expected).sum(axis=1), starts.size
    if law.independent and law.once:  # of every chunk, a multinomial over steps
        freedom -= 1
    elif law.independent:  # a binomial of every cell
        others = rows[:, None] * trials - table, rows[:, None] * (trials - rates)
        gained += scipy.special.rel_entr(*others).sum(axis=1)
    else:  # given a step's size, draws from the chunks without replacement
        share = rows[:, None] / rows.sum()
        gained = scipy.special.rel_entr(table, table.sum(axis=0) * share).sum(axis=0)
        freedom = chunks - 1
    pvalues = [smallest(_cells_and_prefixes(table, rows, rates, trials, law))]
    pvalues.append(smallest(entropy_pvalue(gained, freedom)))
    if law.independent:
        pvalues.append(float(entropy_pvalue(gained.sum(), freedom * gained.size)))
    if not law.once:
        pvalues += _positions(draws)
    resolved = _resolution(float(expected.max()), 4 * table.size)
    return CheckResult.of(
        "every chunk takes its share of every step",
        pvalues,
        f"chunks by steps: {chunks} x {starts.size} (resolved: {resolved} of a cell)",
    )


def _positions(draws: Draws) -> list[Any]:
    """Returns p-values of the examples up to each one, and of each chunk, given the sizes."""
    count, sampler = draws.of_examples(), draws.sampler
    by_chunk = np.sum([draw.by_chunk for draw in draws.independent], axis=0)
    if not count.any():
        return []
    rows = np.array([len(sampler.chunk_range(chunk)) for chunk in range(by_chunk.size)])
    up_to = np.arange(1, draws.rows + 1) / draws.rows
    return [
        count_pvalue(np.cumsum(count), count.sum(), up_to),
        count_pvalue(by_chunk, by_chunk.sum(), rows / sampler.num_examples),
    ]


def _example_shares(draws: Draws, law: RowLaw) -> CheckResult:
    """How often each example takes part, over independent steps; the borders of chunks apart."""
    count, trials = draws.of_examples(), len(draws.independent) * draws.steps
    rates = np.broadcast_to(law.rate(np.arange(draws.rows), 0), draws.rows)
    worst = count_pvalue(count, trials, rates)
    i = int(np.argmin(worst))
    detail = f"example {draws.numbers(i)}: {count[i]} of {trials:,} steps"
    return CheckResult.of(
        "all examples take part at the rate that was claimed",
        [worst, worst[draws.borders()]],
        f"{detail}, {rates[i] * trials:.4g} expected",
    )


def _favourite(draws: Draws, law: RowLaw) -> CheckResult:
    """The commonest entry over independent draws; also among first and last examples of chunks.

    Each entry has a binomial count. Of the first and last examples, halves of an epoch as well.
    """
    steps, borders = draws.steps, draws.borders()
    some, keys, _ = draws.merged
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    counts, examples = np.diff(first, append=keys.size), keys[first] // steps
    # Most entries have one of a few counts, at one of a few rates.
    rates, of_step = np.unique(step_rates(draws, law), return_inverse=True)
    kind = of_step[keys[first] - examples * steps] * (len(some) + 1) + counts
    kinds = np.unique(kind)
    tails = _more_than(kinds % (len(some) + 1) - 1, len(some), rates[kinds // (len(some) + 1)])
    at_border = np.isin(kinds, kind[np.isin(examples, borders)])
    pvalues = [
        smallest(tails, draws.rows * steps),
        smallest(tails[at_border], borders.size * steps),
    ]
    entry = keys[first][np.argmax(kind == kinds[np.argmin(tails)])] if kinds.size else 0
    if law.once:
        early = draws.of_examples(some, steps // 2)
        share = float(np.minimum(1.0, step_rates(draws, law)[: steps // 2].sum()))
        pvalues.append(smallest(count_pvalue(early[borders], len(some), share)))
    example, step = divmod(int(entry), steps)
    always = _more_than(np.arange(len(some)), len(some), rates[-1])
    caught = np.flatnonzero(len(pvalues) * draws.rows * steps * always <= FALSE_ALARM)
    resolved = f"{caught[0] + 1} are found out" if caught.size else "too few to be sure of any"
    return CheckResult.of(
        "no example returns to a step more often than claimed",
        pvalues,
        f"example {draws.numbers(example)} in step {step}: "
        f"{counts.max(initial=0)} of {len(some)} epochs; {resolved}",
    )


def _sizes(draws: Draws, law: RowLaw) -> CheckResult:
    """How many batches are small and large, which sees fixed sizes as well as lumpy ones.

    Sizes are binomial, and independent or (of an epoch's bins) negatively associated; so are the
    events that they are at most, or at least, a given number.
    """
    n, rate = draws.sampler.num_examples, float(np.max(step_rates(draws, law)))
    sizes = np.concatenate([draw.sizes for draw in draws.independent])
    mean, deviation = n * rate, math.sqrt(n * rate * (1 - rate))
    near = np.arange(max(0, int(mean - 9 * deviation)), min(n, int(mean + 9 * deviation) + 9) + 1)
    below, above = scipy.special.bdtr(near, n, rate), _more_than(near, n, rate)
    low, high = (
        [int(np.argmax(met)) for met in of]
        for of in ([below >= q for q in _QUANTILES], [above <= q for q in _QUANTILES])
    )
    seen = [np.sum(sizes <= near[k]) for k in low] + [np.sum(sizes > near[k]) for k in high]
    chance = np.concatenate([below[low], above[high]])
    spread = np.std(sizes) / max(deviation, 1e-150)
    return CheckResult.of(
        "batch sizes vary as they should",
        count_pvalue(np.array(seen), sizes.size, chance),
        f"{spread:.4g} times the standard deviation of the law" if deviation else "all alike",
    )


def _unit_shares(draws: Draws, law: RowLaw) -> CheckResult:
    """How often units and their examples are drawn.

    One random example of each outermost unit; each unit, no more often than it is drawn; and where
    the examples of a drawn unit decide for themselves, how many do, in the units that are seen.
    """
    rate_of = law.rate(np.arange(draws.rows), 0)
    count, trials, expected = 0, 0, 0.0
    seen = [np.zeros(rates.size, np.int64) for rates in law.unit_rates]
    for draw, (units, _) in zip(draws.all, draws.held, strict=True):
        some = draws.choice.apart()
        count += int(np.isin(some, draw.examples).sum())
        trials += some.size
        expected += float(np.sum(rate_of[some]))
        for level, of_level in enumerate(seen):
            of_level[np.unique(draws.choice.above(level, units))] += 1
    pvalues: list[Any] = [count_pvalue(count, trials, expected / trials)]
    for of_level, rates in zip(seen, law.unit_rates, strict=True):
        often = of_level > rates * len(draws.all)
        pvalues.append(np.where(often, count_pvalue(of_level, len(draws.all), rates), 1.0))
    detail = f"{count} of {trials:,} chosen at random, {expected:.5g} expected"
    if law.leaf_probability is not None:
        units, entries = (np.concatenate(part) for part in zip(*draws.held, strict=True))
        sizes, total = draws.choice.sizes[units], int(entries.sum())
        pvalues.append(_positive_binomials(total, sizes, law.leaf_probability))
        detail += (
            f"; {total / sizes.sum():.5g} of the units that are seen "
            f"(resolved: {_resolution(total, 8)})"
        )
    return CheckResult.of(SHARES, pvalues, detail)


def _positive_binomials(total: int, sizes: np.ndarray, rate: float) -> float:
    """Returns Chernoff's bound on a sum of independent binomials, each given that it is not 0."""
    if rate == 1:
        return float(total == sizes.sum())
    size, count = np.unique(sizes, return_counts=True)

    def logs(theta: float) -> float:
        """Returns log E[e^(theta Y); Y > 0], less what is the same for all theta."""
        a = size * math.log1p(rate / (1 - rate) * math.exp(theta))
        return float(np.sum(count * (a + np.log(-np.expm1(-a)))))

    def exponent(theta: float) -> float:
        return logs(theta) - logs(0.0) - theta * total

    found = scipy.optimize.minimize_scalar(exponent, bounds=(-5, 5), method="bounded")
    return min(1.0, 2 * math.exp(min(0.0, found.fun)))


def _ranks(draws: Draws, law: RowLaw) -> CheckResult:
    """Which examples of their units take part, given how many do: the first, ..., the last."""
    entries = np.concatenate([draw.examples for draw in draws.independent])
    of, at = draws.choice.sizes[draws.choice.of(-1, entries)], draws.choice.rank[entries]
    size, count = np.unique(of, return_counts=True)
    ranks = np.unique(np.linspace(0, size.max() - 1, min(size.max(), _RANKS)).astype(int))
    found = np.bincount(at, minlength=size.max())
    first = np.minimum(ranks[:, None] + 1, size) / size @ count
    alone = (ranks[:, None] < size) / size @ count
    pvalues = [
        count_pvalue(np.cumsum(found)[ranks], of.size, first / of.size),
        count_pvalue(found[ranks], of.size, alone / of.size),
        count_pvalue(np.sum(at == of - 1), of.size, np.sum(count / size) / of.size),
    ]
    return CheckResult.of(
        "examples of a unit take part alike",
        pvalues,
        f"{of.size:,} participations by their rank among up to {size.max()}",
    )
