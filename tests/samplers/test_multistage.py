"""Multistage draws: their exact law, their keys, their shapes, their costs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from samplers import Multistage, UnitTree
from samplers.population import UnitData

FALSE_ALARM = 1e-6

# Units of 3, 2 and 4 examples, the rows in no order.
SHOP = {"shop": np.array(list("baccbacbc"))}
TREE = UnitTree.from_columns(SHOP)


def even(*sizes):
    """A tree whose units of level j - 1 all have sizes[j - 1] children."""
    return UnitTree.even(sizes, [f"level {level}" for level in range(1, len(sizes))])


@pytest.mark.short("sizes0*", "sizes1*", "sizes2*", "sizes3*")
@pytest.mark.parametrize(
    ("sizes", "draws"),
    [
        ((5,), (2,)),
        ((5,), (5,)),
        ((5,), (4,)),
        ((9,), (2,)),
        ((5, 3), (2, 2)),
        ((3, 3), (1, 1)),
        ((2, 2), (1, 2)),
    ],
)
def test_episodes_have_their_exact_law_in_order(assert_law, sizes, draws):
    # Every ordered outcome is a cell: subsets, orders and the independence of units are implied.
    sampler = Multistage(even(*sizes), draws)
    outcomes = [list(itertools.permutations(range(sizes[0]), draws[0]))]
    if len(draws) == 2:
        inner = list(itertools.permutations(range(sizes[1]), draws[1]))
        outcomes = [
            [
                tuple(u * sizes[1] + leaf for u, leaves in zip(units, below, strict=True)
                      for leaf in leaves)
                for units in outcomes[0]
                for below in itertools.product(inner, repeat=draws[0])
            ]
        ]  # fmt: skip
    counts = dict.fromkeys(outcomes[0], 0)
    for seed in range(max(2000, 7 * len(counts))):
        counts[tuple(sampler.episode(seed, 3).examples.ravel().tolist())] += 1
    assert_law(np.array(list(counts.values())), np.full(len(counts), 1 / len(counts)))


@pytest.mark.parametrize("size", [40, 65, 1000, 2**20 + 7])
def test_large_draws_are_distinct_and_uniform(assert_law, size):
    count = 32
    sampler = Multistage(even(size), (count,))
    first, inside = np.zeros(8), np.zeros(8)
    for seed in range(800):
        drawn = sampler.episode(seed, 0).examples
        assert np.unique(drawn).size == count
        assert drawn.min() >= 0
        assert drawn.max() < size
        first[drawn[0] * 8 // size] += 1
        inside += np.bincount(drawn * 8 // size, minlength=8)
    cells = np.bincount(np.arange(size) * 8 // size, minlength=8) / size
    assert_law(first, cells)
    # Hypergeometric counts spread less than the binomial ones that are tested for.
    for seen, probability in zip(inside, cells, strict=True):
        assert stats.binomtest(int(seen), 800 * count, probability).pvalue > FALSE_ALARM


def test_an_episode_names_the_unit_of_each_example():
    tree = even(4, 5, 6)
    sampler = Multistage(tree, (2, 3, 4), steps=5)
    for step in range(5):
        episode = sampler.episode(11, step)
        assert episode.examples.shape == (2, 3, 4)
        assert [units.shape for units in episode.units] == [(2,), (2, 3)]
        position = np.argsort(tree.leaves)[episode.examples]
        for level in (1, 2):
            units = episode.units[level - 1].reshape(
                *episode.units[level - 1].shape, *[1] * (3 - level)
            )
            assert np.all(position // (30 if level == 1 else 6) == units)
        assert episode.examples.dtype == episode.units[1].dtype == np.int32


# ----------------------------------------------------------------------------- what it costs


def test_user_under_two_parents_is_protected_within_one():
    visits = {"shop": [0, 0, 1, 1], "user": [5, 6, 5, 6]}  # each user is two units
    tree = UnitTree.from_columns(visits)
    wanted = {1: "shop", 2: "user within one shop", 3: "example"}
    for level, unit in wanted.items():
        population = UnitData.of_tree(tree, visits).population
        levels = {"clipped_level": level, "protected_level": level}
        sampler = Multistage(tree, (1, 1, 1), steps=2, **levels)
        assert sampler.protected_unit(population) == sampler.unit == unit


def test_a_sum_that_shows_which_units_were_drawn_is_warned_of():
    (warning,) = Multistage(TREE, (1, 2), steps=50).caveats(3.0, 1e-5)
    assert "another shop in the place of a drawn one moves the sum by up to 4 C" in warning
    assert Multistage(TREE, (1, 2), steps=50).caveats(4.0, 1e-5) == ()
    assert Multistage(TREE, (1, 2), clipped_level=1).caveats(0.1, 1e-5) == ()
