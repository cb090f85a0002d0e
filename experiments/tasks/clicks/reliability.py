"""Reliability of predicted rates by group: predicted against observed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

FEWEST = 20
"""Fewest rows of a category, or of a bin, that is shown separately."""
OTHERS = "all others"
"""Name of the group of all smaller categories."""


@dataclass(frozen=True)
class Group:
    """Group of rows, with predicted and observed positives."""

    name: str
    rows: int
    predicted: float
    """Sum of the predicted probabilities."""
    observed: int
    """Sum of the labels."""

    @property
    def prediction(self) -> float:
        """Mean predicted probability."""
        return self.predicted / self.rows

    @property
    def rate(self) -> float:
        """Fraction of rows with the label 1."""
        return self.observed / self.rows

    @property
    def predicted_over_observed(self) -> float:
        """Predicted over observed positives; NaN if none was observed."""
        return self.predicted / self.observed if self.observed else float("nan")

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Returns Wilson's confidence interval for the rate of independent rows.

        >>> low, high = Group("all", rows=100, predicted=22.0, observed=20).interval()
        >>> round(low, 3), round(high, 3)
        (0.133, 0.289)

        Source: E. B. Wilson, "Probable Inference, the Law of Succession, and Statistical
        Inference", Journal of the American Statistical Association, 1927.
        """
        z = float(ndtri(0.5 + 0.5 * confidence))
        n, rate = self.rows, self.rate
        centre = (rate + z**2 / (2 * n)) / (1 + z**2 / n)
        reach = z / (1 + z**2 / n) * np.sqrt(rate * (1 - rate) / n + (z / (2 * n)) ** 2)
        return max(0.0, float(centre - reach)), min(1.0, float(centre + reach))


def by_probability(probabilities: np.ndarray, labels: np.ndarray, bins: int = 15) -> list[Group]:
    """Returns the non-empty groups of a reliability diagram.

    >>> p, y = np.array([0.1, 0.2, 0.9]), np.array([0, 0, 1])
    >>> [(group.name, group.rows) for group in by_probability(p, y, bins=2)]
    [('0.00 to 0.50', 2), ('0.50 to 1.00', 1)]

    Args:
      probabilities: Predicted probabilities of the label 1, float[n].
      labels: Labels, 0 or 1, [n].
      bins: Number of equal bins of the probability.

    Source: A. Niculescu-Mizil and R. Caruana, "Predicting Good Probabilities with Supervised
    Learning", ICML 2005.
    """
    place = np.minimum((_checked(probabilities, labels) * bins).astype(np.int64), bins - 1)
    names = [f"{k / bins:.2f} to {(k + 1) / bins:.2f}" for k in range(bins)]
    return _groups(place, names, probabilities, labels)


def by_decile(probabilities: np.ndarray, labels: np.ndarray) -> list[Group]:
    """Returns ten groups of rows, equal in size, by ascending prediction.

    Rows of equal predictions keep their order, which is independent of their labels.

    >>> p, y = np.linspace(0.05, 0.95, 20), np.arange(20) % 2
    >>> [group.rows for group in by_decile(p, y)]
    [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]

    Args:
      probabilities: Predicted probabilities of the label 1, float[n].
      labels: Labels, 0 or 1, [n].
    """
    n = _checked(probabilities, labels).size
    place = np.empty(n, np.int64)
    place[np.argsort(probabilities, kind="stable")] = np.arange(n) * 10 // n
    return _groups(place, [str(k) for k in range(1, 11)], probabilities, labels)


def by_category(
    ids: np.ndarray,
    probabilities: np.ndarray,
    labels: np.ndarray,
    texts: Sequence[str] = (),
    *,
    most: int = 10,
) -> list[Group]:
    """Returns the largest categories, largest first, and all others together.

    A category of fewer than `FEWEST` rows joins the others. The others too have at least `FEWEST`
    rows, unless they are all rows: no group shows the label of a single row.

    Args:
      ids: Hashed values of a column, int[n]; 0 is *missing*, as in a store.
      probabilities: Predicted probabilities of the label 1, float[n].
      labels: Labels, 0 or 1, [n].
      texts: Texts of the values, [n], which name the categories; empty for hashed names.
      most: Largest number of categories to show.
    """
    _checked(probabilities, labels)
    values, place, sizes = np.unique(ids, return_inverse=True, return_counts=True)
    order = np.argsort(-sizes, kind="stable")
    num_shown = int(np.count_nonzero(sizes[order][:most] >= FEWEST))
    while num_shown and 0 < sizes[order][num_shown:].sum() < FEWEST:
        num_shown -= 1
    rank = np.empty(order.size, np.int64)
    rank[order] = np.arange(order.size)
    spelled: list[Counter[str]] = [Counter() for _ in range(num_shown)]
    for row_rank, text in zip(rank[place], texts, strict=False):
        if row_rank < num_shown:
            spelled[row_rank][text] += 1
    names = [_name(*pair) for pair in zip(values[order].tolist(), spelled, strict=False)]
    return _groups(np.minimum(rank[place], num_shown), [*names, OTHERS], probabilities, labels)


def _name(id_: int, texts: Counter[str]) -> str:
    """Returns the name of a category: its most frequent spelling, if known."""
    if id_ == 0 or not texts:
        return f"bucket {id_}" if id_ else "missing"
    most = "".join(c if c.isprintable() else "?" for c in max(texts, key=lambda t: (texts[t], t)))
    return f"{most:.40}{' and others' * (len(texts) > 1)}"


def _checked(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the probabilities, or raises ValueError if they cannot be grouped."""
    if probabilities.shape != labels.shape or probabilities.size == 0:
        raise ValueError(
            f"need one label per prediction and at least one row, got {labels.shape} labels "
            f"and {probabilities.shape} predictions"
        )
    if not np.isfinite(probabilities).all():
        raise ValueError(
            "some predictions are not finite: the training diverged; lower the learning rate"
        )
    return probabilities


def _groups(
    place: np.ndarray, names: list[str], probabilities: np.ndarray, labels: np.ndarray
) -> list[Group]:
    """Returns the non-empty groups: row i belongs to names[place[i]]."""
    rows, predicted, observed = (
        np.bincount(place, weights, minlength=len(names))
        for weights in (None, probabilities.astype(np.float64), labels)
    )
    return [
        Group(name, int(rows[k]), float(predicted[k]), round(observed[k]))
        for k, name in enumerate(names)
        if rows[k]
    ]
