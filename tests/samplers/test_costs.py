"""Each sampler's cost: the right profile, from the sampler's own n, b, T and E."""

from __future__ import annotations

import functools
import math

import pytest

from accounting import (
    BallsAndBinsProfile,
    GaussianProfile,
    PoissonProfile,
    ShuffleProfile,
    UnitsThenPoissonProfile,
    UserPoissonProfile,
)
from accounting.profile import UpperEnd
from accounting.profiles.truncation import Cap, truncated_profile
from accounting.worst_leaf import worst_leaf
from samplers import (
    BallsAndBins,
    Deterministic,
    FullBatch,
    Multistage,
    Poisson,
    Shuffle,
    UnitsThenPoisson,
    UnitTree,
    UserPoisson,
)

SIZES = 4010, 40, 3  # 101 steps an epoch, the last of which is smaller
S = 0.8
UNCUT, FIXED = {"overflow": "accumulate"}, {"assignment": "fixed"}
TREE = UnitTree.from_columns({"shop": list("baccbacbc")})  # units of 3, 2 and 4
USERS = functools.partial(UserPoisson, 1000, 20, 2, max_contributions=5)
USERS_PROFILE = UserPoissonProfile(S, 100, 0.02, 5)


def cut(profile, rows, rate, cap, shards=1):
    return truncated_profile(profile, Cap(rows, rate, cap), shards)


COSTS = [
    (Deterministic(*SIZES), GaussianProfile(S / math.sqrt(3))),
    (Deterministic(10, 10, 3), GaussianProfile(S / math.sqrt(3))),
    *((FullBatch(1000, e), GaussianProfile(S / math.sqrt(e))) for e in (1, 4, 25)),
    *((Shuffle(*SIZES, order=o), ShuffleProfile(S, 101, 3, o)) for o in ("redrawn", "fixed")),
    (Poisson(*SIZES, **UNCUT), PoissonProfile(S, 40 / 4010, 303)),
    (Poisson(4000, 40, 3, cycle_length=4, **UNCUT), PoissonProfile(S, 0.04, 75)),
    (BallsAndBins(*SIZES, **UNCUT), BallsAndBinsProfile(S, 101, 3)),
    (BallsAndBins(*SIZES, **UNCUT, **FIXED), BallsAndBinsProfile(S, 101, 3, "fixed")),
    (BallsAndBins(4000, 40, 3, cycle_length=4, **UNCUT), BallsAndBinsProfile(S, 25, 3)),
    (
        BallsAndBins(4000, 40, 3, cycle_length=4, **FIXED, **UNCUT),
        BallsAndBinsProfile(S, 25, 3, "fixed"),
    ),
    # b = n: everybody takes part in every step, however batches are drawn.
    (Poisson(100, 100, 3), PoissonProfile(S, 1.0, 3)),
    (BallsAndBins(100, 100, 3), BallsAndBinsProfile(S, 1, 3)),
    (Shuffle(100, 100, 3), ShuffleProfile(S, 1, 3)),
    # Groups of 334, 333, 333 examples; 34 cycles of 3 steps.
    (
        BallsAndBins(1000, 10, 2, max_batch_size=30, cycle_length=3),
        cut(BallsAndBinsProfile(S, 34, 2), 334, 1 / 34, 30),
    ),
    (
        Poisson(1000, 10, 2, max_batch_size=30, cycle_length=3),
        cut(PoissonProfile(S, 0.03, 68), 334, 0.03, 30),
    ),
    (BallsAndBins(1000, 10, 2, max_batch_size=334, cycle_length=3), BallsAndBinsProfile(S, 34, 2)),
    # Of each example's own shard and group: 1000 rows, 4 shards of 250, 2 groups of 125.
    (
        Poisson(1000, 20, 2, max_batch_size=15, num_shards=4, cycle_length=2),
        cut(PoissonProfile(S, 0.04, 50), 125, 0.04, 15, 4),
    ),
    (
        BallsAndBins(1003, 20, max_batch_size=15, num_shards=4),
        cut(BallsAndBinsProfile(S, 51), 251, 1 / 51, 15, 4),
    ),
    # Fixed bins overflow together.
    (
        BallsAndBins(1000, 10, 5, max_batch_size=30, **FIXED),
        cut(BallsAndBinsProfile(S, 100, 5, "fixed"), 1000, 0.01, 30),
    ),
    (USERS(max_batch_size=1000), USERS_PROFILE),
    (USERS(max_batch_size=60), cut(USERS_PROFILE, 1000, 0.02, 60)),
    (USERS(max_batch_size=40, num_shards=2), cut(USERS_PROFILE, 500, 0.02, 40, 2)),
    # The unit of a leaf is drawn with 2 of 3; at most 2 x 4 examples are in two units.
    (
        UnitsThenPoisson(TREE, (2,), 0.5, steps=40, max_batch_size=9),
        UnitsThenPoissonProfile(S, 40, 2 / 3, 0.5, siblings=3),
    ),
    (
        UnitsThenPoisson(TREE, (2,), 0.3, steps=10, max_batch_size=4),
        cut(UnitsThenPoissonProfile(S, 10, 2 / 3, 0.3, siblings=3), 8, 0.3, 4),
    ),
    (Multistage(TREE, (1, 2), steps=50), worst_leaf(S, 50, (1, 2), ((3, 2),), 2)),
    (Multistage(TREE, (1, 2), steps=50, clipped_level=1), worst_leaf(S, 50, (1, 2), ((3, 2),), 1)),
    (
        Multistage(TREE, (1, 2), steps=50, clipped_level=1, protected_level=1),
        worst_leaf(S, 50, (1,), ((3,),), 1),
    ),
]


