"""The published estimators agree with quadrature, their stated laws and the certified interval.

Statistical tests compare z-scores with 5.5 (false alarm 4e-8 for each) or p-values with 1e-8, at
fixed seeds: over the whole file a correct implementation fails with probability below 1e-5, once,
at the time of writing, and never after.
"""

import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import log_ndtr, ndtr

from accounting.balls_and_bins import BallsAndBinsProfile
from accounting.monte_carlo import (
    MonteCarloProfile,
    event_probability,
    geometric_ranks,
    hockey_stick_upper_bound,
    kl_upper_bound,
    log_order_statistics,
    max_event_lower_bound,
    sample_losses,
)

DIRECTIONS = ["remove", "add"]


def quadrature(epsilon, sigma, bins, direction):
    """H_ε for T in {1, 2, 3}: one coordinate in closed form, the others by the trapezoid rule.

    remove: E[(X - a)_+] = E[(Y - (Ta - S))_+]/T, a call; add: E[(1 - aX)_+] = a E[(T/a - S -
    Y)_+]/T, a put; Y is log-normal with mean 1, S the sum of the other T - 1 and a = e^ε. Good to
    1e-6 relative for T <= 2 and to 1e-3 for T = 3 (a narrow bend where S passes Ta).
    """
    scale, a = 1.0 / sigma, math.exp(epsilon)
    high = 10.0 + 2 * scale + (epsilon + math.log(bins)) / scale
    z = np.linspace(-10.0 - epsilon / scale, high, 2001 if bins == 3 else 100_001)
    weight = stats.norm.pdf(z) * (z[1] - z[0])
    y = np.exp(scale * z - 0.5 * scale**2)
    total, mass = np.zeros(1), np.ones(1)
    for _ in range(bins - 1):
        total = (total[:, None] + y).ravel()
        mass = (mass[:, None] * weight).ravel()
    strike = bins * a - total if direction == "remove" else bins / a - total
    inside = strike > 0
    k = np.where(inside, strike, 1.0)
    d = -np.log(k) / scale + 0.5 * scale
    if direction == "remove":
        value = np.where(inside, ndtr(d) - k * ndtr(d - scale), 1.0 - strike) / bins
    else:
        value = np.where(inside, k * ndtr(scale - d) - ndtr(-d), 0.0) * a / bins
    return float(mass @ value)


def z_score(values, truth):
    return (np.mean(values) - truth) / (np.std(values) / math.sqrt(values.size))


# --- the estimators against quadrature
# --------------------------------------------------------------


@pytest.mark.parametrize("bins", [1, 2, 3])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("sigma", "epsilon"), [(0.5, 1.0), (1.0, 0.5), (0.4, 4.0)])
@pytest.mark.parametrize("importance", [False, True])
@pytest.mark.parametrize("order_statistics", [False, True])
def test_estimates_agree_with_quadrature(
    bins, direction, sigma, epsilon, importance, order_statistics
):
    truth = quadrature(epsilon, sigma, bins, direction)
    if truth < 1e-3 and not importance:
        pytest.skip("too rare for samples drawn without condition")
    losses = sample_losses(
        np.random.default_rng(bins),
        60_000,
        noise_multiplier=sigma,
        bins=bins,
        direction=direction,
        ranks=range(1, bins + 1) if order_statistics else None,  # all ranks: exact
        event_epsilon=epsilon if importance else None,
    )
    values = -np.expm1(np.minimum(epsilon - losses, 0.0))
    if importance:
        values *= event_probability(epsilon, noise_multiplier=sigma, bins=bins, direction=direction)
    assert abs(z_score(values, truth)) < 5.5


