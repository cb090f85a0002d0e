"""Estimators in scikit-learn's conventions: their guarantees, pickles and refusals."""

from __future__ import annotations

import pickle
import tempfile
from dataclasses import replace
from statistics import fmean

import jax
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

from dpsgd import Run
from dpsgd.engine.closures import held_arrays, reachable_arrays
from dpsgd.noise.keys import RootKey
from dpsgd.runs.stop import Stopped
from experiments.estimators import EXPECTED_FAILED_CHECKS, DPClassifier, DPRegressor
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.sizes import PRESETS
from experiments.tasks.clicks.task import ClickModels
from samplers.settings import SETTINGS

RNG = np.random.default_rng(0)
X = RNG.uniform(-1, 1, (60, 3))
Y = (X[:, 0] > 0).astype(int)
PUBLIC = {"bounds": (-1, 1), "classes": (0, 1)}

OF_CELLS = {
    "mean": (40, 50, 300, 4000, 0.25, 1.2, 1.5, 0.5, 0.7, 0.25),
    "error": (3, 5, 25, 600, 0.05, 0.2, 0.5, 0.1, 0.1, 0.05),
    "worst": (40, 60, 300, 5000, 0.25, 1.2, 1.5, 0.5, 0.7, 0.25),
}
"""What radius, texture, perimeter, area, ... of a cell's nucleus are not above: round numbers."""


def fitted(**how):
    return DPClassifier(3.0, **{**PUBLIC, "random_state": 0, **how}).fit(X, Y)


@pytest.mark.short("model2")
@pytest.mark.parametrize(
    "model",
    [
        DPClassifier(3.0, **PUBLIC),
        DPClassifier(3.0, **{**PUBLIC, "classes": (0, 1, 2)}),
        DPRegressor(
            3.0,
            bounds=(-1, 1),
            label_bounds=(-1, 1),
            sampler="deterministic",  # whose price is a closed form
            options={"audit": False},
        ),
    ],
)
def test_a_pickled_model_predicts_and_holds_no_key_or_rows(model, monkeypatch):
    roots, shared = [], RootKey.shared
    monkeypatch.setattr(RootKey, "shared", lambda: roots.append(shared()) or roots[-1])
    model = clone(model).fit(X, Y)
    assert model.guarantee_["epsilon_upper"] <= 3
    data = pickle.dumps(model)
    assert roots
    for root in roots:
        assert root._secret not in data
        assert root._secret.hex().encode() not in data
    kinds = np.uint8, np.int32, np.float32, np.float64
    rows = (x.astype(kind).tobytes() for x in (X, Y) for kind in kinds)
    assert not any(part in data for part in rows)
    np.testing.assert_array_equal(pickle.loads(data).predict(X), model.predict(X))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bounds": None}, "bounds must be declared"),
        ({"bounds": {"x0": (0, 1)}}, "bounds: add the missing x1, x2"),
        ({"bounds": [(0, 1)]}, "bounds of 3 number columns must be one pair, "),
        ({"bounds": 1}, "bounds of 3 number columns must be one pair, "),
        ({"bounds": (1, -1)}, "x0=1:-1: bounds are LOW:HIGH"),
        ({"classes": None}, "classes must be declared"),
        ({"classes": (1, 2)}, "y has a label that is not in classes"),
        ({"categories": ["x9"]}, "categories: X has no column x9"),
        ({"model": "huge"}, "model must be one of linear, "),
        ({"sampler": "dice"}, "sampler must be one of deterministic, "),
        ({"options": {"epoch": 2}}, "epoch is unknown"),
        ({"classes": (1,)}, "classes must be two or more, got 1"),
        ({"bounds": "private"}, "bounds of 3 number columns must be one pair, "),
        ({"options": {"target_delta": 1e-7}}, "options: target_delta is set by .* delta; "),
        ({"options": {"target_epsilon": 1.0}}, "options: target_epsilon is set by .* epsilon; "),
        ({"options": {"non_private": False}}, "options: non_private is set by .* epsilon; "),
        ({"options": {"init_seed": 1}}, "options: init_seed is set by .* random_state; "),
        ({"options": {"sampler": "poisson"}}, "options: sampler is set by .* sampler; "),
        ({"options": {"batch_size": "9"}}, "options: batch_size must be an integer"),
        ({"options": ["epochs"]}, "options: must be a table"),
        (
            {"sampler": "poisson", "options": {"batch_size": np.int64(20), "max_batch_size": 21}},
            "no noise multiplier .* or a larger maximum batch size",
        ),
        ({"sampler": "multistage"}, "options: .* is missing"),
        ({"classes": 2}, "classes must be labels of one kind or"),
        ({"classes": (None, 1)}, "classes must be labels of one kind or"),
        (
            {"bounds": dict.fromkeys(("x0", "x1", "x2", 5), (0, 1))},
            "bounds: must be text, got 5",
        ),
        ({"classes": "01"}, "classes must be labels of one kind or"),
        ({"model": ["x"]}, "model must be one of linear, "),
        ({"sampler": ["x"]}, "sampler must be one of deterministic, "),
        ({"number_transform": "log"}, "number_transform must be one of none, "),
        ({"categories": "x1"}, "categories: must be a list"),
        ({"sampler": "user-poisson", "max_contributions": 2}, "to protect users, pass sampler="),
        ({"max_contributions": 2}, "to protect users, pass sampler="),
    ],
)
def test_what_is_not_declared_or_does_not_fit_is_refused(given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        clone(DPClassifier(3.0, **{**PUBLIC, **given})).fit(X, Y)


class Created(Exception):
    """The task and the specification of a run that would begin."""


def created(**given):
    """The task and the specification that an estimator makes of its arguments."""

    def create(*run):
        raise Created(*run[:2])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "create", create)
        with pytest.raises(Created) as run:
            DPClassifier(2.5, **PUBLIC, **given).fit(X, Y)
    return run.value.args


