"""How often steps, chunks, examples and units take part, against the law that was claimed.

Why the counts obey `count_pvalue`: docs/explanation/tests-of-sampled-batches.md.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import optimize, special, stats

from dpsgd.audit.report import FALSE_ALARM, CheckResult, count_pvalue, entropy_pvalue, smallest
from dpsgd.audit.samplers.draws import Draws
from samplers import RowLaw

_CELLS = 2**20  # of a table, at most: beyond, consecutive steps are looked at together
_RANKS = 4096
_QUANTILES = (1 / 50, 1 / 6, 1 / 2)


def share_checks(draws: Draws, law: RowLaw) -> list[CheckResult]:
    """Returns the checks of a law that leaves something to chance."""
    checks = []
    if law.units is None:
        if not law.once:
            checks.append(_participation(draws, law))
        if law.batch_sizes is None:
            checks.append(_step_shares(draws, law))
        checks.append(_chunk_shares(draws, law))
    else:
        checks += [_unit_shares(draws, law), _ranks(draws, law)]
    if not law.once:
        checks.append(_example_shares(draws, law))
    if draws.steps > 1:
        checks.append(_favourite(draws, law))
    if law.independent:
        checks.append(_sizes(draws, law))
    return checks


def step_rates(draws: Draws, law: RowLaw) -> np.ndarray:
    """Returns the probability of each step for any example, where there are no units."""
    return np.broadcast_to(law.rate(np.zeros(1, int), np.arange(draws.steps)), draws.steps)


def _resolution(expected: float, tests: int) -> str:
    """Returns how large a relative error `count_pvalue` finds out, with even odds at least."""
    error = math.sqrt(2 * math.log(2 * tests / FALSE_ALARM) / max(expected, 1e-9))
    return f"{100 * error:.2g} %" if error < 1 else "none"


def _participation(draws: Draws, law: RowLaw) -> CheckResult:
    """How often an example takes part in an epoch, over all examples: binomial."""
    rates = step_rates(draws, law)
    trials = draws.rows * len(draws.independent)
    seen = np.zeros(4, np.int64)
    for draw in draws.independent:
        count = np.bincount(draw.examples, minlength=draws.rows)
        seen += [np.count_nonzero(count >= k) for k in range(4)]
    chances = stats.binom.sf(np.arange(3), draws.steps, np.mean(rates))
    some = chances > 0

    def listed(counts: np.ndarray) -> str:
        return " / ".join(f"{count:,.0f}" for count in counts)

    return CheckResult.of(
        "how often an example takes part is binomial",
        smallest(count_pvalue(seen[1:][some], trials, chances[some])),
        f"of {trials:,}, {listed(seen[1:])} take part 1, 2 and 3 times an epoch at least, "
        f"{listed(trials * chances)} expected",
    )


def _step_shares(draws: Draws, law: RowLaw) -> CheckResult:
    """How many take part in each step, in each prefix of the steps, and in all."""
    rates, rows = step_rates(draws, law), draws.sampler.num_examples * len(draws.independent)
    count = np.sum([draw.sizes for draw in draws.independent], axis=0)
    trials = np.ones(draws.steps, np.int64)
    pvalue = _cells_and_prefixes(count[None], np.array([rows]), rates, trials, law)
    expected = rows * float(rates.sum())
    found = f"{int(count.sum()):,} participations, {expected:,.1f} expected (resolved: "
    if not law.once:
        found += f"{_resolution(expected, 2 * draws.steps)} of the rate, "
    found += f"{_resolution(expected / draws.steps, 2 * draws.steps)} of one step's)"
    return CheckResult.of("all steps take their share of the examples", pvalue, found)


def _cells_and_prefixes(
    count: np.ndarray, rows: np.ndarray, rates: np.ndarray, trials: np.ndarray, law: RowLaw
) -> float:
    """Returns the p-value of counts [groups of examples, groups of steps] and sums of first ones.

    Args:
      count: Participations.
      rows: Examples of each group, times draws.
      rates: Of each group of steps, the expected participations of an example.
      trials: How many they are, for examples that do not take part once.
      law: For examples that take part once, a group of steps, or a prefix, is one trial.
    """
    rows, share = rows[:, None], np.cumsum(rates)
    some = np.ones_like(trials) if law.once else trials
    up_to = np.ones_like(trials) if law.once else np.cumsum(trials)
    cells = count_pvalue(count, rows * some, np.minimum(1.0, rates / some))
    count = np.cumsum(count, axis=1)[:, : -1 if law.once else None]  # all, in the end
    up_to = up_to[: count.shape[1]]
    share = np.minimum(1.0, share[: count.shape[1]] / up_to)
    prefixes = count_pvalue(count, rows * up_to, share)
    return smallest([smallest(cells), smallest(prefixes)])


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
    pvalues = [_cells_and_prefixes(table, rows, rates, trials, law)]
    expected = rows[:, None] * rates
    if law.independent and law.once:  # of every chunk, a multinomial over steps
        gained = np.sum(special.rel_entr(table, expected), axis=1)
        freedom = np.full(chunks, starts.size - 1)
    elif law.independent:  # a binomial of every cell
        others = rows[:, None] * trials - table, rows[:, None] * (trials - rates)
        gained = np.sum(special.rel_entr(table, expected) + special.rel_entr(*others), axis=1)
        freedom = np.full(chunks, starts.size)
    else:  # given a step's size, draws from the chunks without replacement
        share = rows[:, None] / rows.sum()
        gained = np.sum(special.rel_entr(table, table.sum(axis=0) * share), axis=0)
        freedom = np.full(starts.size, chunks - 1)
    pvalues.append(smallest(entropy_pvalue(gained, freedom)))
    if law.independent:
        pvalues.append(float(entropy_pvalue(gained.sum(), freedom.sum())))
    if not law.once:
        pvalues += _positions(draws)
    resolved = _resolution(float(expected.max()), 4 * table.size)
    return CheckResult.of(
        "every chunk takes its share of every step",
        smallest(pvalues),
        f"chunks by steps: {chunks} x {starts.size} (resolved: {resolved} of a cell)",
    )


def _positions(draws: Draws) -> list[float]:
    """Returns p-values of the examples up to each one, and of each chunk, given the sizes."""
    count = np.zeros(draws.rows, np.int64)
    for draw in draws.independent:
        count += np.bincount(draw.examples, minlength=draws.rows)
    by_chunk = np.sum([draw.by_chunk for draw in draws.independent], axis=0)
    if not count.any():
        return []
    sampler = draws.sampler
    rows = np.array([len(sampler.chunk_range(chunk)) for chunk in range(by_chunk.size)])
    up_to = np.arange(1, draws.rows + 1) / draws.rows
    return [
        smallest(count_pvalue(np.cumsum(count), count.sum(), up_to)),
        smallest(count_pvalue(by_chunk, by_chunk.sum(), rows / sampler.num_examples)),
    ]


def _example_shares(draws: Draws, law: RowLaw) -> CheckResult:
    """How often each example takes part, over independent steps; the borders of chunks apart."""
    count = np.zeros(draws.rows, np.int64)
    for draw in draws.independent:
        count += np.bincount(draw.examples, minlength=draws.rows)
    trials = len(draws.independent) * draws.steps
    rates = np.broadcast_to(law.rate(np.arange(draws.rows), 0), draws.rows)
    worst = count_pvalue(count, trials, rates)
    i = int(np.argmin(worst))
    detail = (
        f"example {draws.numbers(i)}: {count[i]} of {trials:,} steps, "
        f"{rates[i] * trials:.4g} expected"
    )
    pvalue = smallest([smallest(worst), smallest(worst[draws.borders()])])
    return CheckResult.of("all examples take part at the rate that was claimed", pvalue, detail)


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
    tails = stats.binom.sf(kinds % (len(some) + 1) - 1, len(some), rates[kinds // (len(some) + 1)])
    at_border = np.isin(kinds, kind[np.isin(examples, borders)])
    pvalues = [smallest(tails, draws.rows * steps),
               smallest(tails[at_border], borders.size * steps)]  # fmt: skip
    entry = keys[first][np.argmax(kind == kinds[np.argmin(tails)])] if kinds.size else 0
    if law.once:
        early = np.zeros(draws.rows, np.int64)
        for draw in some:
            early += np.bincount(draw.examples[draw.steps < steps // 2], minlength=draws.rows)
        share = float(np.minimum(1.0, step_rates(draws, law)[: steps // 2].sum()))
        pvalues.append(smallest(count_pvalue(early[borders], len(some), share)))
    example, step = divmod(int(entry), steps)
    always = stats.binom.sf(np.arange(len(some)), len(some), rates[-1])
    caught = np.flatnonzero(len(pvalues) * draws.rows * steps * always <= FALSE_ALARM)
    resolved = f"{caught[0] + 1} are found out" if caught.size else "too few to be sure of any"
    return CheckResult.of(
        "no example returns to a step more often than claimed",
        smallest(pvalues),
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
    low = stats.binom.ppf(_QUANTILES, n, rate)
    high = stats.binom.isf(_QUANTILES, n, rate)
    seen = np.array([*(np.sum(sizes <= a) for a in low), *(np.sum(sizes > b) for b in high)])
    chance = np.concatenate([stats.binom.cdf(low, n, rate), stats.binom.sf(high, n, rate)])
    pvalue = smallest(count_pvalue(seen, sizes.size, chance))
    spread = math.sqrt(max(n * rate * (1 - rate), 1e-300))
    detail = f"{np.std(sizes - n * rate) / spread:.4g} times the standard deviation of the law"
    return CheckResult.of(
        "batch sizes vary as they should", pvalue, detail if rate < 1 else "all alike"
    )


def _unit_shares(draws: Draws, law: RowLaw) -> CheckResult:
    """How often units and their examples are drawn.

    One random example of each outermost unit; each unit, no more often than it is drawn; and where
    the examples of a drawn unit decide for themselves, how many do, in the units that are seen.
    """
    rate_of = law.rate(np.arange(draws.rows), 0)
    count, trials, expected = 0, 0, 0.0
    seen = [np.zeros(rates.size, np.int64) for rates in law.unit_rates]
    takes_part = np.zeros(draws.rows, bool)
    for draw, (units, _) in zip(draws.all, draws.held, strict=True):
        takes_part[draw.examples] = True
        some = draws.choice.apart()
        count += int(np.count_nonzero(takes_part[some]))
        trials += some.size
        expected += float(np.sum(rate_of[some]))
        takes_part[draw.examples] = False
        for level, of_level in enumerate(seen):
            of_level[np.unique(draws.choice.above(level, units))] += 1
    pvalues = [float(count_pvalue(count, trials, expected / trials))]
    for of_level, rates in zip(seen, law.unit_rates, strict=True):
        tails = count_pvalue(of_level, len(draws.all), rates)
        often = of_level > rates * len(draws.all)
        pvalues.append(smallest(np.where(often, tails, 1.0)))
    units, entries = (np.concatenate(part) for part in zip(*draws.held, strict=True))
    sizes = draws.choice.sizes[units]
    detail = f"{count} of {trials:,} chosen at random, {expected:.5g} expected"
    if law.leaf_probability is not None:
        rate = law.leaf_probability
        pvalues.append(_positive_binomials(int(entries.sum()), sizes, rate))
        detail += (
            f"; {entries.sum() / sizes.sum():.5g} of the units that are seen "
            f"(resolved: {_resolution(float(entries.sum()), 8)})"
        )
    return CheckResult.of("all steps take their share of the examples", smallest(pvalues), detail)


def _positive_binomials(total: int, sizes: np.ndarray, rate: float) -> float:
    """Returns Chernoff's bound on a sum of independent binomials, each given that it is not 0."""
    if rate == 1:
        return float(total == sizes.sum())
    size, count = np.unique(sizes, return_counts=True)
    least = -size * math.log1p(-rate)
    none = np.sum(count * (least + np.log(-np.expm1(-least))))

    def exponent(theta: float) -> float:
        # E[e^(theta Y) | Y > 0] is (e^a - 1) / (e^(a at theta = 0) - 1), a as here
        a = size * math.log1p(rate / (1 - rate) * math.exp(theta))
        return float(np.sum(count * (a + np.log(-np.expm1(-a)))) - none - theta * total)

    found = optimize.minimize_scalar(exponent, bounds=(-5, 5), method="bounded")
    return min(1.0, 2 * math.exp(min(0.0, found.fun)))


def _ranks(draws: Draws, law: RowLaw) -> CheckResult:
    """Which examples of their units take part, given how many do: the first, ..., the last."""
    sizes, rank = draws.choice.sizes, draws.choice.rank
    entries = np.concatenate([draw.examples for draw in draws.independent])
    of = sizes[draws.choice.of(-1, draws.choice.all)][entries]
    at = rank[entries]
    size, count = np.unique(of, return_counts=True)
    ranks = np.unique(np.linspace(0, size.max() - 1, min(size.max(), _RANKS)).astype(int))
    found = np.bincount(at, minlength=size.max())
    first = np.minimum(ranks[:, None] + 1, size) / size @ count
    alone = (ranks[:, None] < size) / size @ count
    pvalues = [
        smallest(count_pvalue(np.cumsum(found)[ranks], of.size, first / of.size)),
        smallest(count_pvalue(found[ranks], of.size, alone / of.size)),
        float(count_pvalue(np.sum(at == of - 1), of.size, np.sum(count / size) / of.size)),
    ]
    return CheckResult.of(
        "examples of a unit take part alike",
        smallest(pvalues),
        f"{of.size:,} participations by their rank among up to {size.max()}",
    )
