"""Metrics of a classifier from its logits: accuracy and log loss."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from scipy.special import log_softmax


def class_metrics(
    blocks: Iterable[tuple[np.ndarray, np.ndarray]],
) -> dict[str, float]:
    """Returns accuracy, log loss (nats) and number of rows.

    Accuracy and log loss are NaN if a logit is not finite: the training diverged.

    >>> class_metrics([(np.array([[0.0, 0.0], [0.0, 9.0]]), np.array([0, 0]))])["accuracy"]
    0.5

    Args:
      blocks: Logits, float[rows, classes], and labels, int[rows], of consecutive rows.

    Raises:
      ValueError: If there are no rows.
    """
    right, loss, count = 0, 0.0, 0
    for logits, labels in blocks:
        scores = np.array(logits, np.float64)
        scores[~np.isfinite(scores)] = np.nan
        label_scores = log_softmax(scores, axis=1)[np.arange(labels.size), labels]
        right += int(np.sum(scores.argmax(axis=1) == labels))
        loss -= float(np.sum(label_scores))
        count += labels.size
    if not count:
        raise ValueError("there are no rows to evaluate the model on")
    accuracy = float("nan") if np.isnan(loss) else right / count
    return {"accuracy": accuracy, "log_loss": loss / count, "num_examples": count}
