"""Poisson within random units: its exact law, its cap, its cost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from accounting import default_delta
from samplers import BatchSource, UnitsThenPoisson, UnitTree

FALSE_ALARM = 1e-6

# Units of 3, 2 and 4 examples, the rows in no order.
SHOP = {"shop": np.array(list("baccbacbc"))}
TREE = UnitTree.from_columns(SHOP)


def test_poisson_within_units_has_its_law():
    sampler = UnitsThenPoisson(TREE, (2,), 0.5, steps=40, max_batch_size=9)
    counts, pairs, both_units = np.zeros(9), 0, 0
    for seed in range(3000):
        drawn = sampler.members(seed, 1)
        assert np.all(np.diff(drawn) > 0)
        counts[drawn] += 1
        pairs += np.isin([0, 4], drawn).all()  # of one shop
        both_units += np.unique(SHOP["shop"][drawn]).size == 3
    assert both_units == 0
    deviation = math.sqrt(3000 * (1 / 3) * (2 / 3))
    assert np.all(np.abs(counts - 1000) <= stats.norm.isf(FALSE_ALARM / 18) * deviation)
    assert stats.binomtest(int(pairs), 3000, 2 / 3 / 4).pvalue > FALSE_ALARM
    assert sampler.expected_batch_size == pytest.approx(3.0)


def test_the_cut_of_poisson_within_units_is_uniform():
    sampler = UnitsThenPoisson(TREE, (2,), 0.3, steps=10, max_batch_size=4)
    members = np.arange(10, 17, dtype=np.int32)
    survivors = np.zeros(7)
    for seed in range(3000):
        (kept,) = sampler.passes(members, seed, 0)
        assert kept.size == 4
        survivors[kept - 10] += 1
    deviation = math.sqrt(3000 * 4 / 7 * 3 / 7)
    assert np.all(np.abs(survivors - 12000 / 7) <= stats.norm.isf(FALSE_ALARM / 14) * deviation)
    assert BatchSource(sampler, 3).batch(0).indices.shape == (4,)


def test_default_cap_within_units_is_the_smallest_cheap_cap(
    even_tree,
):
    sampler = UnitsThenPoisson(even_tree(20, 500), (4,), 0.1, steps=100)
    assert sampler.expected_batch_size == pytest.approx(200)
    costs = [
        100 * cap / 2000 * stats.binom.sf(cap, 2000, 0.1)
        for cap in (sampler.padded_batch_size, sampler.padded_batch_size - 1)
    ]
    assert costs[0] <= 0.01 * default_delta(10_000) < costs[1]
    assert sampler.with_epochs(200).padded_batch_size == sampler.padded_batch_size
