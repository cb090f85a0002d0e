"""Multistage sampling: the bound holds against random data sets, and is sharp for one stage."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
from scipy import special

from accounting import MultistageProfile
from accounting.worst_leaf import worst_leaf

DELTA = 1e-5
RATIOS = np.array([0.02, 0.2, 0.5, 0.8, 0.95, 0.99, 1.0, 1.01, 1.05, 1.2, 1.6, 3.0, 10.0, 100.0])


# ------------------------------------------------- the bound against data sets drawn at random


def without_replacement(children, count):
    """All draws of `count` of the children, each a tuple."""
    return list(itertools.combinations(children, count))


def episodes(tree, draws):
    """All episodes of one or two stages: lists of (unit, leaf), and their probabilities."""
    if len(draws) == 1:
        chosen = without_replacement(range(len(tree)), draws[0])
        return [[(0, leaf) for leaf in leaves] for leaves in chosen], [1 / len(chosen)] * len(
            chosen
        )
    outcomes, probabilities = [], []
    units = without_replacement(range(len(tree)), draws[0])
    for some in units:
        options = [without_replacement(range(len(tree[u])), draws[1]) for u in some]
        for choice in itertools.product(*options):
            outcomes.append(
                [(u, leaf) for u, leaves in zip(some, choice, strict=True) for leaf in leaves]
            )
            probabilities.append(1 / len(units) / math.prod(map(len, options)))
    return outcomes, probabilities


def lower_bounds(means, zeroed, probabilities, sigma, cells):
    """Lower bounds on H_a(with || without) at RATIOS: those of the law of the cell alone."""
    low, high = min(means.min(), zeroed.min()), max(means.max(), zeroed.max())
    inner = np.linspace(low - 5 * sigma, high + 5 * sigma, cells)
    edges = np.concatenate([[-np.inf], inner, [np.inf]])
    p, q = (
        probabilities @ np.diff(special.ndtr((edges - mean[:, None]) / sigma), axis=1)
        for mean in (means, zeroed)
    )
    return np.maximum(p - RATIOS[:, None] * q, 0.0).sum(axis=1)


@functools.lru_cache(maxsize=512)
def proved(draws, sizes, sigma):
    """The bound at RATIOS before and after it becomes a likelihood ratio."""
    profile = MultistageProfile(sigma, 1, draws, sizes)
    ratio = profile.upper_ratio(0.02, 1e-12)
    glued = np.array([profile.divergence(a) for a in RATIOS])
    minorant = []
    for a in RATIOS:
        if a >= 1:
            minorant.append(ratio.remove(math.log(a)))
        else:
            minorant.append(1 - a + a * ratio.add(-math.log(a)))
    return glued, minorant


def test_the_curve_is_bounded_up_to_the_end_of_a_coarse_grid():
    profile = MultistageProfile(1.2, 1, (1, 2), (2, 3))
    ratio = profile.upper_ratio(0.02, tail=0.01)
    for epsilon in np.linspace(0.005, 4.0, 200):
        assert ratio.remove(epsilon) >= profile.divergence(math.exp(epsilon)) * (1.0 - 1e-9)


def random_pair(rng):
    """A tree, its draws, gradients in [-1, 1] and the protected leaf."""
    stages = int(rng.integers(1, 3))
    draws = tuple(int(n) for n in rng.integers(1, 3, stages))
    if stages == 1:
        tree = [[] for _ in range(int(rng.integers(draws[0], 6)))]
        leaves = [(0, leaf) for leaf in range(len(tree))]
        x = leaves[0]
        sizes = (len(tree),)
    else:
        units = int(rng.integers(draws[0], 4))
        tree = [range(int(rng.integers(draws[1], 4))) for _ in range(units)]
        leaves = [(u, leaf) for u in range(units) for leaf in tree[u]]
        x = (int(rng.integers(units)), 0)
        sizes = (units, len(tree[x[0]]))
    kind, values = rng.integers(3), rng.choice([-1.0, 1.0], len(leaves))
    if kind == 1:
        values *= rng.uniform(size=len(leaves))
    gradients = dict(zip(leaves, values, strict=True))
    if kind == 2:  # units that agree: near the worst case
        signs = rng.choice([-1.0, 1.0], 3)
        for leaf in leaves:
            gradients[leaf] = signs[0 if leaf == x else 1 if leaf[0] == x[0] else 2]
    return tree, draws, sizes, gradients, x


def share_of(attained, bound):
    """The largest share of what a bound allows that was attained."""
    trivial = np.maximum(0.0, 1.0 - RATIOS)
    some = bound - trivial > 1e-6
    return float(np.max((attained - trivial)[some] / (bound - trivial)[some]))


def violation(rng, cells):
    """How far a random pair exceeds the bound, and the largest share of it that was attained."""
    tree, draws, sizes, gradients, x = random_pair(rng)
    sigma = float(rng.choice([0.5, 1.0, 2.0, 5.0]))
    outcomes, probabilities = episodes(tree, draws)
    sums = (
        np.array([sum(values[member] for member in outcome) for outcome in outcomes])
        for values in (gradients, {**gradients, x: 0.0})
    )
    attained = lower_bounds(*sums, np.array(probabilities), sigma, cells)
    glued, minorant = proved(draws, sizes, sigma)
    excess = max(float(np.max(attained - bound)) for bound in (glued, minorant))
    return excess, share_of(attained, glued), len(draws)


def test_no_random_pair_of_data_sets_on_a_line_exceeds_the_bound():
    # Masses of cells give exact lower bounds: not a statistical test.
    rng = np.random.default_rng(1)
    found = [violation(rng, 200) for _ in range(25)]
    assert max(excess for excess, _, _ in found) <= 1e-9
    # The search is sharp: one stage is attained, two stages nearly.
    assert max(share for _, share, stages in found if stages == 1) > 0.99
    assert max(share for _, share, stages in found if stages == 2) > 0.9


@pytest.mark.parametrize("level", [0, 1])
def test_clipping_units_bounds_every_function_of_their_examples(level):
    # A unit's gradient may be any function of its drawn leaves: +-1 by a random table. At level 0
    # the whole episode is the unit.
    rng = np.random.default_rng(3)
    share = 0.0
    for _ in range(15):
        units, leaves, draws = 3, 3, (int(rng.integers(1, 3)), int(rng.integers(1, 3)))
        sigma = float(rng.choice([0.5, 1.0, 2.0]))
        outcomes, probabilities = episodes([range(leaves)] * units, draws)
        table = functools.lru_cache(None)(lambda *_: float(rng.choice([-1.0, 1.0])))

        def total(outcome, present, table=table):
            by_unit = {}
            for u, leaf in outcome:
                by_unit.setdefault(u if level else 0, []).append((u, leaf))
            return sum(
                table(u, tuple(some), present or (0, 0) not in some) for u, some in by_unit.items()
            )

        with_x, zeroed = (
            np.array([total(outcome, present) for outcome in outcomes]) for present in (True, False)
        )
        attained = lower_bounds(with_x, zeroed, np.array(probabilities), sigma, 100)
        profile = MultistageProfile(sigma, 1, draws, (units, leaves), clipped_level=level)
        bound = np.array([profile.divergence(a) for a in RATIOS])
        assert np.all(attained <= bound + 1e-9)
        share = max(share, share_of(attained, bound))
    assert share > 0.9


# ------------------------------------------------------------------------- limits and orders


@pytest.mark.parametrize("a", RATIOS[RATIOS != 1.0])
def test_the_cost_grows_when_a_size_on_the_path_shrinks(a):
    rng = np.random.default_rng(4)
    for _ in range(8):
        draws = tuple(int(n) for n in rng.integers(1, 4, 3))
        sizes = [int(n + extra) for n, extra in zip(draws, rng.integers(1, 6, 3), strict=True)]
        smaller = list(sizes)
        smaller[int(rng.integers(3))] -= 1
        large, small = (MultistageProfile(1.3, 1, draws, tuple(s)) for s in (sizes, smaller))
        assert large.divergence(float(a)) <= small.divergence(float(a)) * (1 + 1e-9)


def test_the_bound_is_below_that_of_known_units():
    # Telling which unit is drawn, with probability G, leaves one stage: 1 - G + G * its curve.
    for a in (0.3, 0.9, 1.1, 2.0):
        known = 0.1 * MultistageProfile(2.0, 1, (5,), (10,)).divergence(a) + 0.9 * max(0, 1 - a)
        assert MultistageProfile(2.0, 1, (1, 5), (10, 10)).divergence(a) <= known * (1 + 1e-12)
    # Far-away units are as good as known ones.
    far = MultistageProfile(1.0, 1, (1, 500), (10, 1000)).divergence(2.0)
    known = 0.1 * MultistageProfile(1.0, 1, (500,), (1000,)).divergence(2.0)
    assert far == pytest.approx(known, rel=1e-6)


def test_paths_of_which_neither_is_below_the_other_all_count():
    paths = ((4, 9), (9, 4))
    worst = worst_leaf(2.0, 2, (1, 2), paths).epsilon(DELTA)
    each = [MultistageProfile(2.0, 2, (1, 2), path).epsilon(DELTA) for path in paths]
    assert abs(each[0].upper - each[1].upper) > 0.01
    assert worst.upper == max(bound.upper for bound in each)
    assert worst.lower == max(bound.lower for bound in each)
    # Of too many kinds, the smallest sizes bound all of them.
    many = worst_leaf(2.0, 2, (1, 2), tuple((5 + i, 30 - i) for i in range(12))).epsilon(DELTA)
    assert many.upper == MultistageProfile(2.0, 2, (1, 2), (5, 19)).epsilon(DELTA).upper
    assert many.lower == MultistageProfile(2.0, 2, (1, 2), (5, 30)).epsilon(DELTA).lower
