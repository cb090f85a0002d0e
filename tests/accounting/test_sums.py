"""Sums of atoms on a geometric grid are those of all pairs, one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from accounting.sums import Pairs

STEP = 0.2


def atoms(seed, size):
    """Q-masses of `size` atoms, some of them 0."""
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.ones(size)) * (rng.random(size) < 0.8)


CASES = [(12, 0, 12, 0, True), (12, 0, 7, 3, False), (5, 40, 60, 0, False), (3, 0, 4, 90, False)]


@pytest.mark.parametrize(("x_size", "x_start", "y_size", "y_start", "symmetric"), CASES)
def test_pairs_are_split_so_as_to_keep_mass_and_mean(x_size, x_start, y_size, y_start, symmetric):
    x = atoms(0, x_size)
    y = x if symmetric else atoms(1, y_size)
    size = max(x_start + x_size, y_start + y_size) + math.ceil(math.log(2.0) / STEP) + 2
    out, expected = np.zeros(size), np.zeros(size)
    Pairs(STEP, symmetric).add_upper(out, x, x_start, y, y_start)
    grid = np.exp(np.arange(size) * STEP)
    for i, x_mass in enumerate(x, x_start):
        for j, y_mass in enumerate(y, y_start):
            value = grid[i] + grid[j]
            below = int(np.searchsorted(grid, value, side="right")) - 1
            up = (value - grid[below]) / (grid[below + 1] - grid[below])
            expected[below] += x_mass * y_mass * (1 - up)
            expected[below + 1] += x_mass * y_mass * up
    np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize(("x_size", "x_start", "y_size", "y_start", "symmetric"), CASES)
def test_contracted_pairs_keep_all_of_both_masses(x_size, x_start, y_size, y_start, symmetric):
    x = atoms(0, x_size)
    y = x if symmetric else atoms(1, y_size)
    x_p = x * np.exp((x_start + np.arange(x_size)) * STEP)
    y_p = y * np.exp((y_start + np.arange(y_size)) * STEP)
    size = max(x_start + x_size, y_start + y_size) + math.ceil(math.log(2.0) / STEP) + 2
    q, p = np.zeros(size), np.zeros(size)
    Pairs(STEP, symmetric).add_lower(q, p, (x, x_p), x_start, (y, y_p), y_start)
    assert q.sum() == pytest.approx(x.sum() * y.sum(), rel=1e-12)
    assert p.sum() == pytest.approx(x_p.sum() * y.sum() + x.sum() * y_p.sum(), rel=1e-12)
