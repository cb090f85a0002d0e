"""The published estimators: confidence bounds, sampled losses, and the profile made of them.

Statistical tests compare z-scores with 5.5 (false alarm 4e-8 for each) or p-values with 1e-8, at
fixed seeds.
"""

from __future__ import annotations

import math
from collections import Counter

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import log_ndtr

from accounting import BallsAndBinsProfile, GaussianProfile
from accounting.max_events import Epoch
from experiments.papers.monte_carlo import MonteCarloProfile, geometric_ranks
from experiments.papers.monte_carlo.confidence import (
    bennett_upper_bound,
    hockey_stick_upper_bound,
    kl_upper_bound,
    mean_upper_bound,
)
from experiments.papers.monte_carlo.losses import (
    event_probability,
    log_order_statistics,
    sample_losses,
)
from experiments.papers.monte_carlo.other_bins import add_delta_upper_bound, truncated_tail
from experiments.papers.monte_carlo.profile import max_event_lower_bound
from samplers import Shuffle
from samplers.randomness import Key, Stream, uniform_integers

DIRECTIONS = ["remove", "add"]
LONG = pytest.mark.long


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-300, 1.0 - 1e-9), st.integers(1, 10**9), st.floats(1e-12, 0.5))
def test_kl_upper_bound_inverts_the_divergence(mean, num_samples, beta):
    p = kl_upper_bound(mean, num_samples, beta)
    assert mean <= p <= 1.0
    with mpmath.workdps(50):
        q, budget = mpmath.mpf(mean), mpmath.log(1 / mpmath.mpf(beta)) / num_samples

        def divergence(p):
            return q * mpmath.log(q / p) + (1 - q) * mpmath.log((1 - q) / (1 - p))

        excess = mpmath.mpf(p) - q
        if p < 1.0:
            # Solved to 1e-6 of the excess over the mean, or to one unit in the last place of p.
            ulp = 4 * np.spacing(p)
            assert (
                divergence(min(q + excess * (1 + 1e-6) + ulp, 1 - mpmath.mpf(10) ** -40)) >= budget
            )
        assert divergence(max(q, q + excess * (1 - 1e-6) - 4 * np.spacing(p))) <= budget


def test_hockey_stick_bound_never_underflows_to_zero():
    assert hockey_stick_upper_bound(np.zeros(10), 1.0, beta=0.1, event_probability=0.0) > 0.0


@pytest.mark.parametrize("truth", [0.002, 0.15])
def test_bennett_bounds_fail_no_more_often_than_beta(truth):
    rng, beta, trials, m = np.random.default_rng(1), 0.05, 2_000, 200
    # Values in {0, 0.2}: their second moment is a fifth of that of values in {0, 1}.
    samples = 0.2 * (rng.random((trials, m)) < 5 * truth)
    known = [bennett_upper_bound(x.mean(), 0.2 * truth, m, beta) for x in samples]
    unknown = [mean_upper_bound(x, beta, "bennett") for x in samples]
    for bounds in (known, unknown):
        assert np.sum(np.array(bounds) < truth) <= stats.binom.ppf(1 - 1e-8, trials, beta)
    assert np.all(np.array(known) <= np.maximum(unknown, math.sqrt(0.2 * truth)))


def test_bennett_is_tighter_at_small_variance_except_at_zero():
    samples = 0.5 + 0.1 * np.random.default_rng(0).standard_normal(10_000)
    kl = kl_upper_bound(samples.mean(), samples.size, 1e-3)
    assert mean_upper_bound(samples, 1e-3, "bennett") - samples.mean() < 0.5 * (kl - samples.mean())
    assert mean_upper_bound(np.zeros(100), 1e-3, "bennett") > kl_upper_bound(0.0, 100, 1e-3)


