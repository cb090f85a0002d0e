"""Sampled losses have their stated laws: by quadrature, and by the certified interval.

Statistical tests compare z-scores with 5.5 (false alarm 4e-8 for each) or p-values with 1e-8, at
fixed seeds.
"""

import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from accounting.max_events import Epoch
from experiments.papers.monte_carlo.losses import (
    event_probability,
    geometric_ranks,
    log_order_statistics,
    sample_losses,
)

DIRECTIONS = ["remove", "add"]
LONG = pytest.mark.long


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


@pytest.mark.short("None-add", "1.0-remove")
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
    probability = event_probability(epsilon, Epoch(sigma, bins), direction)
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