def test_every_argument_reaches_the_run():
    given = {"delta": 1e-7, "model": "small", "interaction": "dot", "number_transform": "log1p"}
    options = {"epochs": 3, "batch_size": 7, "l2_clip_norm": 0.25}
    task, spec = created(**given, sampler="poisson", options=options, random_state=1)
    asked = {"target_epsilon": 2.5, "target_delta": 1e-7, "l2_clip_norm": 0.25}
    assert spec.options().items() >= asked.items()
    assert spec.sampler == SETTINGS["poisson"](batch_size=7, epochs=3)
    assert task.sizes == replace(PRESETS["small"], interaction="dot")
    assert (task.schema.transform, task.schema.bounds) == ("log1p", ((-1, 1),) * 3)
    seeds = [created(random_state=state)[1].init_seed for state in (1, 1, 2)]
    assert seeds[0] == seeds[1] == spec.init_seed != seeds[2]


OF_USERS = {**PUBLIC, "sampler": "user-poisson", "max_contributions": 2, "model": "linear"}
FEW = {"batch_size": 20, "epochs": 1, "overflow": "accumulate"}


def test_groups_are_the_protected_users():
    model = DPClassifier(3.0, **OF_USERS, options=FEW | {"audit": False})
    users = np.array([f"user {i % 25}" for i in range(60)])
    guarantee = model.fit(X, Y, groups=users).guarantee_
    assert guarantee["unit"] == "user"
    assert "unit: one user" in guarantee["guarantee"]
    [segment] = guarantee["segments"]
    sampler = segment["sampler"]
    assert (sampler["num_examples"], sampler["num_users"]) == (50, 25)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["a"] * 59, "groups has 59 users but X has 60 rows"),
        (["a"] * 59 + [None], "groups, row 59: found nothing, expected a user"),
        (np.ones(60), "groups: holds double, expected texts, integers"),
        (np.ones((60, 2), int), "groups: expected values of one type"),
    ],
)
def test_groups_that_do_not_name_each_rows_user_are_refused(groups, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        DPClassifier(3.0, **OF_USERS).fit(X, Y, groups=groups)


@pytest.mark.parametrize(("kind", "second"), [(DPClassifier, 1e-5), (DPRegressor, (0, 100))])
def test_all_but_epsilon_is_given_by_name(kind, second):
    with pytest.raises(TypeError, match="positional"):
        kind(3.0, second)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (None, "label_bounds must be declared"),
        ((1, 0), "label bounds 1:0: expected LOW:HIGH"),
        (1, "label_bounds of 1 number columns"),
    ],
)
def test_labels_that_are_numbers_need_public_bounds(bounds, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        DPRegressor(3.0, bounds=(-1, 1), label_bounds=bounds).fit(X, Y)


@pytest.mark.long
def test_two_fits_with_one_random_state_have_fresh_noise():
    one, other = fitted(), fitted()
    assert not np.array_equal(one.predict_proba(X), other.predict_proba(X))
    rows = [segment.pop("rows") for fit in (one, other) for segment in fit.guarantee_["segments"]]
    assert len(set(rows)) == 2  # each run names its own
    assert one.guarantee_ == other.guarantee_


@pytest.mark.long
def test_ctrl_c_ends_a_search_over_fits(monkeypatch):
    """Errors of a fit do not: a search counts it as failed, and goes on."""

    class Interrupted:
        def train(self):
            raise Stopped("stopped at step 1 of 2; all is saved: `dpsgd resume` resumes it")

    monkeypatch.setattr(Run, "create", lambda *_, **__: Interrupted())
    with pytest.raises(KeyboardInterrupt, match="keeps nothing"):
        cross_val_score(DPClassifier(3.0, **PUBLIC), X, Y)


def test_classes_read_from_y_are_said_to_be_uncovered():
    model = fitted(classes="from y")
    said = "classes were read from y"
    assert said in model.guarantee_["guarantee"]
    assert any(said in line for line in model.guarantee_["not_covered"])


@pytest.mark.long
@pytest.mark.parametrize("frame", ["pandas", "polars", None])
def test_columns_of_any_table_are_learned_from_in_a_pipeline(frame):
    n = 2_000
    city = RNG.choice(["Oslo", "Rome", None], n)
    age = RNG.uniform(20, 60, n)
    y = np.where((city == "Rome") | (age > 50), "yes", "no")
    columns = {"city": city, "age": age}
    if frame is None:
        rows = np.array([*columns.values()], object).T
    else:
        rows = pytest.importorskip(frame).DataFrame(columns)
    categories = ["x0" if frame is None else "city"]
    how = {"bounds": (0, 100), "classes": ("no", "yes"), "categories": categories}
    model = make_pipeline(FunctionTransformer(), DPClassifier(8.0, **how)).fit(rows, y)
    assert model.score(rows, y) > 0.9
    assert set(model.predict(rows)) == {"no", "yes"}
    assert model.predict_proba(rows).shape == (n, 2)


@pytest.mark.long
def test_several_classes_and_numbers_are_learned_privately():
    rows = RNG.uniform(-1, 1, (4_000, 2))
    kinds = np.array(["left", "middle", "right"])[np.digitize(rows[:, 0], (-0.3, 0.3))]
    model = DPClassifier(8.0, bounds=(-1, 1), classes=("left", "right", "middle")).fit(rows, kinds)
    assert model.score(rows, kinds) > 0.9
    assert "4 noisy sums over all rows" in "".join(model.guarantee_["notes"])
    assert model.predict_proba(rows).shape == (4_000, 3)
    numbers = 10 + 5 * np.abs(rows[:, 1])
    model = DPRegressor(8.0, bounds=(-1, 1), label_bounds=(0, 14)).fit(rows, numbers)
    assert model.score(rows, np.minimum(numbers, 14)) > 0.8
    assert model.predict(rows).max() <= 14


@pytest.mark.long
@pytest.mark.parametrize(
    "model", [DPClassifier(classes="from y"), DPRegressor(label_bounds=(-500, 500))]
)
def test_scikit_learns_checks_hold_but_for_those_that_cannot(model, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where they leave folders
    model.set_params(epsilon=8.0, bounds=(-10, 10))
    found = check_estimator(model, expected_failed_checks=EXPECTED_FAILED_CHECKS, on_fail=None)
    assert [one["check_name"] for one in found if one["status"] == "failed"] == []
    expected = [one for one in found if one["expected_to_fail"]]
    assert [one["check_name"] for one in expected if one["status"] == "passed"] == []


@pytest.mark.long
def test_few_rows_with_public_bounds_are_learned_from():
    rows = load_breast_cancer()
    bounds = [(0.0, float(most)) for each in OF_CELLS.values() for most in each]
    found = []
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(rows.target))
        train, test = order[:457], order[457:]
        model = DPClassifier(3.0, delta=1e-5, bounds=bounds, classes=(0, 1))
        model.fit(rows.data[train], rows.target[train])
        p = model.predict_proba(rows.data[test])[:, 1]
        found.append(roc_auc_score(rows.target[test], p))
    assert fmean(found) >= 0.97


@pytest.mark.long
@pytest.mark.parametrize("size", [10, 40])
def test_square_data_are_trained(size):
    x = np.random.default_rng(size).uniform(-1, 1, (size, size))
    found = DPClassifier(3.0, **PUBLIC).fit(x, (x[:, 0] > 0).astype(int))
    assert found.guarantee_["epsilon_upper"] <= 3


@pytest.mark.short("9-*")
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("transform", ["none", "log1p", "both"])
@pytest.mark.parametrize("bounded", [0, 9, 12])
def test_models_hold_public_arrays_alone(preset, transform, bounded):
    """A model is refused for no number of rows: each array that it holds is declared."""
    names = tuple(f"x{k}" for k in range(12))
    ends = tuple((-1.0 - k, 2.0 + k) for k in range(bounded)) + (None,) * (12 - bounded)
    categories = tuple(f"c{k}" for k in range(9))
    schema = Schema("own", names, categories, (16,) * 9, transform=transform, bounds=ends)
    model = ClickModels(replace(PRESETS[preset], max_buckets=16), schema, hash_seed=0)
    params, rows = jax.eval_shape(lambda: model.init(0)), model.generated(1)
    example = jax.tree.map(lambda x: x[0], rows)
    trace = jax.make_jaxpr(jax.grad(model.loss))(params, example)
    assert not [array.shape for array, _ in (*held_arrays(trace), *reachable_arrays(model.loss))]
