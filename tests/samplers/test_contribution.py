"""Users: the cap does not look at other users or at the order of rows; user-level costs."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from samplers import (
    BallsAndBins,
    BatchSource,
    Deterministic,
    Multistage,
    Poisson,
    Population,
    Shuffle,
    UnitTree,
    UserPoisson,
    cap_contributions,
)
from samplers.population import UnitData

FALSE_ALARM = 1e-6

user_lists = st.lists(st.integers(0, 6), min_size=1, max_size=60)
modes = st.sampled_from(["first", "random"])


def chosen(capped, ids):
    """What is kept of each user, by id."""
    return {
        label: sorted(ids[row[weight > 0]].tolist())
        for label, row, weight in zip(
            capped.labels.tolist(), capped.rows, capped.weights, strict=True
        )
    }


def seed_of(keep):
    return 5 if keep == "random" else None


@given(users=user_lists, tau=st.integers(1, 9), keep=modes, data=st.data())
@settings(max_examples=60, deadline=None)
def test_shuffled_rows_keep_the_same_examples(users, tau, keep, data):
    users, ids = np.array(users), np.arange(len(users)) * 10
    capped = cap_contributions(users, tau, keep=keep, order=ids, seed=seed_of(keep))
    places = np.array(data.draw(st.permutations(range(len(users)))))
    moved = cap_contributions(users[places], tau, keep=keep, order=ids[places], seed=seed_of(keep))
    assert chosen(capped, ids) == chosen(moved, ids[places])
    for label, kept in chosen(capped, ids).items():
        own = ids[users == label]
        assert len(kept) == min(tau, own.size)
        assert set(kept) <= set(own.tolist())
        if keep == "first":
            assert kept == own[:tau].tolist()
    np.testing.assert_array_equal(capped.counts, np.unique(users, return_counts=True)[1])
    assert capped.rows.shape == capped.weights.shape == (capped.num_users, tau)
    assert not capped.rows[capped.weights == 0].any()


@given(users=user_lists, tau=st.integers(1, 4), keep=modes)
@settings(max_examples=60, deadline=None)
def test_one_users_change_moves_no_other_users_examples(users, tau, keep):
    users, ids = np.array([*users, 7]), np.arange(len(users) + 1)
    before = chosen(cap_contributions(users, tau, keep=keep, order=ids, seed=seed_of(keep)), ids)
    others = users != users[0]
    after = chosen(
        cap_contributions(
            users[others], tau, keep=keep, order=ids[others], seed=seed_of(keep)
        ),
        ids[others],
    ) if others.any() else {}  # fmt: skip
    before.pop(int(users[0]))
    assert before == after


def test_random_contributions_are_uniform_and_differ_by_user(assert_law):
    users = np.repeat(["ann", "bob"], 5)
    counts, equal = np.zeros(10), 0
    for seed in range(2000):
        capped = cap_contributions(users, 2, keep="random", seed=seed)
        counts[capped.kept_examples] += 1
        equal += np.array_equal(capped.rows[0], capped.rows[1] - 5)
    assert_law(counts[:5], np.full(5, 0.2))
    assert_law(counts[5:], np.full(5, 0.2))
    assert stats.binomtest(int(equal), 2000, 0.1).pvalue > FALSE_ALARM


def test_ties_are_broken_by_later_columns_and_refused_without():
    users, times, ids = np.zeros(3, int), np.array([5, 4, 5]), np.array([2, 1, 0])
    capped = cap_contributions(users, 2, order=np.stack([times, ids], 1))
    assert capped.rows.tolist() == [[1, 2]]
    with pytest.raises(ValueError, match="examples 0 and 2 of user 0 have the same order"):
        cap_contributions(users, 2, order=times)


def test_a_batch_of_users_is_their_examples_in_one_shape():
    users = np.array([3, 1, 3, 3, 2])
    capped = cap_contributions(users, 2)
    data = capped.data({"id": 10 * np.arange(5)})
    sampler = Poisson(capped.num_users, 2, 4, max_batch_size=3)
    source = BatchSource(sampler, 1)
    for step in range(sampler.num_steps):
        drawn = source.batch(step)
        batch = {name: column[drawn.indices] for name, column in data.items()}
        assert batch["id"].shape == batch["weight"].shape == (3, 2)
        real = batch["weight"] * drawn.weights[:, None] > 0
        present = capped.labels[drawn.indices[drawn.weights > 0]]
        assert sorted(batch["id"][real]) == [10 * i for i in (0, 1, 2, 4) if users[i] in present]
        assert not batch["id"][batch["weight"] == 0].any()


@pytest.mark.parametrize("make", [Deterministic, Shuffle, Poisson, BallsAndBins])
def test_what_is_protected_is_what_the_rows_of_the_data_are(make):
    capped = cap_contributions([3, 1, 3, 3, 2], 2)
    columns = {"id": np.arange(5)}
    users, examples = capped.of_users(columns), capped.of_examples(columns)
    sampler = make(3, 1, 2)
    assert sampler.protected_unit(users.population) == "user"
    assert sampler.protected_unit(Population(3)) == sampler.unit == "example"
    assert examples.columns["id"].tolist() == [0, 1, 2, 4]
    with pytest.raises(ValueError, match="draws from 3 examples, and the data have 4"):
        sampler.protected_unit(examples.population)


def test_user_poisson_refuses_data_above_its_cap():
    examples = cap_contributions([3, 1, 3, 3, 2], 2).of_examples({}).population
    capped = functools.partial(UserPoisson, 4, 2)
    for tau in (2, 3):
        assert capped(max_contributions=tau).protected_unit(examples) == "user"
    for refused, held in [(examples, "up to 2"), (Population(4), "any number of")]:
        with pytest.raises(ValueError, match=f"at most 1 examples of each user, .* hold {held}"):
            capped(max_contributions=1).protected_unit(refused)
    with pytest.raises(ValueError, match="any number"):
        capped(max_contributions=2).protected_unit(Population(4, "user"))
    assert capped(max_contributions=2, num_users=3).protected_unit(examples) == "user"
    with pytest.raises(ValueError, match="the sampler has num_users 2, and the data have 3"):
        capped(max_contributions=2, num_users=2).protected_unit(examples)


def test_examples_of_users_are_drawn_and_capped_as_poisson_s_are():
    users, examples = UserPoisson(1000, 20, 2, max_contributions=5), Poisson(1000, 20, 2)
    assert users.unit == "user"
    assert examples.padded_batch_size <= users.padded_batch_size < 1000  # rows count each
    assert users.plan(1, 0).examples.tolist() == examples.plan(1, 0).examples.tolist()


def test_units_are_protected_only_in_data_of_the_same_tree():
    tree, other = (UnitTree.from_columns({"shop": s}) for s in ([0, 0, 1, 1], [0, 1, 1, 0]))
    known, another = (UnitData.of_tree(one, {}).population for one in (tree, other))
    sampler = Multistage(tree, (1, 2), clipped_level=1, protected_level=1)
    assert sampler.protected_unit(known) == "shop"
    assert Multistage(tree, (1, 2)).protected_unit(known) == "example"
    for population in (
        Population(4),
        another,
        Population(4, "user"),
    ):
        with pytest.raises(ValueError, match=r"pass UnitData.of_tree\(tree, columns\)"):
            sampler.protected_unit(population)