@pytest.mark.parametrize("inequality", ["chernoff-hoeffding", "bennett"])
@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1.0, 8.0), min_size=1, max_size=50), st.floats(0.0, 6.0))
def test_a_bound_of_one_set_of_samples_falls_in_epsilon(inequality, losses, epsilon):
    first, second = (
        hockey_stick_upper_bound(np.array(losses), at, beta=0.1, inequality=inequality)
        for at in (epsilon, epsilon + 0.1)
    )
    assert second <= first * (1 + 1e-12)


def z_score(values, truth):
    return (np.mean(values) - truth) / (np.std(values) / math.sqrt(values.size))


@pytest.mark.parametrize("bins", [1, 2, 3])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("sigma", "epsilon"),
    [(0.5, 1.0), *(pytest.param(*point, marks=LONG) for point in [(1.0, 0.5), (0.4, 4.0)])],
)
@pytest.mark.parametrize("importance", [False, True])
@pytest.mark.parametrize("order_statistics", [False, True])
def test_estimates_agree_with_quadrature(
    quadrature, bins, direction, sigma, epsilon, importance, order_statistics
):
    truth = quadrature(epsilon, sigma, bins, direction)
    if truth < 1e-3 and not importance:
        pytest.skip("too rare for samples drawn without condition")
    losses = sample_losses(
        np.random.default_rng(bins),
        60_000,
        Epoch(sigma, bins),
        direction,
        ranks=range(1, bins + 1) if order_statistics else None,  # all ranks: exact
        event_epsilon=epsilon if importance else None,
    )
    values = -np.expm1(np.minimum(epsilon - losses, 0.0))
    if importance:
        values *= event_probability(epsilon, Epoch(sigma, bins), direction)
    assert abs(z_score(values, truth)) < 5.5


@pytest.mark.short("1.0-remove")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("event_epsilon", [None, 1.0])
def test_losses_of_fewer_ranks_are_stochastically_larger(direction, event_epsilon):
    coarse, fine = (
        sample_losses(
            np.random.default_rng(seed),
            20_000,
            Epoch(0.6, 200),
            direction,
            ranks=geometric_ranks(200, growth),
            event_epsilon=event_epsilon,
        )
        for seed, growth in enumerate([2.0, 1.02])
    )
    # One-sided: the distribution function of the coarse losses never exceeds the other's ...
    assert stats.ks_2samp(coarse, fine, alternative="greater").pvalue > 1e-8
    # ... and the test has the power to see the reverse.
    assert stats.ks_2samp(coarse, fine, alternative="less").pvalue < 1e-8


# --- the events


