"""Costs of attempts with separate seeds: their order, their values and computing times."""

import dataclasses
import functools
import math
import time

import pytest

from accounting import PoissonProfile, calibrate
from samplers import BallsAndBins, Deterministic, EpochSampler, Poisson, Shuffle, UserPoisson

SIGMA = 1.0
SIZES = {"num_examples": 1000, "batch_size": 50, "epochs": 4}  # 20 steps an epoch
CHEAP = pytest.mark.short(
    "Deter*", "Poisson*None, t*", "BallsAndBins*None, t*assignment='redrawn')", "User*"
)
SAMPLERS = [
    Deterministic(**SIZES),
    Shuffle(**SIZES),
    Shuffle(**SIZES, order="fixed"),
    Poisson(**SIZES),
    Poisson(**SIZES, max_batch_size=75),
    BallsAndBins(**SIZES),
    BallsAndBins(**SIZES, max_batch_size=75),
    BallsAndBins(**SIZES, assignment="fixed"),
    BallsAndBins(**SIZES, assignment="fixed", max_batch_size=75),
    BallsAndBins(**SIZES, cycle_length=4),
    Poisson(**SIZES, cycle_length=4),
    UserPoisson(**SIZES, max_contributions=3),
]


@functools.cache
def bound(profile):
    return profile.delta(1.0)  # an epsilon is ten of these


def upper(profile):
    return bound(profile).upper


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_one_attempt_at_all_steps_is_the_whole_run(sampler):
    whole = sampler.privacy_of(SIGMA, [range(sampler.num_steps)])
    assert whole == sampler.privacy(SIGMA)
    halves = [[range(30), range(30, sampler.num_steps)]]
    assert sampler.privacy_of(SIGMA, halves) == whole


@pytest.mark.short("Deterministic*", "Shuffle*fixed*", "Poisson*None, t*", "BallsAndBins*None, t*")
@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_more_steps_cost_more_and_both_ends_are_positive(sampler):
    whole = bound(sampler.privacy(SIGMA))
    again = bound(sampler.privacy_of(SIGMA, [range(sampler.num_steps), range(60, 80)]))
    part = bound(sampler.privacy_of(SIGMA, [range(1, 8)]))
    assert 0.0 < part.lower <= part.upper < whole.upper < again.upper
    assert again.lower > 0.0


@CHEAP
@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_attempts_cost_at_most_the_epochs_that_they_enter(sampler):
    attempts = [range(0, 33), range(28, 57), [range(55, 60), range(62, 80)]]
    widened = sampler.privacy_of(SIGMA, sampler.as_entered(attempts))
    for same_rows in (False, True):
        price = bound(sampler.privacy_of(SIGMA, attempts, same_rows=same_rows))
        assert price.lower <= price.upper <= 1.001 * upper(widened)


@CHEAP
@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_ends_within_limits_cost_at_most_the_entered_draws(sampler):
    # Whoever may choose ends may also choose others, of as many attempts, epochs and steps.
    for taken, chosen in (
        ([range(20), range(20, 80)], [range(80)]),
        ([range(4)] * 5, [*[range(1)] * 4, range(13)]),
    ):
        limit = upper(sampler.privacy_of(SIGMA, sampler.as_entered(taken), same_rows=True))
        price = bound(sampler.privacy_of(SIGMA, chosen, same_rows=True))
        assert price.lower <= limit


# --- Values and times ----------------------------------------------------------------------------

TABLE = [
    (0.5, 512, 1e-4, (2.71, 2.79, 2.85)),
    (0.7, 512, 1e-4, (0.54, 0.56, 0.58)),
    (0.5, 625, 1e-5, (3.59, 3.67, 3.72)),
]


@pytest.mark.short("0.7-*")
@pytest.mark.parametrize(("sigma", "bins", "delta", "values"), TABLE)
def test_interrupted_epoch_costs_what_own_convolutions_give(sigma, bins, delta, values):
    sampler = BallsAndBins(bins * 100, 100, overflow="accumulate")
    half = bins // 2
    for first, value in zip((0, half, half + 64), values, strict=True):
        attempts = [range(first), range(half, bins)] if first else [range(bins)]
        price = sampler.privacy_of(sigma, attempts).epsilon(delta)
        assert abs(price.lower - value) < 0.02
        assert abs(price.upper - value) < 0.02


