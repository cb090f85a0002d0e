"""Exact metrics of a binary classifier from its logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import entr, expit


@dataclass(frozen=True)
class BinaryMetrics:
    """Quality of predicted probabilities on labelled rows; NaN if undefined."""

    auc: float
    """Probability that a random positive outscores a random negative; a tie counts one half."""
    log_loss: float
    """Mean negative log likelihood, nats."""
    normalised_entropy: float
    """Log loss relative to predicting the base rate, which has 1."""
    predicted_over_observed: float
    """Sum of predicted probabilities over sum of labels; 1 is calibrated in the large."""
    expected_calibration_error: float
    """Mean over bins of |mean prediction - mean label|, weighted by the bins' sizes."""
    num_examples: int
    num_positives: int


def auc(logits: np.ndarray, labels: np.ndarray) -> float:
    """Returns the exact area under the ROC curve.

    It is the fraction of correctly ordered pairs of a positive and a negative (Mann-Whitney); a
    tied pair counts one half. NaN if one class is absent or a logit is not finite.

    Args:
      logits: Logits, float[n].
      labels: Labels, 0 or 1, [n].

    >>> auc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([0, 0, 1, 1]))
    0.875
    """
    if not np.isfinite(logits).all():
        return float("nan")
    positive = np.asarray(labels) == 1
    _, rank = np.unique(logits, return_inverse=True)
    return auc_of_counts(np.stack([np.bincount(rank, ~positive), np.bincount(rank, positive)]))


def auc_of_counts(counts: np.ndarray) -> float:
    """Returns the exact AUC from counts of labels by score.

    NaN if one class is absent.

    Args:
      counts: Number of rows by label (0, 1) and ascending score, [2, scores].

    >>> auc_of_counts(np.array([[2, 1, 0], [0, 1, 1]]))
    0.9166666666666666
    """
    negative, positive = counts.astype(np.float64)
    pairs = positive.sum() * negative.sum()
    if pairs == 0:
        return float("nan")
    below = np.cumsum(negative) - negative / 2
    return float((positive * below).sum() / pairs)


def log_loss(logits: np.ndarray, labels: np.ndarray) -> float:
    """Returns the mean log loss, in nats.

    The loss of a row is log(1 + e^z) - y z. NaN if a logit is not finite: the training diverged.

    Args:
      logits: Logits z, float[n].
      labels: Labels y, 0 or 1, [n].

    >>> round(log_loss(np.array([0.0, 0.0]), np.array([0, 1])), 4)
    0.6931
    """
    z = np.asarray(logits, np.float64)
    if not np.isfinite(z).all():
        return float("nan")
    return float(np.mean(np.logaddexp(0.0, z) - np.asarray(labels) * z))


def base_rate_entropy(labels: np.ndarray) -> float:
    """Returns the log loss of predicting the base rate, nats.

    It is -y log y - (1 - y) log(1 - y), y the mean of `labels` (0 or 1, [n]), and 0 for one class.

    >>> round(base_rate_entropy(np.array([0, 1, 0, 1])), 4)
    0.6931
    """
    rate = np.mean(labels)
    return float(entr(rate) + entr(1.0 - rate))


def expected_calibration_error(
    probabilities: np.ndarray,
    labels: np.ndarray,
    bins: int = 15,
) -> float:
    """Returns the expected calibration error over equal bins.

    It is sum_b |sum_{i in b} (p_i - y_i)| / n, b over the bins. NaN if a probability is NaN.

    >>> expected_calibration_error(np.array([0.2, 0.9]), np.array([0, 1]))
    0.15

    Args:
      probabilities: Predicted probabilities p, float[n].
      labels: Labels y, 0 or 1, [n].
      bins: Number of bins of p.

    Source: Guo et al., "On Calibration of Modern Neural Networks" (ICML 2017), equation 3.
    """
    if np.isnan(probabilities).any():
        return float("nan")
    bin_of = np.minimum((probabilities * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(bin_of, weights=probabilities - labels, minlength=bins)
    return float(np.abs(gaps).sum() / probabilities.size)


def binary_metrics(logits: np.ndarray, labels: np.ndarray) -> BinaryMetrics:
    """Computes all metrics of logits against labels.

    All but the counts are NaN if a logit is not finite.

    >>> binary_metrics(np.array([-1.0, 2.0]), np.array([0, 1])).auc
    1.0

    Args:
      logits: Logits, float[n].
      labels: Labels, 0 or 1, [n].

    Raises:
      ValueError: If there are no rows, or unequal numbers of logits and labels.
    """
    z = np.asarray(logits, np.float64)
    y = np.asarray(labels, np.float64)
    if z.shape != y.shape or z.ndim != 1 or z.size == 0:
        raise ValueError(
            f"metrics need one label per logit and at least one row, got {z.shape} and {y.shape}"
        )
    probabilities = expit(np.where(np.isfinite(z), z, np.nan))
    observed, loss, entropy = y.sum(), log_loss(z, y), base_rate_entropy(y)
    predicted, no_ratio = float(probabilities.sum()), float("nan")
    return BinaryMetrics(
        auc=auc(z, y),
        log_loss=loss,
        normalised_entropy=loss / entropy if entropy else no_ratio,
        predicted_over_observed=predicted / float(observed) if observed else no_ratio,
        expected_calibration_error=expected_calibration_error(probabilities, y),
        num_examples=z.size,
        num_positives=int(y.sum()),
    )