@pytest.mark.parametrize(("sampler", "profile"), COSTS, ids=lambda value: str(value)[:50])
def test_the_cost_is_the_profile_of_the_sampler_s_own_sizes(sampler, profile):
    assert sampler.privacy(S) == profile


KNOWN, OVERLAPPING = Deterministic(100, 10, epochs=3), [range(0, 14), range(12, 30)]
PARTS = [
    (Poisson(*SIZES, **UNCUT), [range(7), range(3, 16)], PoissonProfile(S, 40 / 4010, 20)),
    (Multistage(TREE, (1, 2), steps=50), OVERLAPPING, worst_leaf(S, 32, (1, 2), ((3, 2),), 2)),
    # The largest group's steps; in two attempts, a row may lie in two groups.
    *(
        (Poisson(4000, 40, cycle_length=4, **UNCUT), steps, PoissonProfile(S, 0.04, most))
        for steps, most in (
            ([range(8)], 2),
            ([range(3, 4)], 1),
            ([range(3, 8)], 2),
            ([range(1, 4), range(5, 9)], 2),
            ([range(1, 2), range(2, 3)], 2),
            ([range(0, 5), range(1, 6)], 4),
        )
    ),
    # Where the order is known, the steps of one example; an example of other rows may have more.
    (FullBatch(100, 30), OVERLAPPING, GaussianProfile(S / math.sqrt(32))),
    (KNOWN, OVERLAPPING, GaussianProfile(S / math.sqrt(4))),
    (KNOWN, [range(0, 15), range(15, 30)], GaussianProfile(S / math.sqrt(4))),
    # One count over both halves would give the price of one participation.
    (Shuffle(600, 300, order="fixed"), [range(1), range(1, 2)], GaussianProfile(S / math.sqrt(2))),
]


@pytest.mark.parametrize(("sampler", "attempts", "profile"), PARTS, ids=str)
def test_attempts_cost_the_steps_that_they_release(sampler, attempts, profile):
    price = sampler.privacy_of(S, attempts)
    assert (price.profile if isinstance(price, UpperEnd) else price) == profile


def test_same_rows_of_a_known_order_take_part_once_an_epoch():
    halves = [range(0, 15), range(15, 30)]
    assert KNOWN.privacy_of(S, halves, same_rows=True) == KNOWN.privacy(S)


def test_noise_and_epochs_are_those_of_the_profile(make):
    # That more noise costs less, and more epochs more, is a matter of the profiles.
    profile = make(400, 40, 2).privacy(1.0)
    assert profile == make(400, 40, 2).privacy(1.0)
    assert profile != make(400, 40, 2).privacy(1.1)
    assert profile != make(400, 40, 3).privacy(1.0)
