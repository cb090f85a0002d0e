"""Rows are scored block by block in one program, as all rows at once."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpsgd.models import predictions
from experiments.tasks.clicks import model as evaluate
from experiments.tasks.splits import concatenate

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


def test_blocks_are_scored_by_one_program_as_all_rows_at_once(blocks, caplog):
    predictions._compiled.cache_clear()
    evaluate._map_rows.cache_clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING, "jax"):
        scores = evaluate.score(logit_fn, PARAMS, iter(blocks))
        evaluate.score(logit_fn, 2 * PARAMS, reversed(blocks))
    assert sum("Compiling jit(logit_fn)" in message for message in caplog.messages) == 1
    rows = concatenate(blocks)
    np.testing.assert_allclose(scores.logits, rows["x"] @ PARAMS, rtol=1e-5)
    np.testing.assert_array_equal(scores.labels, rows["label"])


def test_no_rows_have_no_metrics():
    with pytest.raises(ValueError, match="there are no rows"):
        evaluate.score(logit_fn, PARAMS, [])
