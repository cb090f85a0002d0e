"""Multistage draws: their exact law, their keys, their shapes, their prices."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pickle
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from accounting import TruncatedProfile, epsilon
from accounting.multistage import MultistageProfile, UnitsThenPoissonProfile, WorstLeafProfile
from samplers import BatchSource
from samplers.base import CHUNK
from samplers.multistage import Multistage, UnitsThenPoisson
from samplers.tree import TreeShape, UnitTree

FALSE_ALARM = 1e-6

# Units of 3, 2 and 4 examples, the rows in no order.
SHOP = {"shop": np.array(list("baccbacbc"))}
TREE = UnitTree.from_columns(SHOP)


def even_tree(*sizes):
    """A tree whose units of level j - 1 all have sizes[j - 1] children."""
    rows = np.arange(math.prod(sizes))
    columns = {}
    for level in range(len(sizes) - 1):
        columns[f"level {level + 1}"] = rows // math.prod(sizes[level + 1 :])
    if not columns:
        return UnitTree([np.array([0, sizes[0]])], rows.astype(np.int32), [])
    return UnitTree.from_columns(columns)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("xyz")), min_size=1, max_size=40),
    st.permutations(range(40)),
)
@settings(max_examples=50, deadline=None)
def test_the_tree_has_each_row_once_under_its_own_units(rows, shuffle):
    a, b = (np.array(column) for column in zip(*rows, strict=True))
    tree = UnitTree.from_columns({"a": a, "b": b})
    assert sorted(tree.leaves.tolist()) == list(range(len(rows)))
    first, second = (tree.units_of(np.arange(len(rows)), level) for level in (1, 2))
    np.testing.assert_array_equal(tree.labels[0][1][first], a[tree.leaves])
    np.testing.assert_array_equal(tree.labels[1][1][second], b[tree.leaves])
    assert tree.labels[0][1].size == len(set(a.tolist()))
    assert tree.labels[1][1].size == len(set(rows))
    for position, row in enumerate(tree.leaves):
        assert tree.label(2, int(second[position])) == f"a={a[row]}, b={b[row]}"
    places = np.array([place for place in shuffle if place < len(rows)])
    moved = UnitTree.from_columns({"a": a[places], "b": b[places]})
    assert [s.tolist() for s in moved.starts] == [s.tolist() for s in tree.starts]
    assert set(tree.paths()) == {
        (len(set(a.tolist())), len(set(b[a == x].tolist())), int(np.sum((a == x) & (b == y))))
        for x, y in zip(a, b, strict=True)
    }


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
    sampler = Multistage(even_tree(*sizes), draws)
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


def test_inclusion_is_uniform_within_uneven_units(assert_law):
    sampler = Multistage(TREE, (2, 2))
    counts = np.zeros(9)
    for seed in range(4000):
        counts[sampler.members(seed, 0)] += 1
    # Given its unit (2 of 3), each leaf of a unit of m is drawn with probability 2/m.
    size = np.array([{"a": 2, "b": 3, "c": 4}[shop] for shop in SHOP["shop"]])
    expected = 4000 * 2 / 3 * 2 / size
    deviation = np.sqrt(expected * (1 - expected / 4000))
    assert np.all(np.abs(counts - expected) <= stats.norm.isf(FALSE_ALARM / 18) * deviation)


@pytest.mark.parametrize("size", [40, 65, 1000, 2**20 + 7])
def test_large_draws_are_distinct_and_uniform(assert_law, size):
    count = 32
    sampler = Multistage(even_tree(size), (count,))
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
    tree = even_tree(4, 5, 6)
    sampler = Multistage(tree, (2, 3, 4), epochs=5)
    for step in range(5):
        episode = sampler.episode(11, step)
        assert episode.examples.shape == (2, 3, 4)
        assert [units.shape for units in episode.units] == [(2,), (2, 3)]
        position = np.argsort(tree.leaves)[episode.examples]
        for level in (1, 2):
            units = episode.units[level - 1].reshape(
                *episode.units[level - 1].shape, *[1] * (3 - level)
            )
            assert np.all(tree.units_of(position, level) == units)
        assert episode.grouped(1).shape == (2, 12)
        np.testing.assert_array_equal(episode.grouped(2)[0], episode.examples[0, 0])
        assert episode.examples.dtype == episode.units[1].dtype == np.int32


def test_steps_are_independent_draws_and_functions_of_the_seed():
    sampler = Multistage(even_tree(30, 30), (3, 4), epochs=10)
    drawn = {sampler.members(seed, step).tobytes() for seed in (0, 1 << 200) for step in range(10)}
    assert len(drawn) == 20
    np.testing.assert_array_equal(sampler.members(5, 7), sampler.members(5, 7))
    block = BatchSource(sampler, 5).fill(0, 10)
    assert block.indices.shape == (10, 12)
    assert block.weights.all()
    np.testing.assert_array_equal(block.indices[7], sampler.members(5, 7))
    assert (sampler.num_steps, sampler.steps_per_epoch, sampler.expected_batch_size) == (10, 1, 12)


def test_chunks_of_rows_make_up_the_batch(monkeypatch):
    monkeypatch.setattr("samplers.base.CHUNK", 7)
    for sampler in (
        Multistage(even_tree(5, 8), (2, 3)),
        UnitsThenPoisson(even_tree(5, 8), (2,), 0.4),
    ):
        rows = [sampler.participations(9, 0, chunk).examples for chunk in range(sampler.num_chunks)]
        np.testing.assert_array_equal(np.concatenate(rows), sampler.members(9, 0))


def test_a_multistage_sampler_is_a_value():
    for sampler in (
        Multistage(TREE, (2, 2), epochs=3),
        UnitsThenPoisson(TREE, (2,), 0.5, epochs=3),
    ):
        twin = dataclasses.replace(sampler)
        assert sampler == twin
        assert hash(sampler) == hash(twin)
        assert pickle.loads(pickle.dumps(sampler)) == sampler
        assert sampler.with_epochs(4) != sampler
        assert sampler.with_epochs(4).num_steps == 4
    other = UnitTree.from_columns({"shop": SHOP["shop"][::-1]})
    assert Multistage(TREE, (2, 2)) != Multistage(other, (2, 2))
    assert CHUNK == 65_536


# ----------------------------------------------------------------------------- what it costs


def test_the_price_is_that_of_the_worst_leaf_for_all_steps():
    sampler = Multistage(TREE, (1, 2), epochs=50)
    profile = sampler.privacy(3.0)
    assert isinstance(profile, WorstLeafProfile)
    assert sampler.unit == "example"
    assert epsilon(profile, 1e-5) == MultistageProfile(3.0, 50, (1, 2), (3, 2)).epsilon(1e-5)
    stretches = sampler.privacy_of(3.0, [range(10), range(5, 45)])
    assert epsilon(stretches, 1e-5) == epsilon(profile, 1e-5)


def test_units_clipped_together_and_protected_units_have_their_own_prices():
    together = Multistage(TREE, (1, 2), epochs=50, clipped_level=1)
    assert together.unit == "example"
    expected = MultistageProfile(3.0, 50, (1, 2), (3, 2), clipped_level=1).epsilon(1e-5)
    assert epsilon(together.privacy(3.0), 1e-5) == expected
    units = Multistage(TREE, (1, 2), epochs=50, clipped_level=1, protected_level=1)
    assert units.unit == "shop"
    expected = MultistageProfile(3.0, 50, (1,), (3,)).epsilon(1e-5)
    assert epsilon(units.privacy(3.0), 1e-5) == expected


def test_a_sum_that_shows_which_units_were_drawn_is_warned_of():
    (warning,) = Multistage(TREE, (1, 2), epochs=50).caveats(3.0, 1e-5)
    assert "another shop in the place of a drawn one moves the sum by up to 4 C" in warning
    assert Multistage(TREE, (1, 2), epochs=50).caveats(4.0, 1e-5) == ()
    assert Multistage(TREE, (1, 2), clipped_level=1).caveats(0.1, 1e-5) == ()


def test_poisson_within_units_has_its_law_and_price():
    sampler = UnitsThenPoisson(TREE, (2,), 0.5, epochs=40, max_batch_size=9)
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
    assert sampler.privacy(1.0) == UnitsThenPoissonProfile(1.0, 40, 2 / 3, 0.5)


def test_the_cap_of_poisson_within_units_is_priced_and_uniform():
    sampler = UnitsThenPoisson(TREE, (2,), 0.3, epochs=10, max_batch_size=4)
    profile = sampler.privacy(1.0)
    assert isinstance(profile, TruncatedProfile)
    # At most 2 x 4 examples are in two units, so that the cut is no likelier than Binomial(8) > 4.
    assert math.exp(profile.log_overflow_probability) == pytest.approx(
        stats.binom.sf(4, 8, 0.3), rel=1e-6
    )
    members = np.arange(10, 17, dtype=np.int32)
    survivors = np.zeros(7)
    for seed in range(3000):
        (kept,) = sampler.passes(members, seed, 0)
        assert kept.size == 4
        survivors[kept - 10] += 1
    deviation = math.sqrt(3000 * 4 / 7 * 3 / 7)
    assert np.all(np.abs(survivors - 12000 / 7) <= stats.norm.isf(FALSE_ALARM / 14) * deviation)
    assert BatchSource(sampler, 3).batch(0).indices.shape == (4,)


def test_the_default_cap_of_poisson_within_units_costs_next_to_nothing():
    tree = even_tree(20, 500)
    sampler = UnitsThenPoisson(tree, (4,), 0.1, epochs=100)
    assert sampler.expected_batch_size == pytest.approx(200)
    assert 200 < sampler.max_batch_size < 400
    capped, free = (
        epsilon(profile, 1e-5).upper
        for profile in (sampler.privacy(1.0), UnitsThenPoissonProfile(1.0, 100, 0.2, 0.1))
    )
    assert free <= capped <= free + 2e-3
    assert sampler.with_epochs(200).max_batch_size == sampler.max_batch_size


# --------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Multistage(TREE, (2, 3)), r"shop=a has 2 children, fewer than draws\[1\] = 3"),
        (lambda: Multistage(TREE, (4, 1)), r"the root has 3 children, fewer than draws\[0\] = 4"),
        (lambda: UnitsThenPoisson(TREE, (4,), 0.5), "the root has 3 children"),
        (lambda: Multistage(TREE, (2,)), "draws needs 2 entries"),
        (lambda: Multistage(TREE, (2, 0)), r"draws\[1\] must be at least 1"),
        (lambda: Multistage(TREE, (2, 1), epochs=0), "epochs must be at least 1"),
        (lambda: Multistage(TREE, (2, 1), clipped_level=3), "clipped_level must be in"),
        (lambda: Multistage(TREE, (2, 1), protected_level=1), "must be clipped_level = 2 or"),
        (lambda: UnitsThenPoisson(TREE, (2,), 0.0), "sampling_prob must be in"),
        (lambda: UnitsThenPoisson(TREE, (2,), 0.5, max_batch_size=0), "max_batch_size must be"),
        (lambda: UnitTree.from_columns({}), "at least one column"),
        (lambda: UnitTree.from_columns({"a": []}), "at least one example"),
        (lambda: UnitTree.from_columns({"a": [1], "b": [1, 2]}), "one value per example"),
    ],
)
def test_impossible_episodes_are_refused_naming_the_unit(build, message):
    with pytest.raises(ValueError, match=message) as refusal:
        build()
    assert "\n" not in str(refusal.value)


def test_a_unit_deep_in_the_tree_is_named_by_its_path():
    columns = {"partner": [7, 7, 7, 9], "product": ["x", "x", "y", "x"]}
    with pytest.raises(ValueError, match="partner=7, product=y has 1 children"):
        Multistage(UnitTree.from_columns(columns), (1, 1, 2))


def test_draws_from_ten_million_leaves_take_milliseconds():
    leaves = np.arange(10_000_000, dtype=np.int32)
    starts = [np.array([0, 300]), np.arange(301) * 1000, np.linspace(0, 1e7, 300_001).astype(int)]
    names = [("partner", np.arange(300)), ("product", np.arange(300_000))]
    tree = UnitTree(starts, leaves, names)
    for draws in ((8, 64, 16), (64, 16, 8), (2, 256, 16), (256, 8, 4)):
        sampler = Multistage(tree, draws, epochs=20)
        sampler.members(0, 0)
        began = time.process_time()
        for step in range(10):
            assert sampler.members(0, step).size == 8192
        assert (time.process_time() - began) / 10 <= 5e-3


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_the_shape_has_what_the_prices_need_of_the_tree(rows):
    a, b = (np.array(column) for column in zip(*rows, strict=True))
    tree = UnitTree.from_columns({"a": a, "b": b})
    paths, lowest = tree.paths(), tree.shape.worst_paths

    def below(path, other):
        return all(x <= y for x, y in zip(path, other, strict=True))

    assert set(lowest) == {p for p in paths if not any(below(q, p) and q != p for q in paths)}
    assert tree.shape.most_leaves == max(path[-1] for path in paths)
    for level in range(3):
        assert tree.shape.smallest(level)[0] == tree.smallest(level)[0]
    # Of each example, the probability of being reached where each level but the last draws one.
    sizes = [tree.sizes(level) for level in range(3)]
    units = [tree.units_of(np.arange(tree.num_leaves), level) for level in (1, 2)]
    reached = 1 / sizes[0][0] / sizes[1][units[0]]
    assert tree.shape.mean_leaves == pytest.approx(reached.sum(), rel=1e-12)
    assert tree.shape.likeliest((1, 1)) == pytest.approx(reached.max(), rel=1e-12)
    assert TreeShape.from_terms(json.loads(json.dumps(tree.shape.terms()))) == tree.shape == tree
