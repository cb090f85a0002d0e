"""The tree of units: every row once, under its own units, and the shape that costs need."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samplers import UnitTree
from samplers.tree import TreeShape


def units_of(tree, level):
    """The unit of `level` above each leaf, by position."""
    unit = np.arange(tree.num_leaves)
    for starts in reversed(tree.starts[level:]):
        unit = np.searchsorted(starts, unit, side="right") - 1
    return unit


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("xyz")), min_size=1, max_size=40),
    st.permutations(range(40)),
)
@settings(max_examples=50, deadline=None)
def test_the_tree_has_each_row_once_under_its_own_units(rows, shuffle):
    a, b = (np.array(column) for column in zip(*rows, strict=True))
    tree = UnitTree.from_columns({"a": a, "b": b})
    assert sorted(tree.leaves.tolist()) == list(range(len(rows)))
    first, second = (units_of(tree, level) for level in (1, 2))
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


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_the_shape_has_what_the_costs_need_of_the_tree(rows):
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
    units = [units_of(tree, level) for level in (1, 2)]
    reached = 1 / sizes[0][0] / sizes[1][units[0]]
    assert tree.shape.mean_leaves == pytest.approx(reached.sum(), rel=1e-12)
    assert tree.shape.likeliest((1, 1))[0] == pytest.approx(reached.max(), rel=1e-12)
    assert TreeShape.from_terms(json.loads(json.dumps(tree.shape.terms()))) == tree.shape == tree
