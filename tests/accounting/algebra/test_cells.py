"""Cells: the normal law's mass in them is accurate, and a spread keeps both laws' mass."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from accounting.algebra.cells import (
    log_mean_above,
    log_normal_cells,
    log_tilted_means,
    normal_drift,
    spread,
)

STEP = 0.3


def exact_log_mass(edges, mean, scale):
    ends = [(mpmath.mpf(e) - mpmath.mpf(mean)) / mpmath.mpf(scale) for e in edges]
    low, high = ends if ends[0] < 0 else [-e for e in ends[::-1]]
    return mpmath.log(mpmath.ncdf(high) - mpmath.ncdf(low))


@pytest.mark.parametrize("narrow", [True, False])
def test_cell_masses_are_as_exact_as_promised(narrow):
    rng = np.random.default_rng(1 + narrow)
    loosest = 0.0
    for _ in range(400):
        scale = 10 ** rng.uniform(-2, 3)
        mean = rng.choice([-1, 0, 1]) * scale * 10 ** rng.uniform(-2, 2)
        width = 10 ** (rng.uniform(-8, -1) if narrow else rng.uniform(-1, 1.3))
        left = mean + rng.uniform(-36, 36) * scale
        edges = np.array([left, left + width * scale])
        with mpmath.workdps(60):
            exact = exact_log_mass(edges, mean, scale)
            error = abs(exact - mpmath.mpf(float(log_normal_cells(edges, mean, scale)[0])))
        if exact > -690:
            loosest = max(loosest, float(error / normal_drift(edges, mean, scale)[0]))
    assert 1e-3 < loosest < 0.5


@pytest.mark.parametrize("deviation", [0.01, 1.0, 20.0])
def test_conditional_means_are_as_good_as_promised(deviation):
    rng = np.random.default_rng(2)
    half = 0.5 * deviation**2
    for _ in range(60):
        left = -half + rng.uniform(-12, 12) * deviation
        edges = np.array([left, left + deviation * 10 ** rng.uniform(-6, 0.5)])
        masses = [log_normal_cells(edges, mean, deviation) for mean in (-half, half)]
        mean, error = log_tilted_means(edges, *masses, deviation)
        with mpmath.workdps(60):
            exact = [exact_log_mass(edges, at, deviation) for at in (half, -half)]
            assert abs(exact[0] - exact[1] - mpmath.mpf(float(mean[0]))) <= error[0]


def test_cells_whose_mean_is_unknown_go_to_0_and_infinity():
    p, q = np.array([0.3, 0.2, 0.5, 1e-310]), np.array([0.4, 0.0, 0.0, 0.6])
    got = spread(STEP, p, q, log_mean_above(0, STEP, p, q))
    assert got.infinity >= 0.7
    assert got.zero >= 0.6
    assert got.q.sum() == pytest.approx(0.4)


def cells(rng, count):
    """Masses of cells [e^{k STEP}, e^{(k+1) STEP}), one of them empty; the last never ends."""
    q = rng.dirichlet(np.ones(count))
    q[rng.integers(count)] = 0.0
    above = rng.uniform(size=count)
    above[-1] *= 3.0
    return q * np.exp((np.arange(count) + above) * STEP), q


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_spread_keeps_both_masses_and_lowers_no_convex_mean(bounded, seed):
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
