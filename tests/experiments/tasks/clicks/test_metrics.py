"""Metrics: exact, also with ties, and equal to their definitions."""

import dataclasses
import itertools
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.tasks.clicks import metrics

SCORED_LABELS = st.lists(
    st.tuples(st.integers(-3, 3), st.integers(0, 1)), min_size=2, max_size=40
).filter(lambda rows: 0 < sum(label for _, label in rows) < len(rows))


@given(SCORED_LABELS)
def test_auc_is_the_share_of_ordered_pairs_ties_half(rows):
    logits, labels = (np.array(column) for column in zip(*rows, strict=True))
    pairs = itertools.product(logits[labels == 1], logits[labels == 0])
    wins = [1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs]
    assert metrics.auc(logits, labels) == pytest.approx(np.mean(wins), abs=1e-12)
    counts = np.zeros((2, 7), np.int64)
    np.add.at(counts, (labels, logits + 3), 1)
    assert metrics.auc_of_counts(counts) == pytest.approx(np.mean(wins), abs=1e-12)
    assert np.isnan(metrics.auc_of_counts(counts * [[1], [0]]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_metrics_of_non_finite_logits_are_nan_without_warning(bad):
    logits, labels = np.array([0.5, bad, -0.5, 1e300]), np.array([1, 1, 0, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = metrics.binary_metrics(logits, labels)
        alone = metrics.auc(logits, labels), metrics.log_loss(logits, labels)
    *values, rows, positives = dataclasses.astuple(found)
    assert np.isnan([*values, *alone]).all()
    assert (rows, positives) == (4, 2)


@given(st.lists(st.floats(-(2.0**127), 2.0**127), min_size=2, max_size=20))
def test_every_metric_of_finite_logits_is_finite(logits):
    labels = np.arange(len(logits)) % 2
    found = metrics.binary_metrics(np.array(logits), labels)
    assert np.isfinite(dataclasses.astuple(found)).all()


def test_calibration_errors_vanish_only_when_calibrated():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=200_000)
    labels = (rng.random(logits.size) < 1 / (1 + np.exp(-logits))).astype(int)
    good = metrics.binary_metrics(logits, labels)
    shifted = metrics.binary_metrics(logits + 0.5, labels)
    assert good.predicted_over_observed == pytest.approx(1, abs=0.02)
    assert good.expected_calibration_error < 0.01
    assert shifted.predicted_over_observed > 1.15
    assert shifted.expected_calibration_error > 0.05


@given(st.floats(0.01, 0.99))
def test_normalised_entropy_is_one_for_the_base_rate(rate):
    labels = np.arange(1000) < 1000 * rate
    logit = np.log(labels.mean() / (1 - labels.mean()))
    constant = metrics.binary_metrics(np.full(1000, logit), labels)
    assert constant.normalised_entropy == pytest.approx(1.0)
    assert constant.predicted_over_observed == pytest.approx(1.0)
    knowing = metrics.binary_metrics(logit + labels - 0.5, labels)
    assert knowing.normalised_entropy == pytest.approx(
        knowing.log_loss
        / -(np.log(labels.mean()) * labels + np.log1p(-labels.mean()) * ~labels).mean()
    )
    assert knowing.normalised_entropy < 1.0


def test_one_class_gives_nan_and_a_confident_error_is_finite():
    one_class = metrics.binary_metrics(np.arange(3.0), np.zeros(3))
    assert np.isnan([one_class.auc, one_class.normalised_entropy]).all()
    assert metrics.log_loss(np.array([800.0]), np.array([0])) == 800.0


def test_metrics_refuse_empty_and_unequal_input():
    with pytest.raises(ValueError, match="one label per logit"):
        metrics.binary_metrics(np.zeros(3), np.zeros(2))
    with pytest.raises(ValueError, match="one label per logit"):
        metrics.binary_metrics(np.zeros(0), np.zeros(0))
