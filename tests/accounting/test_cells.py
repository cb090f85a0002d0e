"""Cells: the normal law's mass in them is accurate, and a spread keeps both laws' mass."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest

from accounting.cells import log_mean_above, log_normal_cells, spread

STEP = 0.3


def test_normal_masses_keep_relative_accuracy_in_both_tails():
    edges = np.array([-math.inf, -30.0, -29.9, -1.0, 2.0, 2.5, 30.0, 30.5, math.inf])
    got = log_normal_cells(edges)
    with mpmath.workdps(60):
        for k, mass in enumerate(got):
            # Both sides by the lower tail, which 60 digits do not cancel.
            low, high = sorted(-abs(e) if edges[k] >= 0 else e for e in edges[k : k + 2])
            exact = mpmath.log(mpmath.ncdf(high) - mpmath.ncdf(low))
            assert mass == pytest.approx(float(exact), rel=1e-13)


def cells(rng, count):
    """Masses of cells [e^{k STEP}, e^{(k+1) STEP}), one of them empty; the last never ends."""
    q = rng.dirichlet(np.ones(count))
    q[rng.integers(count)] = 0.0
    above = rng.uniform(size=count)
    above[-1] *= 3.0
    return q * np.exp((np.arange(count) + above) * STEP), q


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_a_spread_is_on_the_grid_keeps_both_masses_and_lowers_no_convex_mean(bounded, seed):
    p, q = cells(np.random.default_rng(seed), 12)
    got = spread(STEP, p, q, log_mean_above(0, STEP, p, q), bounded=bounded)
    assert got.q.sum() + got.zero == pytest.approx(q.sum(), rel=1e-12)
    assert got.p.sum() + got.infinity == pytest.approx(p.sum(), rel=1e-12)
    assert min(got.q.min(), got.p.min(), got.zero, got.infinity) >= 0.0
    some = got.q > 0.0
    np.testing.assert_allclose(
        np.log(got.p[some] / got.q[some]), STEP * np.flatnonzero(some), atol=1e-9
    )
    for a in np.exp(np.arange(-2, 15) * 0.25):
        before = np.maximum(p - a * q, 0.0).sum()
        assert np.maximum(got.p - a * got.q, 0.0).sum() + got.infinity >= before * (1 - 1e-12)
        before = np.maximum(q - a * p, 0.0).sum()
        assert np.maximum(got.q - a * got.p, 0.0).sum() + got.zero >= before * (1 - 1e-12)