@pytest.mark.parametrize(
    ("direction", "sigma", "epsilon", "bins"),
    [
        ("remove", 0.5, 22.0, 2),
        ("remove", 1.0, 7.0, 3),
        ("add", 0.3, 25.0, 2),
        ("add", 0.5, 12.0, 3),
    ],
)
def test_importance_sampling_reaches_deep_tails(direction, sigma, epsilon, bins):
    truth = quadrature(epsilon, sigma, bins, direction)
    assert 1e-30 < truth < 1e-13
    losses = sample_losses(
        np.random.default_rng(0),
        200_000,
        noise_multiplier=sigma,
        bins=bins,
        direction=direction,
        event_epsilon=epsilon,
    )
    probability = event_probability(epsilon, noise_multiplier=sigma, bins=bins, direction=direction)
    assert abs(z_score(-np.expm1(np.minimum(epsilon - losses, 0.0)) * probability, truth)) < 5.5


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_epochs_of_one_bin_are_one_gaussian_of_smaller_noise(direction):
    losses = sample_losses(
        np.random.default_rng(3),
        200_000,
        noise_multiplier=2.0,
        bins=1,
        direction=direction,
        epochs=4,
    )
    values = -np.expm1(np.minimum(0.5 - losses, 0.0))
    assert abs(z_score(values, quadrature(0.5, 1.0, 1, direction))) < 5.5


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("epochs", [1, 3])
def test_losses_of_order_statistics_at_all_ranks_have_the_exact_law(direction, epochs):
    samples = [
        sample_losses(
            np.random.default_rng(seed),
            50_000,
            noise_multiplier=0.7,
            bins=6,
            direction=direction,
            epochs=epochs,
            ranks=ranks,
        )
        for seed, ranks in enumerate([None, range(1, 7)])
    ]
    assert stats.ks_2samp(*samples).pvalue > 1e-8


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("event_epsilon", [None, 1.0])
def test_losses_of_fewer_ranks_are_stochastically_larger(direction, event_epsilon):
    coarse, fine = (
        sample_losses(
            np.random.default_rng(seed),
            50_000,
            noise_multiplier=0.6,
            bins=200,
            direction=direction,
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
# -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bins", [1, 2, 7])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("sigma", "epsilon"), [(0.5, 1.0), (1.0, 0.3), (0.8, 2.0)])
def test_loss_is_at_most_epsilon_outside_the_event_whose_probability_is_as_stated(
    bins, direction, sigma, epsilon
):
    y = sigma * np.random.default_rng(7).standard_normal((100_000, bins))
    x = y + (np.arange(bins) == 0) if direction == "remove" else y
    loss = np.log(np.mean(np.exp(x / sigma**2 - 0.5 / sigma**2), axis=1))
    if direction == "remove":
        c = 0.5 + sigma**2 * (epsilon - math.log(1 + math.expm1(1 / sigma**2) / bins))
        event = y.max(axis=1) >= c
    else:
        loss = -loss
        c = 0.5 + sigma**2 * (math.log(bins) - epsilon)
        event = y.max(axis=1) <= c
    assert np.all(loss[~event] <= epsilon + 1e-12)
    probability = event_probability(epsilon, noise_multiplier=sigma, bins=bins, direction=direction)
    assert stats.binomtest(int(event.sum()), event.size, probability).pvalue > 1e-8


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
        got = event_probability(epsilon, noise_multiplier=sigma, bins=bins, direction=direction)
        if truth > 1e-300:
            assert got == pytest.approx(float(truth), rel=1e-9)
        else:
            assert got <= 1e-299


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_million_bins_and_rare_events_give_finite_losses(direction):
    epsilon = 150.0 if direction == "remove" else 24.0
    probability = event_probability(epsilon, noise_multiplier=0.1, bins=10**6, direction=direction)
    assert 1e-30 < probability < 1e-10
    losses = sample_losses(
        np.random.default_rng(0),
        2_000,
        noise_multiplier=0.1,
        bins=10**6,
        direction=direction,
        ranks=geometric_ranks(10**6, 1.1),
        event_epsilon=epsilon,
    )
    assert np.all(np.isfinite(losses))


# --- order statistics
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_draws", [1, 5, 1000, 10**6])
def test_order_statistics_have_beta_marginals_and_beta_spacings(num_draws):
    ranks = [r for r in (1, 2, 5, 40, 900, 10**6) if r <= num_draws]
    u = np.exp(log_order_statistics(np.random.default_rng(1), 20_000, num_draws, ranks))
    for i, r in enumerate(ranks):
        assert stats.kstest(u[:, i], stats.beta(num_draws - r + 1, r).cdf).pvalue > 1e-8
        for j, s in enumerate(ranks[:i]):
            gap = stats.beta(r - s, num_draws - r + s + 1)
            assert stats.kstest(u[:, j] - u[:, i], gap.cdf).pvalue > 1e-8


@given(st.integers(1, 10**6), st.floats(1.001, 3.0))
def test_geometric_ranks_increase_from_one_within_the_draws(num_draws, growth):
    ranks = geometric_ranks(num_draws, growth)
    assert ranks[0] == 1
    assert ranks[-1] <= num_draws
    assert all(a < b <= max(a + 1, a * growth) for a, b in itertools.pairwise(ranks))


# --- the confidence bound
# ---------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-9, 1.0 - 1e-9), st.integers(1, 10**9), st.floats(1e-12, 0.5))
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


def test_kl_upper_bound_fails_no_more_often_than_beta():
    rng, beta, trials, m = np.random.default_rng(0), 0.05, 4_000, 200
    for truth in (0.002, 0.03, 0.4):
        means = rng.binomial(m, truth, trials) / m
        failures = sum(kl_upper_bound(q, m, beta) < truth for q in means)
        # Chernoff's exponent ignores a polynomial factor, so the count is well below β; never above
        # it.
        assert failures <= stats.binom.ppf(1 - 1e-8, trials, beta)


def test_kl_upper_bound_of_ones_is_one():
    assert kl_upper_bound(1.0, 10, 0.1) == 1.0


# --- the proved lower bounds
# ------------------------------------------------------------------------


@pytest.mark.parametrize("bins", [1, 2, 3])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("epsilon", [0.0, 2.0, 6.0])
def test_max_event_bound_lies_below_the_truth_and_is_exact_for_one_bin(bins, sigma, epsilon):
    truth = max(quadrature(epsilon, sigma, bins, direction) for direction in DIRECTIONS)
    bound = max_event_lower_bound(epsilon, noise_multiplier=sigma, bins=bins)
    assert bound <= truth * (1 + (1e-3 if bins == 3 else 1e-6))
    if bins == 1:
        assert bound == pytest.approx(truth, rel=1e-6)
    assert bound > 0.3 * truth


def test_max_event_bound_of_shuffling_one_bin_is_the_gaussian():
    bound = max_event_lower_bound(1.0, noise_multiplier=0.7, bins=1, shifts=(2.0, 1.0))
    assert bound == pytest.approx(quadrature(1.0, 0.7, 1, "remove"), rel=1e-6)


@pytest.mark.parametrize("shifts", [(1.0, 0.0), (2.0, 1.0)])
@pytest.mark.parametrize(("sigma", "bins", "epsilon"), [(0.5, 100, 1.0), (0.4, 5000, 6.0)])
def test_max_event_bound_is_the_best_event_of_a_fine_search(shifts, sigma, bins, epsilon):
    c = np.linspace(-10 * sigma, 2 + 10 * sigma, 400_001)
    p, q = (-np.expm1(log_ndtr((c - s) / sigma) + (bins - 1) * log_ndtr(c / sigma)) for s in shifts)
    best = max(np.max(p - math.exp(epsilon) * q), np.max((1 - q) - math.exp(epsilon) * (1 - p)))
    bound = max_event_lower_bound(epsilon, noise_multiplier=sigma, bins=bins, shifts=shifts)
    assert bound == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 10.0, 800.0])
