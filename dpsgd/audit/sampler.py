"""Law checks of a sampler: its draws must be those that its own price is about.

The claim is read from the price, `sampler.privacy(sigma)`, and the draws from the sampler, so that
a price that belongs to another sampler is found out. Under the null hypothesis every statistic but
one is a sum of independent trials with a known probability, so its test is an exact binomial one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import stats

from accounting import (
    BallsAndBinsProfile,
    GaussianProfile,
    PoissonProfile,
    PrivacyProfile,
    ShuffleProfile,
    TruncatedProfile,
)
from samplers import BatchSampler, BatchSource

FALSE_ALARM = 1e-8
"""Probability, at most, that one check of randomness fails where nothing is wrong."""

_DRAWS = 2**15  # rows wanted, over all draws
_MOST_SEEDS = 512
_UNKNOWN = "not checked: this audit does not know the law that such a price is for"
_LARGEST_PLAN = 4_000_000  # examples of which a whole epoch is drawn for the comparison


class Check(NamedTuple):
    """One thing to look at."""

    name: str
    passed: bool
    detail: str
    made: bool = True
    """False where it was left out, as `detail` says; it then counts as passed."""


class RowLaw(NamedTuple):
    """What a price says about when one example takes part."""

    most_steps: int | None
    """Steps of the whole run; None where the price holds for any number of them."""
    most_participations: int | None
    """In the whole run; None where they are random."""
    step_probability: float | None
    """Of each step; None where the price holds whatever the steps."""
    once: bool
    """Whether the steps of an epoch exclude one another."""
    redrawn: bool
    """Whether epochs are independent."""


def claimed_law(profile: PrivacyProfile) -> RowLaw | None:
    """Returns the law of a row for which `profile`, at noise multiplier 1, is the price.

    None if the profile is of a kind that this audit does not know.
    """
    match profile:
        case TruncatedProfile():
            return claimed_law(profile.profile)
        case PoissonProfile():
            return RowLaw(profile.steps, None, profile.sampling_prob, once=False, redrawn=True)
        case BallsAndBinsProfile():
            redrawn = profile.assignment == "redrawn"
            return RowLaw(None, profile.epochs, 1 / profile.bins, once=True, redrawn=redrawn)
        case ShuffleProfile():  # its upper end is that of any order
            return RowLaw(None, profile.epochs, None, once=True, redrawn=False)
        case GaussianProfile():  # k releases of one coordinate: noise multiplier 1 / sqrt(k)
            releases = round(profile.noise_multiplier**-2)
            return RowLaw(None, releases, None, once=True, redrawn=False)
    return None


def sampler_checks(sampler: BatchSampler, claimed: BatchSampler, *, seed: int) -> list[Check]:
    """Checks the draws of `sampler` against the law that the price of `claimed` assumes.

    Args:
      sampler: Who draws, at its own n, b and E; the first chunk of examples is looked at.
      claimed: Whose price is claimed; the same object, unless a claim about another is tested.
      seed: Of the draws; must not be the run's.
    """
    checks = [_columns_are_rows(sampler, seed)]
    law = claimed_law(claimed.privacy(1.0))
    if law is None:
        return [
            *checks,
            Check("the draws have the law that was priced", True, _UNKNOWN, made=False),
        ]
    draws = _Draws(sampler, seed)
    if law.most_steps is not None:
        checks.append(
            Check(
                "the run has no more steps than priced",
                sampler.num_steps <= law.most_steps,
                f"{sampler.num_steps} steps, {law.most_steps} priced",
            )
        )
    if law.most_participations is not None:
        checks.append(_bounded_participation(draws, law.most_participations))
    if law.step_probability is None:
        return checks
    return checks + _random_rows(draws, law, law.step_probability)


class _Draws:
    """Rows of the first chunk, drawn under several seeds, of the first two epochs (or the one)."""

    def __init__(self, sampler: BatchSampler, seed: int):
        self.rows = len(sampler.chunk_range(0))
        self.steps = sampler.steps_per_epoch
        self.run_epochs = sampler.epochs
        self.epochs = min(2, sampler.epochs)
        self.seeds = 2 * min(math.ceil(_DRAWS / self.rows / 2), _MOST_SEEDS // 2)
        self.keys = [[self._keys(sampler, seed + k, e) for e in range(self.epochs)]
                     for k in range(self.seeds)]  # fmt: skip

    def _keys(self, sampler: BatchSampler, seed: int, epoch: int) -> np.ndarray:
        """Returns the nonzero entries (i, t) of one epoch as ascending numbers i T + t."""
        examples, steps = sampler.participations(seed, epoch, 0)
        return np.sort(examples.astype(np.int64) * self.steps + steps)


def _columns_are_rows(sampler: BatchSampler, seed: int) -> Check:
    """Compares the batches that training reads with the rows that the price is about."""
    name = "the batches are the rows that were priced"
    if sampler.num_examples > _LARGEST_PLAN:
        detail = f"not drawn for more than {_LARGEST_PLAN:,} examples"
        return Check(name, True, detail, made=False)
    same = True
    source = BatchSource(sampler, seed)
    length, epochs = sampler.steps_per_epoch, min(2, sampler.epochs)
    for epoch in range(epochs):
        plan = sampler.plan(seed, epoch)
        steps = np.repeat(np.arange(length), np.diff(plan.starts))
        mine = plan.examples < len(sampler.chunk_range(0))
        rows = sampler.participations(seed, epoch, 0)
        same &= _same_entries((plan.examples[mine], steps[mine]), rows)
        for t in range(min(4, length)):
            passes = source.passes(epoch * length + t)
            read = np.concatenate([batch.indices[batch.weights > 0] for batch in passes])
            members = plan.members(t)
            whole = sampler.accumulates or members.size <= sampler.padded_batch_size
            same &= np.unique(read).size == read.size and bool(np.isin(read, members).all())
            same &= not whole or read.size == members.size
    return Check(name, bool(same), f"epochs compared: {epochs}" if same else "they differ")


def _same_entries(a, b) -> bool:
    pairs = [np.stack([examples.astype(np.int64), steps.astype(np.int64)]) for examples, steps in
             (a, b)]  # fmt: skip
    ordered = [pair[:, np.lexsort(pair)] for pair in pairs]
    return ordered[0].shape == ordered[1].shape and bool((ordered[0] == ordered[1]).all())


def _bounded_participation(draws: _Draws, most: int) -> Check:
    """An example takes part no more often than was paid for; epochs are read as alike."""
    seen = max(
        int(np.bincount(keys // draws.steps, minlength=1).max(initial=0))
        for of_seed in draws.keys
        for keys in of_seed
    )
    passed = seen * draws.run_epochs <= most
    return Check(
        "nobody takes part more often than priced",
        passed,
        f"{seen} times an epoch, {draws.run_epochs} epochs; {most} times priced",
    )


def _random_rows(draws: _Draws, law: RowLaw, q: float) -> list[Check]:
    steps, rows = draws.steps, draws.rows
    drawn = draws.keys if law.redrawn else [of_seed[:1] for of_seed in draws.keys]
    flat = [keys for of_seed in drawn for keys in of_seed]
    checks = []

    # How often: every example in an epoch, and every step over all examples.
    counts = np.concatenate([np.bincount(keys // steps, minlength=rows) for keys in flat])
    if law.once:
        wrong = int(np.sum(counts != 1))
        checks.append(
            Check(
                "everybody takes part once an epoch",
                wrong == 0,
                f"{wrong} of {counts.size:,} rows do not",
            )
        )
    else:
        pvalue = min(
            _binomial_pvalue(
                int(np.sum(counts == k)), counts.size, float(stats.binom.pmf(k, steps, q))
            )
            for k in (0, 1, 2)
        )
        checks.append(
            _tested(
                "how often an example takes part is binomial",
                3 * pvalue,
                f"{np.bincount(counts, minlength=3)[:3].tolist()} of {counts.size:,} rows take "
                "part 0, 1, 2 times in an epoch",
            )
        )
    per_step = sum(np.bincount(keys % steps, minlength=steps) for keys in flat)
    pvalue = steps * float(np.min(_binomial_pvalue(per_step, len(flat) * rows, q)))
    checks.append(_tested("all steps are equally likely", pvalue))

    # Coincidences: a pair of independent rows shares each step with probability q^2, or, where
    # steps exclude one another, any step with probability 1 / T.
    trials, chance = (1, q) if law.once else (steps, q * q)

    def independent(name: str, together: int, pairs: int) -> Check:
        pvalue = _binomial_pvalue(together, pairs * trials, chance)
        expected = pairs * trials * chance
        return _tested(name, float(pvalue), f"{together} coincidences, {expected:.4g} expected")

    half = draws.seeds // 2
    common = sum(_common(drawn[2 * k][0], drawn[2 * k + 1][0]) for k in range(half))
    checks.append(independent("draws of different seeds are independent", common, half * rows))
    if rows > 1:
        common = sum(_shared_by_neighbours(keys, steps, rows) for keys in flat)
        pairs = len(flat) * (rows // 2)
        checks.append(independent("examples are independent of one another", common, pairs))
    if draws.epochs > 1:
        common = sum(_common(*of_seed) for of_seed in draws.keys)
        if law.redrawn:
            name = "epochs are independent, as priced"
            checks.append(independent(name, common, draws.seeds * rows))
        else:
            entries = sum(of_seed[0].size for of_seed in draws.keys)
            checks.append(
                Check(
                    "epochs are alike, as priced",
                    common == entries,
                    f"{common} of {entries} entries are kept in the next epoch",
                )
            )
    checks.append(_size_check(flat, steps, rows, q, once=law.once))
    return checks


def _size_check(flat: list[np.ndarray], steps: int, rows: int, q: float, *, once: bool) -> Check:
    """Pearson's statistic of the batch sizes, which sees fixed sizes as well as lumpy ones.

    Its mean and variance are exact (for independent binomial sizes, or a multinomial), its law is
    taken to be the scaled chi-square of that mean and variance.
    """
    name = "batch sizes vary as they should"
    if q == 1.0:
        return Check(name, True, "every batch is the whole data set")
    sizes = np.stack([np.bincount(keys % steps, minlength=steps) for keys in flat])
    if once:
        statistic = np.sum((sizes - rows * q) ** 2) / (rows * q)
        mean, variance = steps - 1, 2 * (steps - 1) * (1 - 1 / rows)
    else:
        spread = rows * q * (1 - q)
        statistic = np.sum((sizes - rows * q) ** 2) / spread
        mean, variance = steps, steps * (2 + (1 - 6 * q * (1 - q)) / spread)
    mean, variance = mean * len(flat), variance * len(flat)
    if variance == 0:
        return Check(name, True, "there is one step, or one example")
    scale, freedom = variance / (2 * mean), 2 * mean**2 / variance
    below = float(stats.chi2.cdf(statistic / scale, freedom))
    above = float(stats.chi2.sf(statistic / scale, freedom))
    detail = f"{statistic / mean:.4g} times the variance of the law that was priced"
    return _tested(name, 2 * min(below, above), detail)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    return np.intersect1d(a, b, assume_unique=True).size


def _shared_by_neighbours(keys: np.ndarray, steps: int, rows: int) -> int:
    """Returns how many steps examples 2k and 2k + 1 share, over all k."""
    examples = keys // steps
    keys = keys[examples < rows // 2 * 2]
    examples = keys // steps
    shared = examples // 2 * steps + keys % steps
    return shared.size - np.unique(shared).size


def _binomial_pvalue(successes, trials, probability):
    """Returns the exact two-sided p-value(s) of a number of successes."""
    below = stats.binom.cdf(successes, trials, probability)
    above = stats.binom.sf(np.asarray(successes) - 1, trials, probability)
    return np.minimum(1.0, 2 * np.minimum(below, above))


def _tested(name: str, pvalue: float, detail: str = "") -> Check:
    told = f"p = {min(1.0, pvalue):.2g}"
    return Check(name, bool(pvalue > FALSE_ALARM), f"{detail}; {told}" if detail else told)
