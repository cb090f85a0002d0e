"""Three hundred random questions, answered independently: by mpmath, quadrature and convolution."""

import math

import mpmath
import numpy as np
import pytest
from enumeration import released_cells
from scipy import stats

from accounting import BallsAndBinsProfile, GaussianProfile, PoissonProfile, UserPoissonProfile
from accounting.releases import with_gaussian_release
from samplers import BallsAndBins, Deterministic, Poisson, Shuffle
from tests.accounting.profiles.test_gaussian import exact_delta

UNCUT = {"overflow": "accumulate"}


# --- laws of X = dP/dQ as (Q-mass, X) at nodes, by the trapezoid rule


def law(cells, sigma):
    """Law of X on the span of the unit's means, where all other rows are zero."""
    means = np.array([with_it for with_it, _ in cells], float)
    _, lengths, basis = np.linalg.svd(means, full_matrices=False)
    means = means @ basis[lengths > 1e-9].T
    low, high = min(0.0, means.min()) - 8.5 * sigma, means.max() + 8.5 * sigma
    axis, step = np.linspace(low, high, {1: 4001, 2: 401}[means.shape[1]], retstep=True)
    z = np.stack(np.meshgrid(*[axis] * means.shape[1]), axis=-1).reshape(-1, means.shape[1])
    q = (stats.norm.pdf(z, 0.0, sigma) * step).prod(axis=1)
    exponents = ((z @ mean - 0.5 * mean @ mean) / sigma**2 for mean in means)
    return q, sum(p * np.exp(x) for p, x in zip(cells.values(), exponents, strict=True))


def release(sigma):
    return law({((1.0,), (0.0,)): 1.0}, sigma)


NOTHING = np.ones(1), np.ones(1)


def divergence(epsilon, law, other=NOTHING):
    """The larger direction's delta of two independent releases."""
    q, x = other
    order, e = np.argsort(x), math.exp(epsilon)
    q, x = q[order], x[order]
    below = [np.append(0.0, np.cumsum(mass)) for mass in (q, q * x)]
    above = [np.append(np.cumsum(mass[::-1])[::-1], 0.0) for mass in (q, q * x)]
    with np.errstate(divide="ignore"):
        first, last = np.searchsorted(x, e / law[1]), np.searchsorted(x, 1.0 / (e * law[1]))
    remove = law[0] @ (law[1] * above[1][first] - e * above[0][first])
    add = law[0] @ (below[0][last] - e * law[1] * below[1][last])
    return max(remove, add)


def exact_sampled(sigma, rate, epsilon):
    """Both directions of one sampled release, by the place where the likelihoods cross."""
    with mpmath.workdps(50):
        s, q, found = mpmath.mpf(sigma), mpmath.mpf(rate), []
        for sign in (1, -1):
            inside = (mpmath.exp(sign * mpmath.mpf(epsilon)) - 1) / q + 1
            if inside <= 0:
                continue
            z = s * s * mpmath.log(inside) + mpmath.mpf(1) / 2
            none, one = (mpmath.ncdf(sign * (m - z) / s) for m in (0, 1))
            p, e = (1 - q) * none + q * one, mpmath.exp(epsilon)
            found.append(p - e * none if sign == 1 else none - e * p)
        return float(max(found))


# --- families: profile, a delta that some pair has, one that the lower end must not exceed


def closed_form(rng, sigma, epsilon):
    truth = exact_delta(sigma, epsilon)
    return GaussianProfile(sigma), truth, truth


def known_order(rng, sigma, epsilon):
    first, second = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    attempts = [range(first), range(second - 1, 8)]
    truth = exact_delta(sigma / math.sqrt(2 if second <= first else 1), epsilon)
    return Deterministic(80, 10).privacy_of(sigma, attempts, same_rows=True), truth, truth


def one_step(rng, sigma, epsilon):
    b = int(rng.integers(1, 900))
    truth = exact_sampled(sigma, b / 1000, epsilon)
    return Poisson(1000, b, **UNCUT).privacy_of(sigma, [range(1)]), truth, truth


def priced(sampler, sigma, epsilon, attempts, draws=None):
    """Attempts' price, and their delta by enumeration of each one's draw, or of equal `draws`."""
    laws = [law(released_cells(sampler, [draw], (0.0,)), sigma) for draw in draws or attempts]
    truth = divergence(epsilon, *laws)
    return sampler.privacy_of(sigma, attempts), truth, truth


def two_steps(rng, sigma, epsilon):
    sampler = Poisson(1000, int(rng.integers(10, 500)), **UNCUT)
    return priced(sampler, sigma, epsilon, [range(1), range(1)])


