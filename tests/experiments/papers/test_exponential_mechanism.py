"""The exponential mechanism draws by its law, and costs what is said of it, and no less."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from experiments.papers.exponential_mechanism import exponential_mechanism

FALSE_ALARM = 1e-6


def law(costs, epsilon, sensitivity, one_sided):
    """Returns the probabilities that are claimed."""
    rate = epsilon / sensitivity / (1 if one_sided else 2)
    weights = np.exp(-rate * (np.asarray(costs, float) - float(min(costs))))
    return weights / weights.sum()


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("costs", [[0, 3, 5, 20, 7], [Fraction(1, 3), Fraction(9), Fraction(4)]])
def test_it_draws_by_its_law(costs, one_sided):
    randbelow = random.Random(2).randrange
    how = {"epsilon": 1.7, "sensitivity": 5, "one_sided": one_sided}
    drawn = [exponential_mechanism(costs, **how, randbelow=randbelow) for _ in range(4000)]
    expected = law(costs, **how) * len(drawn)
    assert stats.chisquare(np.bincount(drawn, minlength=len(costs)), expected).pvalue > FALSE_ALARM


costs_of_a_user = st.lists(st.integers(0, 8), min_size=4, max_size=4).map(np.array)


@given(st.lists(st.integers(0, 60), min_size=4, max_size=4).map(np.array), costs_of_a_user,
       costs_of_a_user, st.floats(0.1, 5))  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_a_user_who_is_removed_or_zeroed_out_costs_half_of_one_who_is_replaced(
    others, one, other, epsilon
):
    with_one, with_other = (law(others + user, epsilon, 8, True) for user in (one, other))
    without = law(others, epsilon, 8, True)
    assert np.abs(np.log(with_one / without)).max() <= epsilon * (1 + 1e-9)
    assert np.abs(np.log(with_one / with_other)).max() <= 2 * epsilon * (1 + 1e-9)
    half, other_half = (law(others + user, epsilon, 8, False) for user in (one, other))
    assert np.abs(np.log(half / other_half)).max() <= epsilon * (1 + 1e-9)


def test_no_smaller_epsilons_hold():
    others, one, other = np.array([400, 0]), np.array([8, 0]), np.array([0, 8])
    with_one, with_other, without = (
        law(others + user, 1.0, 8, True)[0] for user in (one, other, np.array([0, 0]))
    )
    assert np.log(without / with_one) == pytest.approx(1.0)
    assert np.log(with_other / with_one) == pytest.approx(2.0)
