"""The best of a random number of private trials costs what the theorem says, and no less."""

import math

import numpy as np
import pytest
from scipy import integrate, optimize, special, stats

from accounting import Bound, GaussianProfile, SelectionProfile, TrialCount, epsilon
from accounting.profile import Profile
from accounting.releases import EnvelopeProfile

COUNTS = [TrialCount(m, shape) for m in (1.5, 10.0, 50.0) for shape in (-0.5, 0.0, 1.0, 3.0)]


def weights(count, size=200_000):
    """The law of K by its recurrence, normalised by hand: an independent reading of the sources."""
    gamma = count.gamma
    k = np.arange(1, size)
    steps = np.log((1 - gamma) * (k + count.shape) / (k + 1))
    log_w = np.concatenate([[0.0], np.cumsum(steps)])
    w = np.exp(log_w - log_w.max())
    return w / w.sum()


@pytest.mark.parametrize("shape", [5e-324, -1e-310])
def test_shapes_whose_products_underflow_are_refused(shape):
    with pytest.raises(ValueError, match="shape"):
        TrialCount(10.0, shape)


@pytest.mark.parametrize("count", COUNTS, ids=str)
def test_one_of_k_events_happens_as_often_as_the_law_of_k_says(count):
    w, share = weights(count), 0.03
    series = 1.0 - w @ (1.0 - share) ** np.arange(1, w.size + 1)
    assert count.hit_probability(share) == pytest.approx(series, rel=1e-6)
    assert count.hit_probability(0.0) == 0.0
    assert count.hit_probability(1.0) == pytest.approx(1.0)
    assert count.hit_probability(1e-14) == pytest.approx(count.mean * 1e-14, rel=1e-6)


# Each way to draw K: short tails and long ones, on both sides of every shape that is special.
DRAWN = [
    *(c for c in COUNTS if c.mean == 10.0),
    *(TrialCount(m, shape) for m, shape in [(10.0, 1e-9), (1.001, 1.0), (40.0, -0.5)]),
    *(TrialCount(m, shape) for m, shape in [(150.0, 0.0), (150.0, 1e-9), (150.0, -1e-9)]),
    *(TrialCount(m, shape) for m, shape in [(500.0, 0.4), (2000.0, 1.0), (5000.0, 3.0)]),
]


class Uniform(np.random.Generator):
    """Generator that returns one number."""

    def __init__(self, number):
        super().__init__(np.random.PCG64(0))
        self.number = number

    def random(self):
        return self.number


@pytest.mark.parametrize("count", DRAWN, ids=str)
def test_draw_inverts_the_law_of_k(count):
    cumulative = np.append(0.0, np.cumsum(weights(count)))
    for u in (0.001, 0.1, 0.5, 0.9, 0.999, 1.0 - 1e-9):
        k = count.draw(Uniform(u))
        assert k == 1 or cumulative[k - 1] < u + 1e-10
        assert cumulative[k] > u - 1e-10


@pytest.mark.parametrize("shape", [0.0, 1.0, 3.0])
def test_draw_ends_where_the_mass_does_and_is_fresh_by_itself(shape):
    count = TrialCount(500.0, shape)
    law = stats.nbinom(shape, count.gamma) if shape else stats.logser(1.0 - count.gamma)
    last = count.draw(Uniform(1.0 - 2.0**-53))
    assert 1e-100 < law.sf(last) < 1e-9  # not as far as the weights are positive
    assert len({count.draw() for _ in range(200)}) > 5


def density(y):
    return math.exp(-0.5 * y * y) / math.sqrt(2 * math.pi)


def slope_of(count):
    """The derivative f'(1 - tail) of K's generating function."""
    gamma, power = count.gamma, count.shape + 1
    return lambda tail: count.mean * (gamma / (gamma + (1 - gamma) * tail)) ** power


def best_of_k_delta(count, eps, *candidates, sign=1):
    """Exact delta of the best of K for N(mu, 1) against N(0, 1), the score rising or falling.

    One of the candidates (mu, share of the others that are better) is drawn, all alike.
    """
    slope, share, total = slope_of(count), 1.0 / len(candidates), 0.0
    for mu, better in candidates:

        def excess(y, mu=mu, better=better):
            p, q = (
                slope(better + share * special.ndtr(sign * (at - y))) * share * density(y - at)
                for at in (mu, 0.0)
            )
            return max(0.0, p - math.exp(eps) * q)

        total += integrate.quad(excess, -10, 10, limit=200, points=[-4, -2, 0, 2, 4])[0]
    return total