@pytest.mark.parametrize("sigma", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("bins", [1, 1000, 10**6])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_event_probability_is_accurate_in_every_tail(sigma, bins, direction):
    for epsilon in [0.1, 5.0, 50.0, 400.0]:
        with mpmath.workdps(60):
            s, t, e = mpmath.mpf(sigma), bins, mpmath.mpf(epsilon)
            if direction == "remove":
                c = 0.5 + s**2 * (e - mpmath.log(1 + mpmath.expm1(1 / s**2) / t))
                # Φ^T by way of the small upper tail, so that 60 digits suffice.
                log_below = t * mpmath.log1p(-mpmath.erfc(c / s / mpmath.sqrt(2)) / 2)
                truth = -mpmath.expm1(log_below)
            else:
                c = 0.5 + s**2 * (mpmath.log(t) - e)
                truth = mpmath.ncdf(c / s) ** t
        got = event_probability(epsilon, Epoch(sigma, bins), direction)
        if truth > 1e-300:
            assert got == pytest.approx(float(truth), rel=1e-9)
        else:
            assert got <= 1e-299


# --- order statistics


@pytest.mark.parametrize("num_draws", [1, 5, 1000, 10**6])
def test_order_statistics_have_beta_marginals_and_beta_spacings(num_draws):
    ranks = [r for r in (1, 2, 5, 40, 900, 10**6) if r <= num_draws]
    u = np.exp(log_order_statistics(np.random.default_rng(1), 20_000, num_draws, ranks))
    for i, r in enumerate(ranks):
        assert stats.kstest(u[:, i], stats.beta(num_draws - r + 1, r).cdf).pvalue > 1e-8
        for j, s in enumerate(ranks[:i]):
            gap = stats.beta(r - s, num_draws - r + s + 1)
            assert stats.kstest(u[:, j] - u[:, i], gap.cdf).pvalue > 1e-8


ESTIMATORS = [
    {},
    {"sampled": "losses"},
    {"inequality": "bennett"},
    *({"sampled": "other bins", "inequality": way} for way in ("bennett", "chernoff-hoeffding")),
]
CELLS = [(0.5, 2, 1.0)]
MORE = [(0.35, 1_000, 3.0), (0.8, 3, 2.0), (0.5, 4_492, 4.0), (0.5, 36_000, 3.0)]
CELLS += [pytest.param(*cell, marks=LONG) for cell in MORE]


@pytest.mark.parametrize(("sigma", "bins", "epsilon"), CELLS)
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda how: "-".join(how.values()))
def test_bounds_of_every_estimator_hold_the_certified_delta(sigma, bins, epsilon, estimator):
    certified = BallsAndBinsProfile(sigma, bins)
    other_bins, truth = "other bins" in estimator.values(), certified.delta(epsilon)
    ranks = geometric_ranks(bins, 1.05) if bins > 3 else None
    profile = MonteCarloProfile(sigma, bins, num_samples=4_000, beta=1e-9, ranks=ranks, **estimator)
    [(mean, bound)] = profile.estimates([epsilon])
    assert bound == profile.delta(epsilon)
    assert bound.confidence == 1 - 1e-9
    # Its upper end fails with probability 1e-9; then it would lie below the certified one.
    assert bound.lower <= truth.upper
    assert truth.lower <= bound.upper
    if bins <= 3 or other_bins:
        assert bound.upper < 2.5 * truth.upper
        assert mean == pytest.approx(truth.upper, rel=0.3)
        inverse = profile.epsilon(truth.upper)
        assert inverse.lower <= epsilon + 1e-3
        assert certified.epsilon(truth.upper).lower <= inverse.upper < epsilon + 0.6


def test_too_few_samples_are_known_without_drawing_them(monkeypatch):
    monkeypatch.setattr("experiments.papers.monte_carlo.profile.sample_losses", None)
    profile = MonteCarloProfile(0.5, 4_492, num_samples=100_000)
    bound = profile.epsilon(2.7e-8)
    assert bound.upper == math.inf
    assert bound.note
    assert bound.lower == pytest.approx(4.0, rel=1e-3)


def test_epsilon_is_finite_at_deltas_below_one_over_num_samples():
    bound = MonteCarloProfile(0.5, 100, num_samples=20_000, sampled="other bins").epsilon(2.7e-8)
    certified = BallsAndBinsProfile(0.5, 100).epsilon(2.7e-8)
    assert certified.lower <= bound.upper < certified.upper + 0.2
    assert bound.lower <= certified.upper


def test_upper_ends_fall_in_epsilon_and_bound_a_single_bin(quadrature):
    profile = MonteCarloProfile(1.0, 1, num_samples=10, sampled="other bins")
    uppers = [bound.upper for _, bound in profile.estimates([0.2, 0.5, 1.0, 2.0])]
    assert np.all(np.diff(uppers) < 0)
    assert quadrature(1.0, 1.0, 1, "remove") <= profile.delta(1.0).upper


@pytest.mark.parametrize("bins", [1, 2, pytest.param(3, marks=LONG)])
def test_the_lower_tail_bounds_the_direction_add(quadrature, bins):
    for at in (0.2, 1.0, 3.0):
        truth = quadrature(at, 0.7, bins, "add")
        found = add_delta_upper_bound(at, Epoch(0.7, bins))
        assert truth <= found <= 1.0
    assert add_delta_upper_bound(2.0, Epoch(0.5, 4_492)) < 1e-100


