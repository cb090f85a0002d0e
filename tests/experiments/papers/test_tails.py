"""Tails of balls-and-bins, against quadrature and draws."""

import numpy as np
import pytest
from scipy import stats

from accounting.max_events import Epoch
from experiments.papers.tails import add_delta_upper_bound, truncated_tail


@pytest.mark.parametrize("bins", [1, 2, 3])
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
