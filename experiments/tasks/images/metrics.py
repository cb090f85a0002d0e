"""How well are images told apart by a few of each class, from their embeddings."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

SHOTS = 5
"""Images of each class from which others are told apart."""
EPISODES = 500
"""Drawn for a figure of merit, at a public seed."""


def few_shot_metrics(blocks: Iterable[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Returns how often the nearest prototype is that of the right class, and the number of rows.

    In each of `EPISODES`, `SHOTS` images of every class are its support, whose mean is its
    prototype, and of those that are left 15 of every class, or as many as the smallest has, are
    told apart. NaN where an embedding is not finite: the training diverged.

    Args:
      blocks: Embeddings, float[rows, dimension], and labels, int[rows], of some rows after others.

    Raises:
      ValueError: if there are not two classes, or one has too few images.
    """
    parts = list(blocks)
    labels = np.concatenate([y for _, y in parts]) if parts else np.zeros(0, int)
    classes, counts = np.unique(labels, return_counts=True)
    if classes.size < 2 or counts.min() <= SHOTS:
        raise ValueError(
            f"to tell classes apart by {SHOTS} images of each takes two of them, with more than "
            f"that: there are {dict(zip(classes.tolist(), counts.tolist(), strict=True))}"
        )
    found = np.concatenate([np.asarray(x, np.float64).reshape(len(x), -1) for x, _ in parts])
    rng, right = np.random.default_rng(0), []
    size = min(int(counts.min()), SHOTS + 15)
    for _ in range(EPISODES):
        drawn = np.stack([rng.permutation(np.flatnonzero(labels == one))[:size] for one in classes])
        prototypes, queries = found[drawn[:, :SHOTS]].mean(1), found[drawn[:, SHOTS:]]
        distances = np.sum(prototypes**2, axis=1) - 2 * queries @ prototypes.T
        right.append(np.mean(distances.argmin(axis=-1) == np.arange(classes.size)[:, None]))
    accuracy = float(np.mean(right)) if np.isfinite(found).all() else float("nan")
    return {"accuracy": accuracy, "num_examples": labels.size}
