"""Clicks as a task: its rows, its model, what is public of it, and the data that it refuses."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest

from dpsgd.runs.recommendation import RecommendationRequest as Request
from experiments.tasks.clicks.model import shaped
from experiments.tasks.clicks.schema import DISPLAY_ADS, SPONSORED_SEARCH
from experiments.tasks.clicks.sizes import PRESETS, WIDE_FROM
from experiments.tasks.clicks.task import ClickModels, Clicks

SIZES = {"embedding_dim": 2, "max_buckets": 8, "hidden": (4,)}
MODELS = {
    "small": SIZES,
    "small-bins": {**SIZES, "bins": 3},
    "linear": {"model": "linear", "max_buckets": 8, "bins": 3},
    "wide-and-deep": {**SIZES, "model": "wide-and-deep", "bins": 3},
    "small-dot": {**SIZES, "interaction": "dot"},
    "wide-and-deep-cross": {**SIZES, "model": "wide-and-deep", "bins": 3, "interaction": "cross"},
    "linear-dot": {"model": "linear", "max_buckets": 8, "embedding_dim": 2, "interaction": "dot"},
}


@pytest.fixture(scope="module")
def task(store):
    return Clicks(store, **SIZES)


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def of_any_model(request, store):
    """A task of a model whose parameters are all drawn, none of them 0."""
    task = Clicks(store, **request.param)
    return task, drawn(task)


def drawn(task):
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: task.init(0))
    return jax.tree.map(lambda x: rng.normal(0, 0.5, x.shape).astype(np.float32), shapes)


def logarithm(x):
    return math.copysign(math.log1p(abs(x)), x)


def test_sizes_are_the_preset_with_what_was_given(store):
    task = Clicks(store, model="large", hidden=(7,))
    assert task.sizes == dataclasses.replace(PRESETS["large"], hidden=(7,))
    with pytest.raises(ValueError, match="max_buckets must be a power of two"):
        Clicks(store, max_buckets=3)
    with pytest.raises(ValueError, match="embedding_dim=0 is for the linear model"):
        Clicks(store, embedding_dim=0)
    with pytest.raises(ValueError, match="interaction=dot; set embedding_dim"):
        Clicks(store, model="linear", interaction="dot")


@pytest.mark.parametrize("rows", [WIDE_FROM // 2 - 1, WIDE_FROM // 2])
@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, None),
        ({"max_buckets": 8}, None),
        ({"hidden": (4,)}, "small"),
        ({"interaction": "cross"}, "wide-and-deep"),
        ({"model": "large"}, "large"),
    ],
)
def test_the_model_goes_by_rows_and_epsilon_unless_it_is_given(
    rows, given, chosen, store, monkeypatch
):
    monkeypatch.setattr(Clicks, "num_examples", rows)
    asked = Clicks(store, **given)
    task, why = asked.settle(Request(rows, 1e-5, target_epsilon=2.0))
    by_rows = "linear" if rows < WIDE_FROM / 2 else "wide-and-deep"
    assert task.model == (chosen or by_rows)
    assert ("model" in why) == ("model" not in given)
    sizes = {name: size for name, size in given.items() if name != "model"}
    assert task.sizes == dataclasses.replace(PRESETS[task.model], **sizes)
    assert task.settle(Request(1, 1e-5)) == (task, {})
    if chosen is None:
        assert asked.settle(Request(rows, 1e-5, target_epsilon=1.0))[0].model == "linear"
        given, why = asked.settle(Request(rows, 1e-5, noise_multiplier=1.0))
        assert given.model == "linear"
        assert "the choice assumes epsilon 1" in why["model"]
        assert asked.settle(Request(rows, 1e-5))[0].model == "wide-and-deep"
        assert asked.settle(Request(1_000, 1e-5))[0].model == "linear"
        assert asked.sizes == dataclasses.replace(PRESETS["linear"], **sizes)


@pytest.mark.parametrize(
    ("schema", "width", "millions"), [(DISPLAY_ADS, 14, 85.3), (SPONSORED_SEARCH, 17, 56.9)]
)
def test_the_large_preset_has_the_published_parameter_count(schema, width, millions):
    params, _ = shaped(dataclasses.replace(PRESETS["large"], embedding_dim=width), schema)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert round(count / 1e6, 1) == millions


def test_loss_prediction_and_metrics_are_of_one_model(task):
    params, rows = task.init(0), task.columns()
    labels = rows["label"]
    p = np.asarray(jax.jit(task.predict)(params, {k: x for k, x in rows.items() if k != "label"}))
    losses = jax.jit(jax.vmap(task.loss, in_axes=(None, 0)))(params, rows)
    np.testing.assert_allclose(losses, -np.log(np.where(labels == 1, p, 1 - p)), rtol=1e-5)
    found = task.evaluate(params, [rows])
    assert found["log_loss"] == pytest.approx(float(np.mean(losses)), rel=1e-5)
    assert found["num_examples"] == len(labels)
    metrics = task.metrics(params)
    assert metrics["test_num_examples"] == task.store.rows("test")
    again = task.evaluate(params, task.read(task.data, split="validation"))
    assert metrics["validation_auc"] == again["auc"]


@pytest.mark.short("linear", "small", "wide-and-deep")
def test_calibration_scales_and_shifts_the_logit(of_any_model):
    (task, params), rows = of_any_model, of_any_model[0].columns()
    fitted = task.calibration()
    assert fitted is dataclasses.replace(task).calibration()
    logit = jax.jit(jax.vmap(fitted.logit, in_axes=(None, 0)))
    rescaled = fitted.rescaled(params, 0.5, -0.25)
    np.testing.assert_allclose(
        logit(rescaled, rows), 0.5 * logit(params, rows) - 0.25, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(jax.vmap(fitted.label)(rows), rows["label"])
    assert jax.tree.structure(rescaled) == jax.tree.structure(params)


def interacting(kind, x, embeddings, numbers, leaf):
    """The features of DLRM or DCN V2, pair by pair and layer by layer."""
    if kind == "dot":
        vectors = [*embeddings.swapaxes(0, 1)]
        if "/interaction/projection/kernel" in leaf:
            kernel, bias = (leaf[f"/interaction/projection/{name}"] for name in ("kernel", "bias"))
            vectors.append(numbers @ kernel + bias)
        pairs = itertools.combinations(vectors, 2)
        return np.column_stack([x, *((one * other).sum(axis=1) for one, other in pairs)])
    layers, start = (range(2) if kind == "cross" else ()), x
    for k in layers:
        low = x @ leaf[f"/interaction/down/{k}/kernel"]
        up = low @ leaf[f"/interaction/up/{k}/kernel"] + leaf[f"/interaction/up/{k}/bias"]
        x = start * up + x
    return x


@pytest.mark.short(
    *("small-log1p", "*-dot-log1p", "wide-and-deep-cross-log1p", "linear-none", "linear-both")
)
@pytest.mark.parametrize("transform", ["log1p", "none", "both"])
def test_predictions_are_those_of_the_model_written_out_in_numpy(of_any_model, transform):
    of_store, sizes = of_any_model[0], of_any_model[0].sizes
    schema, rows = dataclasses.replace(of_store.schema, transform=transform), of_store.columns()
    task = ClickModels(sizes, schema, hash_seed=0)
    params = drawn(task)
    leaf = {
        "".join(f"/{key.key}" for key in path if hasattr(key, "key")): np.asarray(x, np.float64)
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }
    ids = schema.fold(rows["categories"], sizes.max_buckets)
    looked_up = leaf["/embedding/embedding"][ids + schema.table_offsets(sizes.max_buckets)]
    numbers, missing = rows["integers"].astype(np.float64), rows["integers_missing"]
    if sizes.bins:  # all have bounds; a curve through knots is a sum of one that is 1 at each
        plain = numbers if transform == "none" else np.copysign(np.expm1(abs(numbers)), numbers)
        scales = {"log1p": [logarithm], "none": [float], "both": [logarithm, float]}[transform]
        scales = [np.vectorize(scale) for scale in scales]
        knots = np.eye(1 + max(1, sizes.bins // len(scales)))
        curves = [
            np.interp(scale(x), np.linspace(*scale(ends), len(knots)), knot) * ~absent
            for scale in scales
            for x, ends, absent in zip(plain.T, schema.bounds, missing.T, strict=True)
            for knot in knots
        ]
        numbers = np.concatenate([missing, np.stack(curves, axis=1)], axis=1)
    else:
        numbers = np.concatenate([0.2 * numbers, missing], axis=1)
    embeddings = looked_up[..., : sizes.embedding_dim]
    x = embeddings.reshape(len(ids), -1)
    if sizes.hidden:
        x = np.concatenate([x, numbers], axis=1)
    x = interacting(sizes.interaction, x, embeddings, numbers, leaf)
    if sizes.hidden:
        x = np.maximum(x @ leaf["/hidden/0/kernel"] + leaf["/hidden/0/bias"], 0)
    if sizes.wide:
        x = np.concatenate([x, numbers], axis=1)
    logit = (x @ leaf["/logit/kernel"] + leaf["/logit/bias"])[:, 0]
    logit += looked_up[..., sizes.embedding_dim :].sum(axis=(1, 2))
    found = np.asarray(
        jax.jit(task.predict)(params, {k: v for k, v in rows.items() if k != "label"})
    )
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-logit)), rtol=1e-4, atol=1e-5)
    assert np.ptp(found) > 1e-3
