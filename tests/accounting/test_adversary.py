"""Three hundred random questions, answered independently: by mpmath, quadrature and convolution."""

import math

import mpmath
import numpy as np
import pytest
from scipy import stats

from accounting import BallsAndBinsProfile, GaussianProfile, PoissonProfile, UserPoissonProfile
from accounting.releases import with_gaussian_release
from samplers import BallsAndBins, Deterministic, Poisson, Shuffle

UNCUT = {"overflow": "accumulate"}


# --- laws of X = dP/dQ as (Q-mass, X) at nodes, by the trapezoid rule


def nodes(sigma, dimensions, points, shift=1.0):
    axis, step = np.linspace(-8.5 * sigma, shift + 8.5 * sigma, points, retstep=True)
    mass = stats.norm.pdf(axis, 0.0, sigma) * step
    each = np.meshgrid(*[axis] * dimensions, indexing="ij")
    return [x.ravel() for x in each], np.prod(np.meshgrid(*[mass] * dimensions), axis=0).ravel()


def mixture(sigma, weights):
    """One coordinate; `weights` of the means."""
    (z,), q = nodes(sigma, 1, 4001, max(weights))
    return q, sum(w * np.exp((m * z - 0.5 * m * m) / sigma**2) for m, w in weights.items())


def gaussian(sigma):
    return mixture(sigma, {1.0: 1.0})


def sampled(sigma, rate):
    return mixture(sigma, {0.0: 1.0 - rate, 1.0: rate})


def released_bins(sigma, bins, times):
    """One of `bins` bins, of which one or two are released, each so many `times`."""
    z, q = nodes(sigma, len(times), {1: 4001, 2: 801}[len(times)], math.sqrt(max(times)))
    terms = (np.exp((math.sqrt(m) * x - 0.5 * m) / sigma**2) for m, x in zip(times, z, strict=True))
    return q, 1.0 - len(times) / bins + sum(terms) / bins


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


def exact_gaussian(sigma, epsilon):
    with mpmath.workdps(50):
        s, e = mpmath.mpf(sigma), mpmath.mpf(epsilon)
        tails = [mpmath.ncdf(sign / (2 * s) - s * e) for sign in (1, -1)]
        return float(tails[0] - mpmath.exp(e) * tails[1])


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
    truth = exact_gaussian(sigma, epsilon)
    return GaussianProfile(sigma), truth, truth


def known_order(rng, sigma, epsilon):
    first, second = int(rng.integers(1, 9)), int(rng.integers(1, 9))
    sampler = Deterministic(80, 10)
    attempts = [range(first), range(second - 1, 8)]
    truth = exact_gaussian(sigma / math.sqrt(2 if second <= first else 1), epsilon)
    return sampler.privacy_of(sigma, attempts, same_rows=True), truth, truth


def one_step(rng, sigma, epsilon):
    b = int(rng.integers(1, 900))
    truth = exact_sampled(sigma, b / 1000, epsilon)
    return Poisson(1000, b, **UNCUT).privacy_of(sigma, [range(1)]), truth, truth


def two_steps(rng, sigma, epsilon):
    b = int(rng.integers(10, 500))
    sampler = Poisson(1000, b, **UNCUT)
    law = sampled(sigma, b / 1000)
    truth = divergence(epsilon, law, law)
    return sampler.privacy_of(sigma, [range(1), range(1)]), truth, truth


def two_bins(rng, sigma, epsilon):
    truth = divergence(epsilon, released_bins(sigma, 2, (1, 1)))
    return BallsAndBins(200, 100, **UNCUT).privacy(sigma), truth, truth


def two_epochs(rng, sigma, epsilon):
    law = released_bins(sigma, 2, (1, 1))
    truth = divergence(epsilon, law, law)
    return BallsAndBins(200, 100, 2, **UNCUT).privacy(sigma), truth, truth