@pytest.mark.parametrize("bins", [1, 2])
def test_few_released_bins_of_a_million_are_priced_in_seconds(bins):
    sampler, begun = BallsAndBins(10**8, 100, overflow="accumulate"), time.process_time()
    price = sampler.privacy_of(0.5, [range(bins)])
    assert price.epsilon(1e-6).upper < 1e-4
    bound = price.delta(0.5)
    assert time.process_time() - begun < 10.0
    one = PoissonProfile(0.5, 1e-6, 1).delta(0.5)  # two bins: its double, but for both at once
    assert one.lower <= bound.upper <= 1.1 * bins * one.upper + 1e-12
    assert bound.lower <= bins * one.upper


@pytest.mark.long
@pytest.mark.parametrize(("epochs", "price"), [(1, 3.74), (30, 9.113)])
def test_three_attempts_are_priced_and_calibrated(epochs, price):
    sampler, third = BallsAndBins(62_500, 100, epochs), epochs // 3 * 625
    stops = [third + 200, 2 * third + 420, epochs * 625]
    attempts = [range(stops[0]), range(third + 180, stops[1]), range(2 * third + 400, stops[2])]
    epsilon = sampler.privacy_of(0.5, attempts).epsilon(1e-5).upper
    assert epsilon == pytest.approx(price, rel=5e-3)
    sigma = calibrate(lambda s: sampler.privacy_of(s, attempts), epsilon=price, delta=1e-5)
    assert sigma == pytest.approx(0.5, rel=5e-3)


@dataclasses.dataclass(frozen=True)
class OneSubset(EpochSampler):
    """An outside sampler: half of the examples, drawn once, are all that the run reads."""

    def drawn_epoch(self, epoch):
        return 0

    def privacy(self, noise_multiplier):
        return PoissonProfile(noise_multiplier / math.sqrt(self.epochs), 0.5, 1)

    def participations(self, seed, epoch, chunk):
        raise NotImplementedError


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
def test_each_attempt_of_an_outside_one_draw_sampler_has_its_own(epsilon):
    sampler, attempts = OneSubset(600, 300, epochs=2), [range(4), range(4)]
    price, two = sampler.privacy_of(0.3, attempts), PoissonProfile(0.3 / math.sqrt(2.0), 0.5, 2)
    # An example is in one of two subsets more often than in one: one draw of all epochs costs less.
    assert sampler.with_epochs(4).privacy(0.3).delta(epsilon).upper < two.delta(epsilon).lower
    assert two.delta(epsilon).lower <= price.delta(epsilon).upper
    assert sampler.as_entered([range(1), range(2, 3)]) == [[range(4)]] * 2
    assert sampler.privacy_of(1.0, [range(3)]).profile == sampler.privacy(1.0)


# --- Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attempts", "message"),
    [
        ([], "attempts=[] release nothing"),
        ([[]], "attempts[0]=[] releases nothing"),
        ([range(90)], "range(0, 90) must be a range of one step or more within the run's [0, 80)"),
        ([range(-1, 5)], "within the run's [0, 80)"),
        ([range(5), range(7, 7)], "attempts[1]=range(7, 7)"),
        ([range(0, 8, 2)], "consecutive steps"),
        ([[range(5), range(4, 9)]], "overlapping ranges, range(0, 5) and range(4, 9)"),
    ],
)
@pytest.mark.parametrize("sampler", [SAMPLERS[0], SAMPLERS[1], SAMPLERS[3], SAMPLERS[5]], ids=repr)
def test_ranges_outside_a_run_are_refused_in_one_line(sampler, attempts, message):
    for price in (lambda a: sampler.privacy_of(SIGMA, a), sampler.as_entered):
        with pytest.raises(ValueError, match=r"attempts") as refusal:
            price(attempts)
        assert message in str(refusal.value)
        assert "\n" not in str(refusal.value)