@pytest.mark.parametrize(("sigma", "bins"), [(0.02, 10**6), (20.0, 1), (0.1, 10**6)])
def test_max_event_bound_is_a_number_between_zero_and_one_at_extremes(sigma, bins, epsilon):
    assert 0.0 <= max_event_lower_bound(epsilon, noise_multiplier=sigma, bins=bins) <= 1.0


# --- the profile
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "bins"), [(0.5, 2), (0.8, 3)])
def test_profile_brackets_quadrature_in_delta_and_in_epsilon(sigma, bins):
    profile = MonteCarloProfile(sigma, bins, num_samples=50_000, beta=1e-9)
    assert profile.delta(1.0).confidence == 1 - 1e-9
    for epsilon in (0.3, 1.0, 2.0):
        truth = max(quadrature(epsilon, sigma, bins, direction) for direction in DIRECTIONS)
        bound = profile.delta(epsilon)
        assert bound.lower <= truth <= bound.upper < 1.3 * truth
        inverse = profile.epsilon(truth)
        assert inverse.lower <= epsilon + 1e-6
        assert epsilon <= inverse.upper < epsilon + 0.2


def test_profile_of_fixed_bins_is_one_epoch_at_the_averaged_noise():
    fixed = MonteCarloProfile(1.0, 10, epochs=4, assignment="fixed", num_samples=10_000)
    single = MonteCarloProfile(0.5, 10, num_samples=10_000)
    assert fixed.delta(1.0) == single.delta(1.0)
    assert fixed.epsilon(1e-2) == single.epsilon(1e-2)