def partial_epoch(rng, sigma, epsilon):
    bins, released = int(rng.integers(2, 60)), int(rng.integers(1, 3))
    first = int(rng.integers(0, bins - released + 1))
    price = BallsAndBins(bins * 10, 10, **UNCUT).privacy_of(sigma, [range(first, first + released)])
    truth = divergence(epsilon, released_bins(sigma, bins, (1,) * released))
    return price, truth, truth


def two_attempts(rng, sigma, epsilon):
    bins = int(rng.integers(2, 60))
    ends = [int(rng.integers(1, 3)) for _ in range(2)]
    price = BallsAndBins(bins * 10, 10, **UNCUT).privacy_of(sigma, [range(k) for k in ends])
    laws = (released_bins(sigma, bins, (1,) * k) for k in ends)
    truth = divergence(epsilon, *laws)
    return price, truth, truth


def fixed_bins(rng, sigma, epsilon):
    epochs = int(rng.integers(2, 5))
    sampler = BallsAndBins(200, 100, epochs, assignment="fixed", **UNCUT)
    steps = int(rng.integers(2, 2 * epochs + 1))
    truth = divergence(epsilon, released_bins(sigma, 2, (-(-steps // 2), steps // 2)))
    return sampler.privacy_of(sigma, [range(steps)]), truth, truth


def shuffled(rng, sigma, epsilon):
    steps = int(rng.integers(1, 3))  # of two: one may be half an epoch
    truth = divergence(epsilon, released_bins(sigma, 2, (1,) * steps))
    price = Shuffle(200, 100).privacy_of(sigma, [range(steps)])
    return price, truth, exact_gaussian(sigma, epsilon)


def kept_probability(rows, rate, cap):
    """With which an example is drawn, and not cut."""
    others = np.arange(rows)
    return rate * stats.binom.pmf(others, rows - 1, rate) @ np.minimum(1.0, cap / (others + 1))


def cut_batches(rng, sigma, epsilon):
    b = int(rng.integers(2, 60))
    cap = int(b + rng.integers(1, 5) * math.sqrt(b) + 1)
    law = sampled(sigma, kept_probability(400, b / 400, cap))
    steps = int(rng.integers(1, 3))
    truth = divergence(epsilon, *[law] * steps)
    price = Poisson(400, b, max_batch_size=cap).privacy_of(sigma, [range(steps)])
    return price, truth, truth  # the other rows are zeros: the pair of the lower end


def cut_bins(rng, sigma, epsilon):
    bins = int(rng.integers(2, 30))
    cap = int(20 + rng.integers(1, 5) * math.sqrt(20))
    law = sampled(sigma, kept_probability(20 * bins, 1 / bins, cap))
    attempts = [range(1)] * int(rng.integers(1, 3))
    truth = divergence(epsilon, *[law] * len(attempts))
    price = BallsAndBins(20 * bins, 20, max_batch_size=cap).privacy_of(sigma, attempts)
    return price, truth, truth


def users(rng, sigma, epsilon):
    tau, rate, noise = int(rng.integers(2, 6)), float(rng.uniform(0.01, 0.4)), 2.0 * sigma
    weights = {float(k): stats.binom.pmf(k, tau, rate) for k in range(tau + 1)}
    truth = divergence(epsilon, mixture(noise, weights), gaussian(3.0))
    product = with_gaussian_release(UserPoissonProfile(noise, 1, rate, tau), 3.0)
    return product, truth, truth


def beside_a_release(rng, sigma, epsilon):
    release = float(rng.uniform(0.7, 3.0))
    if rng.integers(2):
        profile, law = BallsAndBinsProfile(sigma, 2), released_bins(sigma, 2, (1, 1))
    else:
        profile, law = PoissonProfile(sigma, 0.3, 1), sampled(sigma, 0.3)
    truth = divergence(epsilon, law, gaussian(release))
    return with_gaussian_release(profile, release), truth, truth


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