def two_bins(rng, sigma, epsilon):
    return priced(BallsAndBins(200, 100, **UNCUT), sigma, epsilon, [range(2)])


def two_epochs(rng, sigma, epsilon):
    sampler = BallsAndBins(200, 100, 2, **UNCUT)
    return priced(sampler, sigma, epsilon, [range(4)], [range(2), range(2, 4)])


def partial_epoch(rng, sigma, epsilon):
    bins, released = int(rng.integers(2, 60)), int(rng.integers(1, 3))
    first = int(rng.integers(0, bins - released + 1))
    sampler = BallsAndBins(bins * 10, 10, **UNCUT)
    return priced(sampler, sigma, epsilon, [range(first, first + released)])


def two_attempts(rng, sigma, epsilon):
    bins = int(rng.integers(2, 60))
    attempts = [range(int(rng.integers(1, 3))) for _ in range(2)]
    return priced(BallsAndBins(bins * 10, 10, **UNCUT), sigma, epsilon, attempts)


def fixed_bins(rng, sigma, epsilon):
    epochs = int(rng.integers(2, 5))
    sampler = BallsAndBins(200, 100, epochs, assignment="fixed", **UNCUT)
    return priced(sampler, sigma, epsilon, [range(int(rng.integers(2, 2 * epochs + 1)))])


def shuffled(rng, sigma, epsilon):
    steps = int(rng.integers(1, 3))  # of two: one may be half an epoch
    price, truth, _ = priced(Shuffle(200, 100), sigma, epsilon, [range(steps)])
    return price, truth, exact_delta(sigma, epsilon)


def cut_batches(rng, sigma, epsilon):
    b = int(rng.integers(2, 60))
    cap = int(b + rng.integers(1, 5) * math.sqrt(b) + 1)
    steps = int(rng.integers(1, 3))
    sampler = Poisson(400, b, max_batch_size=cap)
    return priced(sampler, sigma, epsilon, [range(steps)], [range(1)] * steps)


def cut_bins(rng, sigma, epsilon):
    bins = int(rng.integers(2, 30))
    cap = int(20 + rng.integers(1, 5) * math.sqrt(20))
    sampler = BallsAndBins(20 * bins, 20, max_batch_size=cap)
    return priced(sampler, sigma, epsilon, [range(1)] * int(rng.integers(1, 3)))


def users(rng, sigma, epsilon):
    tau, rate, noise = int(rng.integers(2, 6)), float(rng.uniform(0.01, 0.4)), 2.0 * sigma
    cells = {((float(k),), (0.0,)): stats.binom.pmf(k, tau, rate) for k in range(tau + 1)}
    truth = divergence(epsilon, law(cells, noise), release(3.0))
    return with_gaussian_release(UserPoissonProfile(noise, 1, rate, tau), 3.0), truth, truth


def beside_a_release(rng, sigma, epsilon):
    noise = float(rng.uniform(0.7, 3.0))
    if rng.integers(2):
        profile, weights = BallsAndBinsProfile(sigma, 2), {(1.0, 0.0): 0.5, (0.0, 1.0): 0.5}
    else:
        profile, weights = PoissonProfile(sigma, 0.3, 1), {(0.0,): 0.7, (1.0,): 0.3}
    cells = {(mean, (0.0,) * len(mean)): p for mean, p in weights.items()}
    truth = divergence(epsilon, law(cells, sigma), release(noise))
    return with_gaussian_release(profile, noise), truth, truth


FAMILIES = [
    closed_form, known_order, one_step, two_steps, two_bins, two_epochs, partial_epoch,
    two_attempts, fixed_bins, shuffled, cut_batches, cut_bins, users, beside_a_release,
]  # fmt: skip


@pytest.mark.short("[!c]*-2")
@pytest.mark.parametrize("asked", [2, pytest.param(24, marks=pytest.mark.long)])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_no_end_of_an_interval_is_on_the_wrong_side_of_the_truth(family, asked):
    rng = np.random.default_rng(list(family.__name__.encode()))
    while asked:
        epsilon = float(rng.exponential(1.5)) if asked % 6 != 1 else 0.0
        sigma = float(rng.uniform(0.4, 2.0))
        profile, attained, never = family(rng, sigma, epsilon)
        if attained < 1e-9:
            continue
        found, asked = profile.delta(epsilon), asked - 1
        assert found.upper >= attained * (1.0 - 2e-3) - 1e-11, (profile, epsilon)
        assert found.lower <= never * (1.0 + 2e-3) + 1e-11, (profile, epsilon)
