"""Labels of every kind: read, learned, measured, predicted and refused by the same commands.

A new kind gets all of this by one entry of `KINDS`.
"""

import csv
import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.metrics as reference

from dpsgd import load_exported
from dpsgd.audit.conformance import check_task
from experiments import cli
from experiments.tasks.classes import class_metrics
from experiments.tasks.clicks.formats import table_format, table_schema
from experiments.tasks.clicks.model import pure_functions
from experiments.tasks.clicks.sizes import ModelConfig
from experiments.tasks.clicks.store import Store
from experiments.tasks.clicks.target import target_of
from experiments.tasks.clicks.task import ClickModels
from experiments.tasks.streams import DataError

N = 600
RNG = np.random.default_rng(0)
X, NOISE = RNG.uniform(0, 1, N), RNG.normal(0, 0.05, N)


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a label is asked for, what it is in a file, and what is said of it."""

    options: tuple
    settings: dict
    label: np.ndarray
    columns: tuple
    """Of predictions."""
    good: tuple
    """A metric, and the range in which it lies after training without noise."""
    most_gradient: float
    """Of the loss, by the logits."""
    learned: tuple = ()
    """Options of `train`."""

    @property
    def target(self):
        return self.schema().target

    def schema(self, **more):
        return table_schema("y", categories=("c",), numbers=("x",), **self.settings, **more)


KINDS = {
    "binary": Kind(
        options=("--classes", "no,yes"),
        settings={"classes": ("no", "yes")},
        label=np.where(X + NOISE > 0.5, "yes", "no"),
        columns=("probability",),
        good=("auc", (0.9, 1)),
        most_gradient=1.0,
    ),
    "classes": Kind(
        options=("--classes", "low,middle,high"),
        settings={"classes": ("low", "middle", "high")},
        label=np.array(["low", "middle", "high"])[np.digitize(X + NOISE, [1 / 3, 2 / 3])],
        columns=("probability_low", "probability_middle", "probability_high"),
        good=("accuracy", (0.8, 1)),
        most_gradient=math.sqrt(2),
    ),
    "number": Kind(
        options=("--label-bounds", "10:100"),
        settings={"label_bounds": (10, 100)},
        label=100 * (X + NOISE),
        columns=("prediction",),
        good=("rmse", (0, 9)),
        most_gradient=2.0,
        learned=("--huber", "20"),
    ),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def write(path, kind, label=None):
    label = kind.label if label is None else label
    with open(path, "w", newline="") as file:
        rows = zip(range(N), X, np.arange(N) % 3, label, strict=True)
        csv.writer(file).writerows([("id", "x", "c", "y"), *rows])
    return path


def run(*words):
    assert cli.main([str(word) for word in words]) == 0


@pytest.mark.long
@each_kind
def test_a_label_is_learned_and_scored_by_the_names_of_its_kind(kind, tmp_path, capsys):
    table, store, out, model = (tmp_path / name for name in ("t.csv", "store", "run", "model"))
    columns = ["--label", "y", "--numbers", "x", "--bounds", "x=0:1", "--categories", "c"]
    run("prepare", "csv", write(table, kind), store, *columns, "--values", "c=0,1", *kind.options)
    asked = ["--non-private", "--epochs", "15", *kind.learned]
    run("train", store, "sampler:balls-and-bins", *asked, "--out", out)
    report = json.loads((out / "report.json").read_text())
    description = json.loads((out / "config.json").read_text())["task"]["description"]
    assert description["headline"] in report["metrics"]
    name, (low, high) = kind.good
    assert low <= report["metrics"][f"test_{name}"] <= high
    run("export", out, model)
    run("score", model, table, "--key", "id", "--out", tmp_path / "scores.csv")
    with open(tmp_path / "scores.csv", newline="") as file:
        header, *scores = csv.reader(file)
    assert header == ["id", *kind.columns]
    said = load_exported(model).predict({"x": X, "c": np.arange(N) % 3})
    np.testing.assert_allclose(np.array(scores, float)[:, 1:], said.reshape(N, -1), rtol=1e-5)
    capsys.readouterr()
    code = cli.main(["evaluate", str(out), str(store), "--deciles"])
    assert code == (0 if kind.target.kind == "binary" else 2)
    assert code == 0 or "without two values" in capsys.readouterr().err


SIZES = ModelConfig(embedding_dim=2, max_buckets=8, hidden=(4,), wide=True, bins=3)


@pytest.fixture
def task(kind):
    """Models whose parameters are all drawn, and generated rows."""
    task = ClickModels(SIZES, kind.schema(bounds={"x": (0, 5)}), 0)
    shapes = jax.eval_shape(lambda: task.init(0))
    drawn = jax.tree.map(lambda x: RNG.normal(size=x.shape).astype(np.float32), shapes)
    return task, drawn, task.generated(200)


@pytest.mark.long
@each_kind
def test_a_task_of_any_label_conforms(task):
    of_rows, _, rows = task
    assert check_task(_Trainable(of_rows, rows)).passed


class _Trainable:
    def __init__(self, task, rows):
        self.columns, self._task = lambda: rows, task
        self.metrics = lambda params: {"test_x": 0.0}

    def __getattr__(self, name):
        return getattr(self._task, name)


@each_kind
def test_a_model_has_one_logit_or_one_per_class(kind, task):
    of_rows, params, rows = task
    functions = pure_functions(of_rows.sizes, of_rows.schema)
    logits = jax.eval_shape(jax.vmap(functions.logit, (None, 0)), params, rows)
    outputs = len(kind.columns)
    assert logits.shape == ((200,) if outputs == 1 else (200, outputs))
    again = of_rows.described(json.loads(json.dumps(of_rows.describe())))
    assert again.describe() == of_rows.describe()
    assert again.schema.target == kind.target


@each_kind
def test_calibrations_rescale_logits_and_read_labels(kind, task):
    of_rows, params, rows = task
    offered = of_rows.calibration()
    logit = jax.jit(jax.vmap(of_rows.functions.logit, (None, 0)))
    name, given, shift = {
        "binary": ("platt", (0.5, -0.25), -0.25),
        "classes": ("temperature", (0.5,), 0.0),
        "number": ("affine", (0.5, -0.25), -0.5),  # a logit is twice the calibrated prediction
    }[kind.target.kind]
    assert offered.kind == name
    rescaled = logit(offered.rescaled(params, *given), rows)
    np.testing.assert_allclose(rescaled, 0.5 * logit(params, rows) + shift, atol=1e-4)
    labels = jax.vmap(offered.label)(rows)
    if name != "affine":
        np.testing.assert_array_equal(labels, rows["label"])
        return
    np.testing.assert_allclose(labels, (rows["label"] - 55) / 45, atol=1e-6)
    predicted = jax.jit(jax.vmap(offered.prediction, (None, 0)))(params, rows)
    np.testing.assert_allclose(predicted, logit(params, rows) / 2, atol=1e-5)


@each_kind
def test_losses_have_gradients_of_bounded_length(kind, task):
    of_rows, _, rows = task
    target = of_rows.schema.target
    shape = (200,) if target.outputs == 1 else (200, target.outputs)
    logits = jnp.asarray(2 * RNG.uniform(-1, 1, shape), jnp.float32)
    gradients = jax.jit(jax.vmap(jax.grad(target.loss)))(logits, rows["label"])
    lengths = np.sqrt(np.square(gradients.reshape(200, -1)).sum(axis=1))
    assert 0.5 * kind.most_gradient < lengths.max() <= kind.most_gradient


def test_hubers_loss_is_squared_error_then_its_tangent():
    target, logits = target_of((), (0, 100)), np.linspace(-2, 2, 401, dtype=np.float32)
    residual, huber = logits / 2 - (70 - 50) / 50, 10 / 50
    tangent = huber**2 + 2 * huber * (np.abs(residual) - huber)
    expected = np.where(np.abs(residual) <= huber, residual**2, tangent)
    found = target.robust(10.0).loss(logits, np.float32(70))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@each_kind
def test_hubers_loss_is_of_numbers_alone(kind):
    if kind.target.kind == "number":
        assert kind.target.robust(3.0).huber == 3.0
    else:
        with pytest.raises(ValueError, match="needs a numerical label"):
            kind.target.robust(3.0)
    assert kind.target.robust(0.0) == kind.target


@pytest.mark.parametrize(
    "target", [target_of(()), target_of(("a", "b", "c")), target_of((), (0, 500))]
)
def test_metrics_are_scikit_learns(target):
    z, y = RNG.normal(size=(300, 3)).astype(np.float32), RNG.integers(0, 3, 300)
    logits = z if target.kind == "classes" else np.round(z[:, 0], 1)  # with ties
    match target.kind:
        case "binary":
            labels, p = (y > 1).astype(np.uint8), 1 / (1 + np.exp(-logits.astype(np.float64)))
            expected = {"auc": reference.roc_auc_score(labels, logits)}
            expected["log_loss"] = reference.log_loss(labels, p)
        case "classes":
            labels, p = y, np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
            expected = {"accuracy": reference.accuracy_score(y, p.argmax(axis=1))}
            expected["log_loss"] = reference.log_loss(y, p)
            blocks = class_metrics([(z[:7], y[:7]), (z[7:], y[7:])])
            assert blocks == pytest.approx(target.metrics(z, y))
            far = class_metrics([(np.array([[-2000.0, 0.0]]), np.zeros(1, int))])
            assert far["log_loss"] == 2000
            with pytest.raises(ValueError, match="there are no rows"):
                target.metrics(z[:0], y[:0])
        case "number":
            labels = RNG.uniform(0, 500, 300).astype(np.float32)
            p = np.clip(250 + 125 * logits, 0, 500)
            expected = {"rmse": reference.root_mean_squared_error(labels, p)}
            expected["mae"] = reference.mean_absolute_error(labels, p)
            expected["mean_error"] = np.mean(p - labels)
    found = target.metrics(logits, labels)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert found["num_examples"] == len(labels)
    broken = target.metrics(np.where(np.arange(len(labels)) == 7, np.nan, logits.T).T, labels)
    assert all(math.isnan(broken[name]) for name in expected)


CLASSES = "expected 'low' or 'middle' or 'high'"
BAD = [
    ("classes", "middel", f"found 'middel', {CLASSES}"),
    ("classes", "", f"found nothing, {CLASSES}"),
    ("number", "", "found nothing, expected a finite"),
    *(("number", text, f"found '{text}', expected a finite") for text in ("many", "nan", "inf")),
]


@pytest.mark.parametrize(("kind", "value", "said"), BAD)
def test_an_undeclared_label_is_named_by_line_and_can_be_scored(kind, value, said, tmp_path):
    kind = KINDS[kind]
    path = write(tmp_path / "t.csv", kind, [*kind.label[:5], value, *kind.label[6:]])
    format = table_format(kind.schema())
    with pytest.raises(DataError, match=re.escape(f"t.csv, line 7, column y: {said}")):
        format.prepare([path], tmp_path / "store")
    assert sum(len(block["integers"]) for block in format.read(path, labelled=False)) == N


@each_kind
def test_labels_are_stored_as_they_are_learned(kind, tmp_path):
    made = table_format(kind.schema()).prepare([write(tmp_path / "t.csv", kind)], tmp_path / "s")
    store = Store.open(made.path)
    labels = np.concatenate([np.asarray(store.load(split)["label"]) for split in store.splits])
    assert labels.dtype == kind.target.dtype
    texts = kind.settings.get("classes")
    expected = [texts.index(x) for x in kind.label] if texts else np.clip(kind.label, 10, 100)
    np.testing.assert_allclose(np.sort(labels), np.sort(expected), rtol=1e-6)
    assert kind.target.problem([labels]) == ""
