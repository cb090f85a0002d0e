"""What is said of an attack's accuracy holds of every attack, and some attack attains it."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import Bound, attack_accuracy
from accounting.attack import implied_advantage

LAWS = st.lists(st.integers(0, 20), min_size=4, max_size=4).filter(any)


def law(weights):
    return np.array(weights) / sum(weights)


def accuracies(p, q):
    """The accuracy of every deterministic attack that sees one of four outcomes."""
    for says in itertools.product([0.0, 1.0], repeat=4):
        heads = np.array(says)
        yield 0.5 * (p @ heads) + 0.5 * (q @ (1.0 - heads))


def distance(p, q):
    return 0.5 * np.abs(p - q).sum()


# --- the game -------------------------------------------------------------------------------------


@given(LAWS, LAWS)
def test_best_attack_is_right_with_half_of_one_plus_the_distance(first, second):
    p, q = law(first), law(second)
    bound = attack_accuracy(Bound(distance(p, q), distance(p, q)))
    best = max(accuracies(p, q))
    assert best == pytest.approx(0.5 * (1.0 + distance(p, q)))
    assert bound.lower - 1e-12 <= best <= bound.upper + 1e-12


@given(LAWS, LAWS, st.floats(0.0, 5.0))
def test_no_pair_has_more_than_its_epsilon_and_delta_imply(first, second, epsilon):
    p, q = law(first), law(second)
    delta = max(np.maximum(a - math.exp(epsilon) * b, 0.0).sum() for a, b in ((p, q), (q, p)))
    assert distance(p, q) <= implied_advantage(epsilon, delta) + 1e-12


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 4.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 0.2])
def test_the_region_of_epsilon_and_delta_is_attained(epsilon, delta):
    # Randomised response that tells the truth outright with probability delta.
    right = (1.0 - delta) / (1.0 + math.exp(-epsilon))
    p = np.array([delta, 0.0, right, 1.0 - delta - right])
    q = np.array([0.0, delta, 1.0 - delta - right, right])
    assert implied_advantage(epsilon, delta) == pytest.approx(distance(p, q), rel=1e-12)


def test_what_implies_nothing_or_is_no_guarantee():
    assert implied_advantage(800.0, 0.0) == implied_advantage(0.0, 1.0) == 1.0
    with pytest.raises(ValueError, match="epsilon must be"):
        implied_advantage(math.inf, 0.0)
    with pytest.raises(ValueError, match="delta must be"):
        implied_advantage(1.0, 1.5)
