"""Metrics of a classifier from its logits, and few-shot accuracy of embeddings."""

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


SHOTS = 5
"""Number of support images of each class."""
EPISODES = 500
"""Number of episodes for a metric, at a public seed."""


def few_shot_problem(labels: np.ndarray) -> str:
    """Returns the reason why `few_shot_metrics` are undefined, or "".

    >>> few_shot_problem(np.repeat([0, 1], 6))
    ''

    Args:
      labels: Labels of the rows to evaluate, int[rows].
    """
    classes, counts = np.unique(labels, return_counts=True)
    if classes.size >= 2 and counts.min() > SHOTS:
        return ""
    return (
        f"few-shot accuracy needs two classes with more than {SHOTS} images each, got "
        f"{dict(zip(classes.tolist(), counts.tolist(), strict=True))}"
    )


def few_shot_metrics(blocks: Iterable[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Returns the accuracy of nearest-prototype classification.

    Each of `EPISODES` episodes averages `SHOTS` images per class into the class's prototype, and
    classifies 15 further images per class (fewer if the smallest class has fewer). The accuracy is
    NaN if an embedding is not finite: the training diverged.

    >>> points, labels = np.repeat(np.eye(2), 6, axis=0), np.repeat([0, 1], 6)
    >>> few_shot_metrics([(points, labels)])
    {'accuracy': 1.0, 'num_examples': 12}

    Args:
      blocks: Embeddings, float[rows, dimension], and labels, int[rows], of consecutive rows.

    Raises:
      ValueError: If there is one class only, or a class has at most `SHOTS` images.
    """
    pairs = list(blocks)
    labels = np.concatenate([y for _, y in pairs]) if pairs else np.zeros(0, int)
    if problem := few_shot_problem(labels):
        raise ValueError(problem)
    classes, counts = np.unique(labels, return_counts=True)
    points = np.concatenate([np.asarray(x, np.float64).reshape(len(x), -1) for x, _ in pairs])
    rng, hits = np.random.default_rng(0), []
    size = min(int(counts.min()), SHOTS + 15)
    for _ in range(EPISODES):
        episode = np.stack([rng.permutation(np.flatnonzero(labels == c))[:size] for c in classes])
        prototypes, queries = points[episode[:, :SHOTS]].mean(1), points[episode[:, SHOTS:]]
        distances = np.sum(prototypes**2, axis=1) - 2 * queries @ prototypes.T
        hits.append(np.mean(distances.argmin(axis=-1) == np.arange(classes.size)[:, None]))
    accuracy = float(np.mean(hits)) if np.isfinite(points).all() else float("nan")
    return {"accuracy": accuracy, "num_examples": labels.size}