@pytest.mark.parametrize(("sigma", "bins"), [(0.5, 1), (0.7, 30), (2.0, 200)])
@pytest.mark.parametrize("ceiling", [1.5, 4.0])
def test_the_upper_tail_is_bounded_where_no_coordinate_is_large(sigma, bins, ceiling):
    values = np.array([0.3, 0.9, 1.1, 1.5, 4.0, 30.0])
    found = truncated_tail(values, Epoch(sigma, bins), ceiling)
    z = np.random.default_rng(0).standard_normal((20_000, bins))
    ratio = np.exp(z / sigma - 0.5 / sigma**2).mean(axis=1)
    ratio = np.where(z.max(axis=1) <= ceiling, ratio, 0.0)
    seen = np.array([np.sum(ratio >= x) for x in values])
    assert np.all(stats.binom.sf(seen - 1, ratio.size, np.minimum(found, 1.0)) > 1e-8)
    assert np.all(np.diff(found) <= 0)
    far = truncated_tail(np.array([20.0]), Epoch(0.5, 4_492), 5.0)
    assert far[0] < 1e-25


@pytest.mark.parametrize("bins", [1, 2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("epsilon", [0.0, 2.0, 6.0])
def test_max_event_bound_is_below_truth_and_exact_for_one_bin(quadrature, bins, sigma, epsilon):
    truth = max(quadrature(epsilon, sigma, bins, direction) for direction in DIRECTIONS)
    bound = max_event_lower_bound(epsilon, Epoch(sigma, bins))
    assert bound <= truth * (1 + (1e-3 if bins == 3 else 1e-6))
    if bins == 1:
        assert bound == pytest.approx(truth, rel=1e-6)
    assert bound > 0.3 * truth


@pytest.mark.parametrize("shifts", [(1.0, 0.0), (2.0, 1.0)])
@pytest.mark.parametrize(("sigma", "bins", "epsilon"), [(0.5, 100, 1.0), (0.4, 5000, 6.0)])
def test_max_event_bound_is_the_best_event_of_a_fine_search(shifts, sigma, bins, epsilon):
    c = np.linspace(-10 * sigma, 2 + 10 * sigma, 400_001)
    p, q = (-np.expm1(log_ndtr((c - s) / sigma) + (bins - 1) * log_ndtr(c / sigma)) for s in shifts)
    best = max(np.max(p - math.exp(epsilon) * q), np.max((1 - q) - math.exp(epsilon) * (1 - p)))
    bound = max_event_lower_bound(epsilon, Epoch(sigma, bins), shifts=shifts)
    assert bound == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 10.0, 800.0, 1300.0])
@pytest.mark.parametrize(("sigma", "bins"), [(0.02, 10**6), (0.02, 1), (20.0, 1), (0.1, 10**6)])
def test_max_event_bound_is_below_unsampled_cost_at_extremes(sigma, bins, epsilon):
    bound = max_event_lower_bound(epsilon, Epoch(sigma, bins))
    assert 0.0 <= bound <= GaussianProfile(sigma).delta(epsilon).upper


FALSE_ALARM = 1e-6


def test_multinomial_bins_of_a_shuffle_match_balls_and_bins():
    n, bins, found = 4, 3, Counter()
    for seed in range(800):
        order = Shuffle(n, 2).shuffled(seed, 1)
        key = Key(seed, Stream.PARTICIPATION, 1, 1)  # words that the order does not use
        sizes = np.bincount(uniform_integers(key, bins, n), minlength=bins)
        found[sum(np.repeat(np.arange(bins), sizes) * bins**order)] += 1
    # Each assignment of four examples to three bins is as likely.
    counts = [found[assignment] for assignment in range(bins**n)]
    assert stats.chisquare(counts).pvalue > FALSE_ALARM
