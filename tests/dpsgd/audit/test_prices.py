"""Stated costs are held against that of one example whose fellows' gradients are 0."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from accounting import BallsAndBinsProfile, PoissonProfile
from dpsgd.audit.prices import GROWTH, cost_checks, price_check
from dpsgd.core.noise import Independent
from samplers import (
    BallsAndBins,
    Deterministic,
    EpochSampler,
    Poisson,
    Shuffle,
    UnitsThenPoisson,
    UnitTree,
    UserPoisson,
)
from samplers.row_law import IndependentRows

SIZES = 640, 32, 4
RATE, STEPS = 0.05, 20
SEGMENT = range(6, 12)  # the middle of the first epoch


def kept(cap):
    """Probability that a drawn example survives a cut, by the sizes of all other batches."""
    others = np.arange(640)
    return np.minimum(1.0, cap / (1 + others)) @ stats.binom.pmf(others, 639, RATE)


@dataclass(frozen=True)
class Trimmed(EpochSampler):
    """A sampler that cuts its Poisson batches to half of their mean, by `passes` of its own."""

    padded_batch_size = 16

    def passes(self, members, seed, step, shard=0):
        return [np.sort(np.random.default_rng([seed % 2**128, step]).permutation(members)[:16])]

    def privacy(self, noise_multiplier):
        return PoissonProfile(noise_multiplier, RATE * kept(16), self.num_steps)

    def row_law(self):
        return Poisson(*SIZES).row_law()

    def participations(self, seed, epoch, chunk):
        return Poisson(*SIZES).participations(seed, epoch, chunk)


BUSIEST = {
    "poisson": (Poisson(*SIZES, overflow="accumulate"), RATE, 6),
    "cut to a cap": (Poisson(*SIZES, max_batch_size=32), RATE * kept(32), 6),
    "rarely cut": (Poisson(*SIZES, max_batch_size=44), RATE * kept(44), 6),
    "cut by itself": (Trimmed(*SIZES), RATE * kept(16), 6),
    "cycles": (Poisson(*SIZES, cycle_length=4, overflow="accumulate"), 4 * RATE, 2),
    "bins": (BallsAndBins(*SIZES, overflow="accumulate"), RATE, 1),
}
"""Sampler, and the rate and number of steps of the busiest example of the segment."""


@pytest.mark.parametrize(("sampler", "rate", "steps"), BUSIEST.values(), ids=BUSIEST)
def test_a_segment_may_cost_what_its_busiest_example_does(sampler, rate, steps):
    for noise, passed in ((1.0, True), (2.0, False)):

        def privacy_of(self, sigma, attempts, noise=noise, **how):
            if [*attempts] == [SEGMENT]:
                return PoissonProfile(noise, rate, steps)
            return type(sampler).privacy_of(self, sigma, attempts, **how)

        kind = dataclass(frozen=True)(type("Own", (type(sampler),), {"privacy_of": privacy_of}))
        checks = cost_checks(kind(**vars(sampler)), 1.0, delta=1e-3)
        assert all(check.passed for check in checks) == passed, checks


def with_costs(kind, **methods):
    """A subclass with other costs."""
    return dataclass(frozen=True)(type("Own", (kind,), methods))


def of_one_epoch(kind):
    """A sampler that states the cost of its first epoch, whatever is released."""

    def privacy(self, sigma):
        return kind.privacy(self.with_epochs(1), sigma)

    def privacy_of(self, sigma, attempts, **how):
        return kind.privacy(self.with_epochs(1), sigma)

    return with_costs(kind, privacy=privacy, privacy_of=privacy_of)


def of_one_attempt(kind):
    """A sampler that states the cost of one run, whatever is released."""
    return with_costs(kind, privacy_of=lambda self, sigma, attempts, **how: self.privacy(sigma))


def quiet_run(kind):
    """A part that states the cost of a complete run at more noise."""

    def privacy(self, *sigma):
        return kind.privacy(self, *sigma[:-1], 9 * sigma[-1])

    return with_costs(kind, privacy=privacy)


def quiet_on_the_same_rows(kind, quiet=True):
    """A part that states the cost of several attempts on the same rows at more noise."""

    def privacy_of(self, *more, same_rows=False):
        *sampler, sigma, attempts = more
        sigma *= 9 if len(attempts) > 1 and same_rows == quiet else 1
        return kind.privacy_of(self, *sampler, sigma, attempts, same_rows=same_rows)

    return with_costs(kind, privacy_of=privacy_of)


def quiet_on_other_rows(kind):
    """A part that states the cost of several attempts on other rows at more noise."""
    return quiet_on_the_same_rows(kind, quiet=False)


TWO_EPOCHS, EIGHT_STEPS = (640, 32, 2), (256, 32, 2)
SOUND = {
    "poisson": Poisson(*EIGHT_STEPS, overflow="accumulate"),
    "bins": BallsAndBins(*EIGHT_STEPS, overflow="accumulate"),
    "one assignment": BallsAndBins(*EIGHT_STEPS, assignment="fixed", overflow="accumulate"),
    "shuffled": Shuffle(*EIGHT_STEPS),
    "in order": Deterministic(*EIGHT_STEPS),
}


@pytest.mark.parametrize("sound", SOUND.values(), ids=SOUND)
def test_a_sampler_that_states_less_than_its_cost_is_refused(sound):
    assert all(check.passed for check in cost_checks(sound, 1.0, delta=1e-3))
    for change in (of_one_epoch, of_one_attempt, quiet_run, quiet_on_the_same_rows):
        own = change(type(sound))(**sound.terms())
        assert not all(check.passed for check in cost_checks(own, 1.0, delta=1e-3)), change


def priced(sampler, profile):
    """A sampler with the law of `sampler` that states the cost `profile(sigma)`."""
    return with_costs(
        type(sampler),
        privacy=lambda self, sigma: profile(sigma),
        privacy_of=lambda self, sigma, attempts, **how: profile(sigma / math.sqrt(len(attempts))),
    )(**sampler.terms())


class BusyRow(IndependentRows):
    """Row 1 is in every batch."""

    def rate(self, examples, steps):
        return np.where((examples == 1) & (steps >= 0), 1.0, self.probability)


USERS = UserPoisson(160, 8, 1, max_contributions=2)
CHEAP = {
    "one step of many bins": priced(
        BallsAndBins(5000, 1, 2, overflow="accumulate"),
        lambda sigma: PoissonProfile(sigma, 1 / 5000, 2),
    ),
    "rows in place of users": priced(USERS, Poisson(160, 8, 1).privacy),
    "rows in place of users, where cuts are priced": with_costs(
        UserPoisson, with_cuts=lambda self, of: PoissonProfile(of.noise_multiplier, RATE, of.steps)
    )(**USERS.terms()),
    "all other rows": with_costs(
        Poisson, row_law=lambda self: BusyRow(**vars(Poisson.row_law(self)))
    )(*SIZES, overflow="accumulate"),
    "a part of a run, but two runs": with_costs(
        Poisson,
        privacy=lambda self, sigma: PoissonProfile(sigma, RATE, 10),
        privacy_of=lambda self, sigma, attempts, **how: PoissonProfile(
            sigma, RATE, 10 if len(attempts) == 1 else 80
        ),
    )(*TWO_EPOCHS, overflow="accumulate"),
    "two runs for less than one, without a law": with_costs(
        Poisson,
        row_law=EpochSampler.row_law,
        privacy_of=lambda self, sigma, attempts, **how: PoissonProfile(
            sigma, RATE, 40 // len(attempts)
        ),
    )(*TWO_EPOCHS, overflow="accumulate"),
    "bins in place of a fixed order": priced(
        Shuffle(*TWO_EPOCHS, order="fixed"),
        lambda sigma: BallsAndBinsProfile(sigma / math.sqrt(2), STEPS),
    ),
}


@pytest.mark.parametrize("sampler", CHEAP.values(), ids=CHEAP)
def test_the_price_of_another_sampler_is_refused(sampler):
    checks = cost_checks(sampler, 1.0, 1e-6)
    assert [check.name for check in checks if not check.passed] == [GROWTH]


def test_sound_samplers_of_trees_shapes_and_users_pass():
    tree = UnitTree.even((20, 2), ("store",))
    sampler = UnitsThenPoisson(tree, (4,), 0.5, steps=6)
    shape = UnitsThenPoisson.from_terms(sampler.terms())
    for known in (sampler, shape, USERS):
        assert all(check.passed for check in cost_checks(known, 1.0, delta=1e-3))


@pytest.mark.parametrize("change", [quiet_run, quiet_on_the_same_rows, quiet_on_other_rows])
def test_a_noise_that_states_less_than_its_run_costs_is_refused(change):
    runs = [(Poisson(*SIZES, overflow="accumulate"), 1.0)]
    assert price_check(Independent(), runs).passed
    assert not price_check(change(Independent)(), runs).passed
