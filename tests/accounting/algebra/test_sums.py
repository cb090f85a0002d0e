"""Sums of atoms on a geometric grid are those of all pairs, one by one."""

from __future__ import annotations

import numpy as np
import pytest

from accounting.algebra.sums import Atoms, Pairs

STEP = 0.2


def atoms(seed, size):
    """Q-masses of `size` atoms, some of them 0."""
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.ones(size)) * (rng.random(size) < 0.8)


CASES = [(12, 0, 12, 0, True), (12, 0, 7, 3, False), (5, 40, 60, 0, False), (3, 0, 4, 90, False)]


def pair_of_laws(x_size, x_start, y_size, y_start, symmetric):
    x = law(atoms(0, x_size), x_start)
    return x, x if symmetric else law(atoms(1, y_size), y_start)


def law(q, start):
    """A law whose atoms are at their grid points."""
    value = np.exp((start + np.arange(q.size)) * STEP)
    return Atoms(start, q, q * value, q * value, q)


@pytest.mark.parametrize(("x_size", "x_start", "y_size", "y_start", "symmetric"), CASES)
def test_pairs_are_split_so_as_to_keep_mass_and_mean(x_size, x_start, y_size, y_start, symmetric):
    x, y = pair_of_laws(x_size, x_start, y_size, y_start, symmetric)
    start, q, p = Pairs(STEP, symmetric).upper(x, y)
    expected = np.zeros(q.size)
    grid = np.exp((start + np.arange(q.size)) * STEP)
    for x_mass, x_value in zip(x.q, x.p / np.maximum(x.q, 1e-300), strict=True):
        for y_mass, y_value in zip(y.q, y.p / np.maximum(y.q, 1e-300), strict=True):
            value = x_value + y_value
            if x_mass * y_mass == 0.0:
                continue
            below = int(np.searchsorted(grid, value, side="right")) - 1
            up = (value - grid[below]) / (grid[below + 1] - grid[below])
            expected[below] += x_mass * y_mass * (1 - up)
            expected[below + 1] += x_mass * y_mass * up
    np.testing.assert_allclose(q, expected, rtol=1e-9, atol=1e-300)
    np.testing.assert_allclose(p, expected * grid, rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize(("x_size", "x_start", "y_size", "y_start", "symmetric"), CASES)
def test_contracted_pairs_keep_all_of_both_masses(x_size, x_start, y_size, y_start, symmetric):
    x, y = pair_of_laws(x_size, x_start, y_size, y_start, symmetric)
    one = x_start + x_size // 2 + 3
    out = Pairs(STEP, symmetric, one).lower(x, y)
    below = out.start + np.arange(out.q.size) < one
    grid = np.exp((out.start + np.arange(out.q.size)) * STEP)
    q, p = np.where(below, out.q, out.s / grid), np.where(below, out.t * grid, out.p)
    assert q.sum() == pytest.approx(x.q.sum() * y.q.sum(), rel=1e-12)
    assert p.sum() == pytest.approx(x.p.sum() * y.q.sum() + x.q.sum() * y.p.sum(), rel=1e-12)
    # No atom is further from its grid point than half a step, nor are means of several.
    occupied = q > 0.0
    assert (abs(np.log(p[occupied] / q[occupied] / grid[occupied])) <= 0.5001 * STEP).all()


def test_sums_lie_on_the_window_they_can_reach_at_any_step():
    """One that begins at the summands would have log 2/step points: 7e7, of which 40 are used."""
    x = Atoms(0, *np.full((4, 20), 0.05))
    for out in (Pairs(1e-8, True).upper(x, x)[1], Pairs(1e-8, True, 10**9).lower(x, x).q):
        assert out.size < 40
        assert out.sum() == pytest.approx(1.0)