def test_profile_of_redrawn_bins_costs_more_than_one_epoch_and_less_than_fixed_ones():
    one, redrawn, fixed = (
        MonteCarloProfile(0.8, 50, epochs=e, assignment=a, num_samples=50_000).delta(1.0)
        for e, a in [(1, "redrawn"), (4, "redrawn"), (4, "fixed")]
    )
    assert one.upper < redrawn.lower or one.upper < redrawn.upper
    assert redrawn.upper < fixed.lower


def test_profile_reports_infinity_where_samples_are_too_few():
    profile = MonteCarloProfile(1.0, 565, num_samples=100, ranks=geometric_ranks(565))
    bound = profile.epsilon(1e-8)
    assert bound.upper == math.inf
    assert 0.0 < bound.lower < 1.0


def test_chunks_do_not_change_what_is_estimated(monkeypatch):
    def upper():
        return MonteCarloProfile(0.5, 3, num_samples=20_000).delta(1.0).upper

    whole = upper()
    monkeypatch.setattr("accounting.monte_carlo._CHUNK_ENTRIES", 7_000)
    assert upper() == pytest.approx(whole, rel=0.1)


# --- what is refused
# --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kl_upper_bound(1.5, 10, 0.1), "mean"),
        (lambda: kl_upper_bound(0.5, 0, 0.1), "num_samples"),
        (lambda: kl_upper_bound(0.5, 10, 0.0), "beta"),
        (lambda: geometric_ranks(10, 1.0), "growth"),
        (lambda: log_order_statistics(np.random.default_rng(), 1, 3, [1, 4]), "ranks"),
        (lambda: log_order_statistics(np.random.default_rng(), 1, 3, [2, 2]), "ranks"),
        (lambda: max_event_lower_bound(-1.0, noise_multiplier=1.0, bins=2), "epsilon"),
        (lambda: max_event_lower_bound(1.0, noise_multiplier=0.0, bins=2), "noise_multiplier"),
        (lambda: MonteCarloProfile(1.0, 0), "bins"),
        (lambda: MonteCarloProfile(1.0, 2, epochs=0), "epochs"),
        (lambda: MonteCarloProfile(1.0, 2, assignment="shuffled"), "assignment"),
        (lambda: MonteCarloProfile(1.0, 2, beta=1.0), "beta"),
        (lambda: MonteCarloProfile(1.0, 2, beta=1e-17), "beta"),
        (lambda: MonteCarloProfile(1.0, 2, num_samples=0), "num_samples"),
        (lambda: MonteCarloProfile(1.0, 2).epsilon(0.0), "delta"),
        (
            lambda: sample_losses(
                np.random.default_rng(), 1, noise_multiplier=1.0, bins=2, direction="both"
            ),
            "direction",
        ),
        (
            lambda: sample_losses(
                np.random.default_rng(),
                1,
                noise_multiplier=1.0,
                bins=2,
                direction="add",
                ranks=[2],
            ),
            "ranks",
        ),
        (
            lambda: sample_losses(
                np.random.default_rng(),
                1,
                noise_multiplier=1.0,
                bins=2,
                direction="add",
                epochs=2,
                event_epsilon=1.0,
            ),
            "one epoch",
        ),
    ],
)
def test_bad_input_is_refused_with_its_name(call, message):
    # Annotations are checked under the tests: a Literal's violation is a TypeError there.
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_hockey_stick_bound_never_underflows_to_zero():
    assert hockey_stick_upper_bound(np.zeros(10), 1.0, beta=0.1, event_probability=0.0) > 0.0


