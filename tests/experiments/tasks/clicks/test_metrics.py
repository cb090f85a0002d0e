"""Metrics: exact, also with ties, and equal to their definitions."""

from __future__ import annotations

import dataclasses
import itertools
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from experiments.tasks.clicks import metrics
from experiments.tasks.clicks.metrics import (
    FEWEST,
    OTHERS,
    Group,
    by_category,
    by_decile,
    by_probability,
)

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


ROWS = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 1), st.integers(0, 30)), min_size=1, max_size=60
)
WAYS = {
    "probability": lambda p, y, ids: by_probability(p, y),
    "decile": lambda p, y, ids: by_decile(p, y),
    "category": lambda p, y, ids: by_category(ids, p, y, most=4),
}


@pytest.mark.parametrize("way", WAYS)
@given(rows=ROWS)
def test_every_row_is_in_one_group_and_sums_are_kept(way, rows):
    p, y, ids = (np.array(column) for column in zip(*rows, strict=True))
    groups = WAYS[way](p, y, ids)
    assert all(group.rows > 0 for group in groups)
    assert sum(group.rows for group in groups) == p.size
    assert sum(group.observed for group in groups) == y.sum()
    assert sum(group.predicted for group in groups) == pytest.approx(p.sum())
    assert len({group.name for group in groups}) == len(groups)


@given(rows=ROWS)
def test_bins_hold_what_their_names_say(rows):
    p, y, _ = (np.array(column) for column in zip(*rows, strict=True))
    for group in by_probability(p, y, bins=5):
        low, high = map(float, group.name.split(" to "))
        assert low - 1e-9 <= group.prediction <= high + 1e-9


@given(rows=ROWS)
def test_deciles_are_of_equal_size_and_ascend(rows):
    p, y, _ = (np.array(column) for column in zip(*rows, strict=True))
    groups = by_decile(p, y)
    sizes = [group.rows for group in groups]
    assert max(sizes) - min(sizes) <= 1
    assert len(groups) == min(10, p.size)
    predictions = [group.prediction for group in groups]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(predictions))


def test_the_largest_categories_come_first():
    ids = np.repeat([7, 0, 3, 9], [50, 40, 25, 21])
    p, y = np.linspace(0, 1, ids.size), (np.arange(ids.size) % 3 == 0).astype(int)
    groups = by_category(ids, p, y, most=2)
    assert [(g.name, g.rows) for g in groups] == [("bucket 7", 50), ("missing", 40), (OTHERS, 46)]
    assert groups[0].observed == y[:50].sum()
    assert groups[0].predicted == pytest.approx(p[:50].sum())
    assert [g.name for g in by_category(ids, p, y, most=4)][-1] == "bucket 9"
    texts = [*["Rome"] * 30, *["Oslo"] * 20, *[""] * 40, *["\x1bBern"] * 46]
    names = [g.name for g in by_category(ids, p, y, texts, most=4)]
    assert names == ["Rome and others", "missing", "?Bern", "?Bern"]


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8), most=st.integers(1, 8))
def test_every_category_has_enough_rows_to_hide_a_label(sizes, most):
    ids = np.repeat(np.arange(len(sizes)), sizes)
    groups = by_category(ids, np.full(ids.size, 0.5), np.zeros(ids.size, int), most=most)
    assert len(groups) <= most + 1
    assert len(groups) == 1 or min(group.rows for group in groups) >= FEWEST


def test_the_interval_of_a_rate_covers_it_as_often_as_it_says():
    # Wilson's interval, averaged over the law of the count: 0.95 up to its known oscillation.
    for n, rate in ((50, 0.3), (400, 0.02)):
        counts = np.arange(n + 1)
        ends = np.array([Group("", n, 0.0, int(k)).interval() for k in counts])
        covered = (ends[:, 0] <= rate) & (rate <= ends[:, 1])
        assert stats.binom.pmf(counts, n, rate)[covered].sum() == pytest.approx(0.95, abs=0.03)
        assert (ends[:, 0] <= counts / n).all()
        assert (counts / n <= ends[:, 1] + 1e-12).all()


def test_a_group_without_clicks_has_no_ratio():
    assert np.isnan(Group("", 3, 0.5, 0).predicted_over_observed)


@pytest.mark.parametrize("way", WAYS)
def test_undefined_predictions_and_no_rows_are_refused(way):
    with pytest.raises(ValueError, match="diverged"):
        WAYS[way](np.array([0.5, np.nan]), np.array([0, 1]), np.array([1, 1]))
    with pytest.raises(ValueError, match="one label per prediction"):
        WAYS[way](np.zeros(0), np.zeros(0), np.zeros(0, int))
