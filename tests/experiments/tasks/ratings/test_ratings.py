"""Ratings of users: what is read, what is trained and what caps cost."""

import gzip
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from accounting import epsilon
from dpsgd.engine import programs
from experiments.papers.contribution import sum_error, sum_sweet_spot
from experiments.tasks.ratings import factorization, ratings
from experiments.tasks.ratings.study import (
    CLASS,
    UNITS,
    FactorizedRatings,
    LinearRatings,
    Study,
    split,
)

LINES = ["196\t242\t3\t881250949\n", "186\t302\t5\t891717742\n", "196\t1\t1\t878887116\n"]


@pytest.mark.parametrize("name", ["u.data", "u.data.gz"])
def test_ratings_are_read_from_the_published_file(tmp_path, name):
    path = tmp_path / name
    text = "".join(LINES).encode()
    path.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    table = ratings.load(path)
    assert table.user.tolist() == [196, 186, 196]
    assert table.item.tolist() == [241, 301, 0]
    assert table.rating.tolist() == [3, 5, 1]
    assert table.time.tolist() == [881250949, 891717742, 878887116]
    assert table.num_items == 1682


CUT = gzip.compress("".join(LINES).encode(), mtime=0)[:-12]
FAULTS = {
    "1\t2\t3\n": r"u.data, line 2: found 3 columns, expected 4, separated by tabs",
    "1\tx\t3\t4\n": r"line 2, column item id: found 'x', expected an integer",
    "1\t2\t6\t4\n": r"line 2, column rating: found '6', expected an integer from 1 to 5",
    "1\t1683\t5\t4\n": r"line 2, column item id: found '1683', expected an integer from 1 to 1682",
}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(("u.data", (LINES[0] + line).encode(), message) for line, message in FAULTS.items()),
        ("empty", b"", "is empty"),
        ("cut.gz", CUT, "the gzip file is incomplete"),
    ],
)
def test_a_damaged_file_is_refused_by_line_and_field(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        ratings.read(tmp_path / name)


def test_a_synthetic_population_has_few_heavy_users():
    table = ratings.synthetic(1, 500, 100)
    counts = np.sort(np.unique(table.user, return_counts=True)[1])
    assert counts.size == 500
    assert counts[0] == 20
    assert counts[-1] == 90
    assert np.median(counts) <= 30
    assert len(set(zip(table.user.tolist(), table.item.tolist(), strict=True))) == table.user.size
    assert set(np.unique(table.rating)) == {1, 2, 3, 4, 5}


def a_user(tau=6, padding=3):
    rng = np.random.default_rng(0)
    return {
        "item": np.concatenate([rng.permutation(12)[:tau], np.zeros(padding, int)]),
        "rating": np.concatenate([rng.integers(1, 6, tau), np.zeros(padding)]).astype(np.float32),
        "weight": np.repeat([1.0, 0.0], [tau, padding]).astype(np.float32),
    }


def test_omitting_the_user_part_keeps_the_gradient():
    # The envelope theorem: w_u minimises loss + ridge, so only the direct dependence remains.
    params, user = factorization.init(12, 2, seed=3), a_user()

    def profiled(params):
        items = {name: x[user["item"]] for name, x in params.items()}
        own = factorization.own_part(items, user)
        errors = factorization.errors(items, own, user)
        return 0.5 * jnp.sum(errors**2) + 0.5 * factorization.RIDGE * jnp.sum(own**2)

    whole = jax.jit(jax.grad(profiled))(params)
    used = jax.jit(jax.grad(factorization.loss))(params, user)
    for name, leaf in used.items():
        np.testing.assert_allclose(leaf, whole[name], atol=1e-5)
        assert np.abs(leaf).max() > 0.01


def test_padding_changes_no_gradient_and_a_null_user_has_none():
    params = factorization.init(12, 2)
    value_and_gradient = jax.jit(jax.value_and_grad(factorization.loss))
    (loss, short), (same, padded) = (
        value_and_gradient(params, a_user(padding=padding)) for padding in (0, 3)
    )
    assert loss == pytest.approx(same)
    _, null = value_and_gradient(
        params, {name: np.zeros_like(column) for name, column in a_user().items()}
    )
    for name in params:
        np.testing.assert_allclose(short[name], padded[name], atol=1e-6)
        assert not np.any(null[name])


def test_a_private_choice_of_the_cap_is_part_of_the_price():
    study = Study(LinearRatings(ratings.synthetic(0, 300, 60)), (5, 10, 20), 1e-4)
    assert study.sampler.num_examples == 300
    (alone, _), (after, bound) = study.calibrated(2.0), study.calibrated(2.0, spent=0.5)
    assert alone < after
    assert bound.upper <= 2.0
    assert epsilon(study.sampler.privacy(after), 1e-4).upper <= 1.5 + 1e-3
    assert study.choose_cap() in (5, 10, 20)


@pytest.mark.long
@pytest.mark.parametrize("model", [FactorizedRatings, LinearRatings])
def test_training_on_users_learns_and_runs_share_a_program(model):
    table = ratings.synthetic(0, 300, 60)
    study = Study(model(table, split(table)), (5, 20), 1e-4)
    plain = study.test_error(0.0, 20, seed=0)
    little = study.test_error(0.01, 20, seed=0)
    assert plain == pytest.approx(little, abs=0.01)
    assert plain < study.model.error(study.model.start) - 0.02
    compiled = programs._executable.cache_info().misses
    study.test_error(0.5, 5, seed=1)
    assert programs._executable.cache_info().misses == compiled


def test_ratings_that_are_asked_tell_nothing():
    table = ratings.synthetic(0, 40, 30)
    asked = split(table)
    other = table._replace(rating=np.where(asked, 6 - table.rating, table.rating))
    for rows, changed in zip(
        ratings.with_others(table, 50, asked), ratings.with_others(other, 50, asked), strict=True
    ):
        assert jax.tree.all(jax.tree.map(np.array_equal, rows["known"], changed["known"]))
        assert np.array_equal(rows["rating"], 6 - changed["rating"])
    np.testing.assert_array_equal(
        LinearRatings(table, asked).sums, LinearRatings(other, asked).sums
    )


@pytest.fixture(scope="module")
def linear():
    return LinearRatings(ratings.synthetic(0, 25, 30))


def test_a_user_moves_capped_sums_by_its_first_ratings_alone(linear):
    table = ratings.synthetic(0, 25, 30)
    for user in (0, 24):
        rest, own = (LinearRatings(table.where(rows)) for rows in
                     (table.user != user, table.user == user))  # fmt: skip
        for cap in (1, 4, 30):
            whole, less, one = (
                model.sums[:, min(cap, model.sums.shape[1]) - 1] for model in (linear, rest, own)
            )
            np.testing.assert_array_equal(whole - less, one)  # to the last bit
            assert one.min() >= 0
            assert one.max() <= cap * UNITS
    # The first ratings by time, whatever the order of the file.
    of_one_user = np.diff(linear.train.user) == 0
    assert np.all(np.diff(linear.train.time)[of_one_user] > 0)
    shuffled = table.where(np.random.default_rng(1).permutation(table.user.size))
    np.testing.assert_array_equal(LinearRatings(shuffled).sums, linear.sums)


def test_losses_are_squared_errors_clipped_into_zero_and_one(linear):
    error = linear.columns["rating"] - 3.5 - linear.columns["x"] @ CLASS[5]
    loss, user = np.minimum(error**2 / 9, 1), linear.train.user
    assert linear.sums[5, -1] / UNITS == pytest.approx(loss.sum(), abs=loss.size / UNITS)
    mean = np.bincount(user, loss) / np.bincount(user)
    np.testing.assert_allclose(linear.user_losses[5], mean, atol=2 / UNITS)


@pytest.mark.parametrize("cap", [1, 100])
def test_models_are_drawn_by_the_exponential_mechanism(linear, cap):
    randbelow, values = random.Random(cap).randrange, linear.sums[:, -1] / linear.sums[:, -1].max()
    rows = {tuple(model): row for row, model in enumerate(CLASS)}
    drawn = [values[rows[tuple(linear.choose(cap, 2.0, randbelow))]] for _ in range(400)]
    law = linear.law(cap, 2.0)
    mean = law @ values
    deviation = np.sqrt(law @ (values - mean) ** 2 / len(drawn))
    assert np.mean(drawn) == pytest.approx(mean, abs=5.5 * deviation)
    assert abs(values.mean() - mean) > 10 * deviation or cap > 1


def test_the_published_cap_misses_the_least_expected_error():
    counts = np.unique(ratings.synthetic(0).user, return_counts=True)[1]
    errors = [sum_error(counts, cap, 0.02) for cap in range(1, counts.max() + 1)]
    assert sum_sweet_spot(counts, 0.02) == 126
    assert 1 + np.argmin(errors) == 99


def test_with_lazy_tables_a_user_reads_no_items_but_their_own():
    params = factorization.init(50, 2, 0)
    user = {"item": np.array([40, 7]), "rating": np.array([5.0, 1.0]), "weight": np.ones(2)}
    expected = float(factorization.loss(params, user))
    others = np.setdiff1d(np.arange(50), user["item"])
    emptied = {name: x.at[others].set(np.nan) for name, x in params.items()}
    assert float(factorization.loss(emptied, user)) == expected


def test_ratings_without_a_user_are_refused_in_one_line():
    table = ratings.synthetic(0)
    for given in ((table.where(np.zeros(0, int)),), (table, np.ones(table.user.size, bool))):
        with pytest.raises(ValueError, match="there are no training ratings"):
            LinearRatings(*given)
