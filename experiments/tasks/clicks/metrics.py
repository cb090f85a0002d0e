"""Exact metrics of a binary classifier from its logits, of all rows and by group of rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import entr, expit, ndtri


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
