"""Where a model is right about the rate of clicks and where not: predicted against observed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

FEWEST = 20
"""Rows of a category, or of a bin, that is shown by itself."""
OTHERS = "all others"
"""The group of all categories that are not among the largest."""


@dataclass(frozen=True)
class Group:
    """Rows that have something in common, and what was predicted of them."""

    name: str
    rows: int
    predicted: float
    """Sum of the predicted probabilities."""
    observed: int
    """Sum of the labels."""

    @property
    def prediction(self) -> float:
        """The mean predicted probability."""
        return self.predicted / self.rows

    @property
    def rate(self) -> float:
        """The share of rows with the label 1."""
        return self.observed / self.rows

    @property
    def predicted_over_observed(self) -> float:
        """1 where the level is right; NaN where nothing was observed."""
        return self.predicted / self.observed if self.observed else float("nan")

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Returns Wilson's interval for the rate behind so many rows, drawn independently.

        Source: E. B. Wilson, "Probable Inference, the Law of Succession, and Statistical
        Inference", Journal of the American Statistical Association, 1927.
        """
        z = float(ndtri(0.5 + 0.5 * confidence))
        n, rate = self.rows, self.rate
        centre = (rate + z**2 / (2 * n)) / (1 + z**2 / n)
        reach = z / (1 + z**2 / n) * np.sqrt(rate * (1 - rate) / n + (z / (2 * n)) ** 2)
        return max(0.0, float(centre - reach)), min(1.0, float(centre + reach))


def by_probability(probabilities: np.ndarray, labels: np.ndarray, bins: int = 15) -> list[Group]:
    """Returns the groups of a reliability diagram: `bins` of equal width, without empty ones.

    Args:
      probabilities: Of the label 1, float[n].
      labels: 0 or 1, [n].
      bins: How many.

    Source: A. Niculescu-Mizil and R. Caruana, "Predicting Good Probabilities with Supervised
    Learning", ICML 2005.
    """
    place = np.minimum((_checked(probabilities, labels) * bins).astype(np.int64), bins - 1)
    names = [f"{k / bins:.2f} to {(k + 1) / bins:.2f}" for k in range(bins)]
    return _groups(place, names, probabilities, labels)


def by_decile(probabilities: np.ndarray, labels: np.ndarray) -> list[Group]:
    """Returns ten groups of as many rows, give or take one, in the order of the prediction.

    Rows of equal predictions stay in their order, which tells nothing of their labels.
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
    """Returns the largest categories, `most` at most, the largest first, and all others together.

    A category of fewer than `FEWEST` rows is among the others, who are not fewer either unless they
    are all: the label of a single row shows in none.

    Args:
      ids: Hashed values of a column, int[n]; 0 is *missing*, as in a store.
      probabilities: Of the label 1, float[n].
      labels: 0 or 1, [n].
      texts: Values as their file spells them, n of them, which name the categories; or none.
      most: How many categories to show.
    """
    _checked(probabilities, labels)
    found, place, sizes = np.unique(ids, return_inverse=True, return_counts=True)
    order = np.argsort(-sizes, kind="stable")
    shown = int(np.count_nonzero(sizes[order][:most] >= FEWEST))
    while shown and 0 < sizes[order][shown:].sum() < FEWEST:
        shown -= 1
    rank = np.empty(order.size, np.int64)
    rank[order] = np.arange(order.size)
    spelled: list[Counter[str]] = [Counter() for _ in range(shown)]
    for at, text in zip(rank[place], texts, strict=False):
        if at < shown:
            spelled[at][text] += 1
    names = [_name(*pair) for pair in zip(found[order].tolist(), spelled, strict=False)]
    return _groups(np.minimum(rank[place], shown), [*names, OTHERS], probabilities, labels)


def _name(id_: int, texts: Counter[str]) -> str:
    """Returns the name of a category: its most frequent spelling, where spellings are known."""
    if id_ == 0 or not texts:
        return f"bucket {id_}" if id_ else "missing"
    most = "".join(c if c.isprintable() else "?" for c in max(texts, key=lambda t: (texts[t], t)))
    return f"{most:.40}{' and others' * (len(texts) > 1)}"


def _checked(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the probabilities, or raises ValueError for ones that cannot be grouped."""
    if probabilities.shape != labels.shape or probabilities.size == 0:
        raise ValueError(f"no pairs: {probabilities.shape} predictions, {labels.shape} labels")
    if not np.isfinite(probabilities).all():
        raise ValueError("some predictions are undefined, as of a model that diverged")
    return probabilities


def _groups(
    place: np.ndarray, names: list[str], probabilities: np.ndarray, labels: np.ndarray
) -> list[Group]:
    """Returns the groups that have rows: row i is of the group names[place[i]]."""
    rows, predicted, observed = (
        np.bincount(place, weights, minlength=len(names))
        for weights in (None, probabilities.astype(np.float64), labels)
    )
    return [
        Group(name, int(rows[k]), float(predicted[k]), round(observed[k]))
        for k, name in enumerate(names)
        if rows[k]
    ]