# Every shape of K's law; means and sizes of noise take turns, and the others are long.
TRIALS = [
    pytest.param(
        mu, count, marks=() if (3 * i + j) % 5 == 0 else pytest.mark.long, id=f"{mu}-{count}"
    )
    for i, mu in enumerate((0.2, 2.0))
    for j, count in enumerate(COUNTS)
]


@pytest.mark.parametrize(("mu", "count"), TRIALS)
def test_no_score_costs_more_than_the_bound(mu, count):
    profile = SelectionProfile(GaussianProfile(1 / mu), count)
    for eps in (0.0, 0.5, 3.0):
        bound = profile.delta(eps)
        for sign in (-1, 1):
            for direction in (-mu, mu):
                exact = best_of_k_delta(count, eps, (direction, 0.0), sign=sign)
                assert exact <= bound.upper + 1e-9


class RandomisedResponse:
    """The profile of the truth with odds e : 1, which is 1-DP."""

    def delta(self, epsilon: float, tolerance: float = 1e-3) -> Bound:
        value = max(0.0, (math.e - math.exp(epsilon)) / (1 + math.e))
        return Bound(value, value)

    def epsilon(self, delta: float, tolerance: float = 1e-3) -> Bound:
        value = math.log(math.e - delta * (1 + math.e))
        return Bound(value, value)


@pytest.mark.parametrize("count", COUNTS, ids=str)
def test_a_pure_trial_costs_shape_plus_two_times(count):
    """Papernot and Steinke, corollary 3."""
    profile = SelectionProfile(RandomisedResponse(), count)
    assert profile.delta((2 + count.shape) * (1 + 1e-3)).upper == 0.0


@pytest.mark.parametrize("count", COUNTS[:4], ids=str)
def test_epsilon_grows_by_shape_plus_one_times_the_theorems_e(count):
    trial, gamma = GaussianProfile(1.0), count.gamma
    e = optimize.brentq(
        lambda e: (1 - gamma) * trial.delta(e).upper - gamma * math.expm1(e), 1e-9, 50.0
    )
    one, best = (
        p.epsilon(d)
        for p, d in [(trial, 1e-6 / count.mean), (SelectionProfile(trial, count), 1e-6)]
    )
    assert one.lower + (count.shape + 1) * e * (1 - 1e-9) <= best.upper
    assert best.upper <= 1.01 * (one.upper + (count.shape + 1) * e)


class Estimated(Profile):
    """An interval that holds with some confidence."""

    def answer(self, question):
        return Bound(0.1, 0.2, confidence=0.9)


def test_an_estimate_of_one_trial_gives_no_cost_of_many():
    profile = SelectionProfile(Estimated(), TrialCount(10.0))
    with pytest.raises(ValueError, match="must be proved"):
        profile.epsilon(1e-3)
    with pytest.raises(ValueError, match="must be proved"):
        profile.delta(5.0)


def test_envelope_is_the_largest_profile_at_every_epsilon():
    # N(1, 1) against N(0, 1), and randomised response: each is the larger one somewhere.
    parts = (GaussianProfile(1.0), RandomisedResponse())
    envelope = EnvelopeProfile(parts)
    largest = set()
    for eps in np.linspace(0.0, 3.0, 13):
        bounds = [part.delta(eps) for part in parts]
        assert envelope.delta(eps).upper == max(bound.upper for bound in bounds)
        assert envelope.delta(eps).lower == max(bound.lower for bound in bounds)
        largest.add(int(np.argmax([bound.upper for bound in bounds])))
    assert largest == {0, 1}
    assert epsilon(envelope, 1e-5).upper == epsilon(parts[0], 1e-5).upper
    with pytest.raises(ValueError, match="at least one"):
        EnvelopeProfile(())


def test_best_of_configurations_costs_at_most_the_envelope():
    """The sizes of noise differ, the candidate is drawn, and the score prefers the sharper one."""
    count, eps = TrialCount(10.0, 0.0), 3.0
    sharp, noisy = 1.0, 0.5  # mu of N(mu, 1) against N(0, 1)
    envelope = EnvelopeProfile((GaussianProfile(1 / noisy), GaussianProfile(1 / sharp)))
    bound = SelectionProfile(envelope, count).delta(eps)
    noisy_alone = SelectionProfile(GaussianProfile(1 / noisy), count).delta(eps)
    for direction in (-1, 1):
        # All outcomes of the sharp candidate are better than those of the noisy one.
        candidates = (direction * sharp, 0.0), (direction * noisy, 0.5)
        assert noisy_alone.upper < best_of_k_delta(count, eps, *candidates) <= bound.upper
