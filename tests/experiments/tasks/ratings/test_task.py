"""The task of ratings: users apart, what is kept of them, and what is asked of the model."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from dpsgd.runs.recommendation import RecommendationRequest as Request
from dpsgd.runs.recommendation import generic
from experiments.tasks.ratings import factorization, ratings
from experiments.tasks.ratings.task import RatingModels, Ratings
from samplers import Multistage, UnitsThenPoisson, UserPoisson

TABLE = ratings.synthetic(3, num_users=60, num_items=40)


def write(path, table):
    rows = zip(table.user + 1, table.item + 1, table.rating.astype(int), table.time, strict=True)
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def u_data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "u.data", TABLE)


def rows_of(task, split):
    return ratings.of_split(task.table, split)


def test_a_user_is_in_one_split_alone_whoever_else_is_there(u_data, tmp_path):
    task = Ratings(u_data)
    users = {split: set(rows_of(task, split).user) for split in ("train", "validation", "test")}
    assert sum(map(len, users.values())) == 60
    assert set.union(*users.values()) == set(range(1, 61))
    assert len(users["train"]) > 36
    some = write(tmp_path / "u.data", TABLE.where(TABLE.user >= 30))
    for split, found in users.items():
        assert set(rows_of(Ratings(some), split).user) == {user for user in found if user > 30}


def test_training_users_and_measured_users_are_disjoint(u_data):
    task = Ratings(u_data)
    trained = task.columns()
    assert trained.population.num_examples == np.unique(rows_of(task, "train").user).size
    before = task.metrics(task.init(0))
    moved = TABLE.rating.copy()
    training = np.isin(TABLE.user + 1, rows_of(task, "train").user)
    moved[training] = 6 - moved[training]
    other = Ratings(write(u_data.with_name("other.data"), TABLE._replace(rating=moved)))
    assert other.metrics(task.init(0)) == before
    np.testing.assert_array_equal(other.columns().columns["item"], trained.columns["item"])
    assert not np.array_equal(other.columns().columns["rating"], trained.columns["rating"])


@pytest.mark.parametrize("rows", ["users", "ratings"])
def test_kept_ratings_depend_on_that_user_alone(u_data, tmp_path, rows):
    task = Ratings(u_data, rows=rows, max_ratings=7)
    whole = task.columns()
    user = rows_of(task, "train").user[0]
    mixed = np.random.default_rng(0).permutation(TABLE.user.size)
    shuffled = Ratings(write(tmp_path / "s.data", TABLE.where(mixed)), rows, 7)
    alone = write(tmp_path / "a.data", TABLE.where(TABLE.user + 1 == user))

    def kept(columns, of):
        counted = columns["weight"] > 0 if rows == "users" else np.ones_like(columns["item"], bool)
        return sorted(columns["item"][of][counted[of]].tolist())

    everybody = slice(None)
    assert kept(shuffled.columns().columns, everybody) == kept(whole.columns, everybody)
    own = kept(Ratings(alone, rows, 7).columns().columns, everybody)
    assert len(own) == 7
    if rows == "users":
        place = np.unique(rows_of(task, "train").user).tolist().index(user)
        assert kept(whole.columns, [place]) == own
    else:
        tree = whole.population.tree
        place = tree.labels[0][1].tolist().index(user)
        children = tree.leaves[tree.starts[1][place] : tree.starts[1][place + 1]]
        assert kept(whole.columns, children) == own


def test_rows_that_are_ratings_say_what_samplers_of_ratings_need(u_data):
    columns, population = Ratings(u_data, "ratings", 7).columns()
    assert population.row == "example"
    assert population.num_examples == columns["item"].size == columns["rating"].size
    assert population.max_contributions == 7
    assert population.tree.sizes(1).max() == 7
    samplers = [
        UserPoisson(population.num_examples, 20, max_contributions=7),
        Multistage(population.tree, (4, 3), steps=2, clipped_level=1, protected_level=1),
        UnitsThenPoisson(population.tree, (4,), 0.5, steps=2),
    ]
    units = [sampler.protected_unit(population) for sampler in samplers]
    assert units == ["user", "user", "example"]
    assert Ratings(u_data).columns().population.row == "user"


@pytest.mark.long
def test_the_loss_of_one_rating_is_half_its_squared_error(u_data):
    params = Ratings(u_data).init(1)
    one = {"item": np.int32(3), "rating": np.float32(4)}
    assert jax.jit(factorization.loss)(params, one) == pytest.approx(
        0.5 * (4 - 3.5 - params["bias"][3]) ** 2
    )


def test_a_rating_is_predicted_from_the_users_other_ratings(u_data):
    task = Ratings(u_data, rank=2)
    bias = jax.numpy.linspace(-1, 1, task.num_items)
    params = task.init(2) | {"bias": bias}
    table = task.table
    rows = jax.tree.map(lambda *xs: np.concatenate(xs), *ratings.with_others(table, at_once=100))
    assert rows["item"].tolist() == table.item.tolist()
    predicted, own_part = np.asarray(task.predict(params, rows)), jax.jit(factorization.own_part)
    for row in (0, 70, 500):
        others = (table.user == table.user[row]) & (np.arange(table.user.size) != row)
        known = {"item": table.item[others], "rating": table.rating[others]}
        items = {name: x[known["item"]] for name, x in params.items()}
        own = own_part(items, known | {"weight": np.ones(others.sum(), np.float32)})
        features = np.append(1, params["factor"][table.item[row]])
        expected = 3.5 + params["bias"][table.item[row]] + features @ own
        assert predicted[row] == pytest.approx(np.clip(expected, 1, 5), abs=1e-4)
    errors = predicted - table.rating
    found = task.evaluate(params, task.read(u_data))
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-5)
    assert found["num_examples"] == table.user.size
    assert np.isnan(task.evaluate(params | {"bias": params["bias"] * np.nan}, [rows])["rmse"])


def test_lines_without_a_rating_are_predicted_and_tell_nothing(u_data, tmp_path):
    lines = u_data.read_text().splitlines(keepends=True)
    [first] = Ratings(u_data).read(u_data, split="test")
    user, item, _, time = lines[0].split("\t")
    (tmp_path / "asked").write_text("\t".join([user, item, "", time]) + "".join(lines[1:]))
    task = Ratings(u_data)
    asked, more = task.read(tmp_path / "asked", labelled=False, split=None)
    assert np.isnan(asked["rating"][0])
    assert not np.isnan(np.append(asked["rating"][1:], more["rating"])).any()
    known = sum(block["known"]["weight"].sum() for block in task.read(u_data))
    fewer = (TABLE.user == TABLE.user[0]).sum() - 1
    assert asked["known"]["weight"].sum() + more["known"]["weight"].sum() == known - fewer
    assert np.isfinite(task.predict(task.init(0), asked)).all()
    with pytest.raises(ValueError, match="asked, line 1, column rating: found nothing"):
        task.read(tmp_path / "asked")
    with pytest.raises(ValueError, match="the ratings have no split 'tset'; they have train, val"):
        task.read(u_data, split="tset")
    assert first["item"].size == rows_of(task, "test").user.size


@pytest.mark.parametrize("settings", [{"max_ratings": 0}, {"rank": 0}])
def test_settings_that_cannot_be_are_refused_by_their_option(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"{name} must be an integer >= 1, got 0"):
        Ratings(**settings)


def test_too_few_users_and_another_catalogue_are_refused(u_data, tmp_path):
    few = Ratings(write(tmp_path / "u.data", TABLE.where(TABLE.user < 1)))
    with pytest.raises(ValueError, match="has no users in the"):
        few.check()
    Ratings(u_data).check(Ratings(u_data).describe())
    with pytest.raises(ValueError, match="has a catalogue of 1,682 items"):
        Ratings(u_data).check({"num_items": 200})
    with pytest.raises(ValueError, match="catalogue of 1,682 items, but the model has 200"):
        RatingModels(200, 1).read(u_data)


def test_settings_depend_on_user_count_and_ratings_per_user(u_data):
    request = Request(762, 1e-3, target_epsilon=3.0)
    task = Ratings(u_data)
    found = task.recommend(request)
    assert (found.batch_size, found.epochs) == (32, 30)
    assert task.recommend(replace(request, num_examples=762 * 8)).batch_size == 256
    fewer = replace(task, max_ratings=25).recommend(request)
    assert fewer.l2_clip_norm == found.l2_clip_norm / 2
    assert task.recommend(replace(request, epochs=2, batch_size=7, num_examples=10)).epochs == 2
    assert replace(task, rows="ratings").recommend(request) == generic(request)
    assert task.recommend(Request(762, 1e-3)) != found
