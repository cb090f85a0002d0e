"""Settings that cannot be are refused in one line; sizes of all: `test_every_sampler.py`."""

import math

import numpy as np
import pytest

from samplers import (
    BallsAndBins,
    BatchSource,
    Deterministic,
    FullBatch,
    Multistage,
    Poisson,
    Shuffle,
    UnitsThenPoisson,
    UnitTree,
    UserPoisson,
    cap_contributions,
)
from samplers.randomness import Key, Stream

TREE = UnitTree.from_columns({"shop": ["a", "b", "b", "b", "c", "c", "a", "c"]})
DEEP = UnitTree.from_columns({"partner": [7, 7, 7, 9], "product": ["x", "x", "y", "x"]})
DELTAS = 0.0, 0.1, math.nan
CAPPED = cap_contributions([1, 2], 1)


def refuses_foreign_data(sampler, population):
    """A method of a sampler, which would be bypassed by its former name."""


REFUSED = [
    (lambda: Deterministic(10, 2, num_shards=11), "num_shards must be at most 10, got 11"),
    (lambda: Poisson(10, 2, num_shards=2, overflow="accumulate"), "needs num_shards=1, got 2"),
    (lambda: Shuffle(2**32, 2**20, num_shards=2), r"at most 2\^31 - 1 for each shard"),
    (lambda: Shuffle(10, 2, num_shards=2).shard_range(2), r"in \[0, 2\)"),
    (lambda: BatchSource(Shuffle(9, 2, num_shards=2), 0, shards=range(1, 3)), "the sampler's 2"),
    (lambda: BatchSource(Shuffle(9, 2, num_shards=4), 0, shards=range(0, 4, 2)), "consecutive"),
    (lambda: BallsAndBins(100, 10, cycle_length=11), "at most the 10 steps of an epoch, got 11"),
    (lambda: Poisson(101, 10, cycle_length=11), r"at most num_examples = 101, got 11 \* 10"),
    (
        lambda: UserPoisson(100, 10, max_contributions=3, cycle_length=2),
        "must be 1 for UserPoisson, got 2",
    ),
    (lambda: UserPoisson(9, 3, max_contributions=10), "at most the 9 rows, got 10"),
    (lambda: FullBatch(2**31), r"num_examples must be at most 2\^31 - 1"),
    (lambda: FullBatch(9, 2**31), "a run has at most"),
    (lambda: Multistage(TREE, (2, 3)), r"shop=a has 2 children, fewer than draws\[1\] = 3"),
    (lambda: Multistage(TREE, (4, 1)), r"the root has 3 children, fewer than draws\[0\] = 4"),
    (lambda: Multistage(TREE, (2,)), "draws needs 2 entries"),
    (lambda: Multistage(TREE, (2, 1), clipped_level=3), "clipped_level must be in"),
    (lambda: Multistage(TREE, (2, 1), protected_level=1), "at least clipped_level = 2, got 1"),
    (lambda: Multistage(TREE, (2, 1), protected_level=0), "protected_level must be in .1, 2."),
    (lambda: UnitsThenPoisson(TREE, (4,), 0.5), "the root has 3 children"),
    (lambda: UnitsThenPoisson(TREE, (2,), 0.5, max_batch_size=1), "=1 is below the expected"),
    (
        lambda: UserPoisson(100, 10, max_contributions=3, max_batch_size=9),
        "=9 is below the expected",
    ),
    (lambda: UnitsThenPoisson(TREE, (2,), 0.5, target_delta=0.1), "target_delta must lie in"),
    (lambda: Multistage(DEEP, (1, 1, 2)), "partner=7, product=y has 1 children"),
    *(
        (lambda kind=kind, given=given: kind(100, 10, **given), message)
        for kind in (Poisson, BallsAndBins)
        for given, message in (
            ({"max_batch_size": 9}, "max_batch_size=9 is below the expected batch size 10: pass"),
            ({"max_batch_size": 2, "num_shards": 4}, r"=2 is below .* size 2.5 of a shard: "),
            *(({"target_delta": x}, "target_delta must ") for x in DELTAS),
        )
    ),
    (lambda: UnitTree.from_columns({}), "at least one column"),
    (lambda: UnitTree.from_columns({"a": []}), "at least one example"),
    (lambda: UnitTree.from_columns({"a": [1], "b": [1, 2]}), "one value per example"),
    (lambda: cap_contributions([], 1), "one user for each example"),
    (lambda: cap_contributions([3, 1, 2], 10**9), "max_contributions=1,000,000,000 for 3 users"),
    (lambda: cap_contributions([1, 2], 0), "max_contributions must be an integer >= 1"),
    (lambda: cap_contributions([1, 2], 1, keep="random"), 'keep="random" needs a seed'),
    (lambda: cap_contributions([1, 2], 1, seed=3), 'keep="first" takes none'),
    (lambda: cap_contributions([1, 2], 1, order=[1]), "order needs one row for each of 2"),
    (lambda: CAPPED.data({"x": np.ones(3)}), "'x' has 3 rows, but users"),
    (lambda: CAPPED.data({"weight": np.ones(2)}), 'may be named "weight"'),
    *(
        (lambda at=at: Key(0, Stream.ORDER, *at), r"must be in \[0, 2\^64\)")
        for at in ((-1, 0), (0, -1), (2**64, 0), (0, 2**64))
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_settings_that_cannot_be_are_refused_in_one_line(make, message):
    with pytest.raises(ValueError, match=message) as refusal:
        make()
    assert "\n" not in str(refusal.value)


def test_a_sampler_with_the_former_name_of_a_check_is_refused():
    with pytest.raises(
        TypeError, match=r"^Own\.of was renamed in 0\.3\.0: call .* with_population$"
    ):
        type("Own", (Poisson,), {"of": refuses_foreign_data})
    type("Own", (Poisson,), {"with_population": refuses_foreign_data})
    type("Own", (Poisson,), {"of": classmethod(refuses_foreign_data)})  # a constructor, say
