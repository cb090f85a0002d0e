"""Rows are scored block by block in one program, and the metrics are those of all rows at once."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpsgd.models import predictions
from experiments.tasks.clicks import evaluate
from experiments.tasks.clicks.metrics import binary_metrics
from experiments.tasks.clicks.target import Binary

SIZES = [5, 16, 1, 40]  # with batches of 8: a part, whole ones, one row, and whole ones again


@pytest.fixture
def blocks(monkeypatch):
    monkeypatch.setattr(predictions, "BATCH", 8)
    rng = np.random.default_rng(0)
    return [
        {"x": rng.normal(size=(size, 3)).astype(np.float32), "label": rng.integers(0, 2, size)}
        for size in SIZES
    ]


def logit_fn(params, example):
    return jnp.dot(params, example["x"])


PARAMS = np.array([1.0, -2.0, 0.5], np.float32)


def test_metrics_are_those_of_all_rows_scored_at_once(blocks):
    whole = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    expected = binary_metrics(np.asarray(whole["x"] @ PARAMS), whole["label"])
    scores = evaluate.score(logit_fn, PARAMS, iter(blocks))
    got = Binary().metrics(scores.logits, scores.labels)
    assert got["num_examples"] == sum(SIZES)
    assert got["auc"] == expected.auc
    assert got["log_loss"] == pytest.approx(expected.log_loss, rel=1e-6)


def test_blocks_of_all_sizes_are_scored_by_one_program(blocks, caplog):
    predictions._compiled.cache_clear()
    evaluate._map_rows.cache_clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        evaluate.score(logit_fn, PARAMS, blocks)
        evaluate.score(logit_fn, 2 * PARAMS, reversed(blocks))
    assert sum("Compiling jit(logit_fn)" in message for message in caplog.messages) == 1


def test_no_rows_have_no_metrics():
    with pytest.raises(ValueError, match="there are no rows"):
        evaluate.score(logit_fn, PARAMS, [])
