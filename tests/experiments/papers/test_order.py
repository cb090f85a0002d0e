"""Balls-and-bins against Poisson sampling: which costs less, where that changes, and the proof.

docs/explanation/balls-and-bins-against-poisson.md (theorem D.1 of arXiv:2412.16802).
"""

import itertools
import math

import numpy as np
import pytest

from accounting import BallsAndBinsProfile, Bound, GaussianProfile, PoissonProfile
from experiments.papers.monte_carlo import MonteCarloProfile
from experiments.papers.order import compare, crossing

LONG = pytest.mark.long


def pair(sigma, steps, epochs=1):
    poisson = PoissonProfile(sigma, 1.0 / steps, steps * epochs)
    return BallsAndBinsProfile(sigma, steps, epochs), poisson


@pytest.mark.parametrize(
    ("sigma", "steps", "epochs"),
    [
        (0.3, 2, 1),
        (10.0, 1000, 1),
        (3.0, 10, 5),
        *(pytest.param(*case, marks=LONG) for case in [(10.0, 36_000, 1), (0.5, 1000, 20)]),
    ],
)
def test_balls_and_bins_is_worse_at_epsilon_0(sigma, steps, epochs):
    order = compare(*pair(sigma, steps, epochs), 0.0)
    assert order.sign == 1
    assert order.second.upper < order.first.lower


@pytest.mark.parametrize(
    ("sigma", "steps", "near"),
    [
        pytest.param(1.0, 2, 0.531, marks=LONG),
        (3.0, 100, 0.0019),
        pytest.param(0.2, 2, 11.9, marks=LONG),
        pytest.param(1.0, 36_000, 1.16e-4, marks=LONG),
    ],
)
def test_the_curves_cross_between_the_two_ends(sigma, steps, near):
    curves = pair(sigma, steps)
    found = crossing(*curves, guess=3.0 * near, ratio=1.02)
    assert compare(*curves, found.lower).sign == 1
    assert compare(*curves, found.upper).sign == -1
    assert found.lower == pytest.approx(near, rel=0.03)
    assert found.upper <= 1.02 * found.lower


def test_what_cannot_be_told_apart_is_undecided():
    one = GaussianProfile(1.0)
    assert compare(one, one, 1.0).sign == 0
    assert compare(one, GaussianProfile(2.0), 1.0).sign == 1
    with pytest.raises(ValueError, match="not certified smaller up to epsilon"):
        crossing(one, one)


def test_estimates_certify_no_order():
    estimate = MonteCarloProfile(1.0, 10, num_samples=1000)
    assert estimate.delta(1.0).upper < GaussianProfile(0.2).delta(1.0).lower
    assert compare(estimate, GaussianProfile(0.2), 1.0).sign == 0


class Loose:
    """A profile whose bounds are as wide as they may be, and once a note says why."""

    def __init__(self, delta, note=""):
        self.value, self.note, self.asked = delta, note, []

    def delta(self, epsilon, tolerance=1e-3):
        self.asked.append(tolerance)
        return Bound(self.value * (1 - tolerance), self.value, note=self.note)

    def epsilon(self, delta, tolerance=1e-3):
        raise NotImplementedError


def test_bounds_are_sharpened_only_while_that_may_decide():
    one, other = Loose(1.0), Loose(1.0 - 1e-4)
    assert compare(one, other, 1.0).sign == 1
    assert one.asked == other.asked == [1e-2, 1e-3, 1e-5]
    noted = Loose(1.0, "no finer grid")
    assert compare(noted, Loose(1.0), 1.0).sign == 0
    assert noted.asked == [1e-2]
    for near in (0.995, 1.005):  # intervals that overlap
        assert compare(Loose(near, "no finer grid"), Loose(1.0, "no finer grid"), 1.0).sign == 0


def released(sigma, steps, nodes):
    """Nodes and weights of Q in R^T, and the density ratio of N(n, sigma^2 I) there."""
    u = np.linspace(-7.0, 7.0 + 2.5 / sigma, nodes)
    one = np.exp(-0.5 * u * u) / math.sqrt(2 * math.pi) * (u[1] - u[0])
    axes = np.meshgrid(*[u] * steps, indexing="ij")
    weight = np.prod(np.meshgrid(*[one] * steps, indexing="ij"), axis=0)

    def ratio(n):
        shift = sum(count * axis for count, axis in zip(n, axes, strict=True))
        return np.exp(shift / sigma - sum(k * k for k in n) / (2 * sigma**2))

    return weight, ratio


@pytest.mark.short("1.0-*", "4.0-*")
@pytest.mark.parametrize(
    ("sigma", "steps", "nodes"),
    [(0.5, 2, 201), (1.0, 3, 61), (4.0, 3, 41)],
)
def test_each_step_of_the_proof_at_epsilon_0_holds_by_quadrature(sigma, steps, nodes):
    weight, ratio = released(sigma, steps, nodes)

    def variation(x):
        return float(np.sum(weight * np.maximum(x - 1.0, 0.0)))

    apart, again = {0: 0.0}, {0: 0.0}
    bernoulli = 0.0
    for k in range(1, steps + 1):
        subsets = [np.isin(range(steps), s) for s in itertools.combinations(range(steps), k)]
        without = sum(ratio(s) for s in subsets) / len(subsets)
        throws = list(itertools.product(range(steps), repeat=k))
        counts = [np.bincount(throw, minlength=steps) for throw in throws]
        apart[k], again[k] = variation(without), variation(sum(map(ratio, counts)) / len(throws))
        # Of equally many balls, those in different bins make a rising statistic smallest.
        statistic = weight * without / (1.0 + without)
        least = float(np.sum(statistic * ratio(subsets[0])))
        assert all(float(np.sum(statistic * ratio(n))) >= least - 1e-9 for n in counts)
        bernoulli = bernoulli + math.comb(steps, k) * (steps - 1) ** (steps - k) * without
    balls = apart[1]
    poisson = variation((bernoulli + (steps - 1) ** steps) / steps**steps)
    mixture = sum(
        math.comb(steps, k) * (steps - 1) ** (steps - k) / steps**steps * apart[k] for k in apart
    )
    for k in range(1, steps + 1):
        assert apart[k] <= again[k] + 1e-9
        assert again[k] <= k * balls + 1e-9
    # Not proved for more bins: that this is concave, which several epochs would follow from.
    assert (np.diff([apart[k] for k in sorted(apart)], 2) < 0).all()
    assert poisson < mixture <= balls + 1e-9
    for found, profile in zip((balls, poisson), pair(sigma, steps), strict=True):
        bound = profile.delta(0.0, 1e-6)
        assert bound.lower * (1 - 2e-3) <= found <= bound.upper * (1 + 2e-3)


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 2), (0.5, 5)])
def test_two_closed_forms_show_poisson_worse_at_large_epsilon(sigma, steps):
    shift = steps * math.log(steps)
    for epsilon in (200.0, 300.0):
        ceiling = GaussianProfile(sigma).delta(epsilon).upper
        ground = GaussianProfile(sigma / math.sqrt(steps)).delta(epsilon + shift).lower
        assert ceiling < math.exp(-shift) * ground or ceiling < 1e-300
    close = compare(*pair(sigma, steps), 8.0)
    assert close.sign == -1
