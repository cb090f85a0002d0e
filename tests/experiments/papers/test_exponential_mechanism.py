"""The exponential mechanism draws by its law."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import pytest
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