# --- the certified interval -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sigma", "epsilon"),
    [(0.3, 0.1), (0.3, 2.0), (0.3, 8.0), (0.5, 0.1), (0.5, 2.0), (1.0, 0.1), (2.0, 0.02)],
)
@pytest.mark.parametrize("bins", [2, 30, 36_000])
def test_certified_interval_lies_between_the_event_bound_and_the_confidence_bound(
    sigma, bins, epsilon
):
    certified = BallsAndBinsProfile(sigma, bins).delta(epsilon)
    ranks = geometric_ranks(bins, 1.05) if bins > 100 else None
    sampled = MonteCarloProfile(sigma, bins, num_samples=5_000, beta=1e-9, ranks=ranks)
    bound = sampled.delta(epsilon)
    assert bound.lower <= certified.upper
    # The confidence bound fails with probability 1e-9; then it would lie below the certified one.
    assert certified.lower <= bound.upper
    assert certified.upper <= bound.upper * (1 + 2e-3) + 1e-3 * certified.lower


@pytest.mark.parametrize("assignment", ["redrawn", "fixed"])
@pytest.mark.parametrize(("sigma", "bins", "epsilon"), [(0.5, 20, 3.0), (1.0, 100, 0.5)])
def test_certified_interval_of_several_epochs_lies_under_the_confidence_bound(
    sigma, bins, epsilon, assignment
):
    certified = BallsAndBinsProfile(sigma, bins, 3, assignment).delta(epsilon)
    sampled = MonteCarloProfile(sigma, bins, 3, assignment, num_samples=50_000, beta=1e-9)
    bound = sampled.delta(epsilon)
    assert bound.lower <= certified.upper <= bound.upper < 1.5 * certified.upper + 1e-3


def test_order_statistics_at_dense_ranks_estimate_the_certified_value():
    certified = BallsAndBinsProfile(0.3, 36_000).delta(3.0)
    losses = sample_losses(
        np.random.default_rng(0),
        20_000,
        noise_multiplier=0.3,
        bins=36_000,
        direction="remove",
        ranks=geometric_ranks(36_000, 1.03),
        event_epsilon=3.0,
    )
    values = -np.expm1(np.minimum(3.0 - losses, 0.0)) * event_probability(
        3.0, noise_multiplier=0.3, bins=36_000, direction="remove"
    )
    # The estimate is of an upper bound, 5 % above the value at most.
    assert z_score(values, certified.lower) > -5.5
    assert z_score(values, 1.05 * certified.upper) < 5.5


def test_too_few_samples_are_known_without_drawing_them(monkeypatch):
    monkeypatch.setattr("accounting.monte_carlo.sample_losses", None)
    profile = MonteCarloProfile(0.5, 4_492, num_samples=100_000)
    bound = profile.epsilon(2.7e-8)
    assert bound.upper == math.inf
    assert bound.note
    assert bound.lower == pytest.approx(4.0, rel=1e-3)
