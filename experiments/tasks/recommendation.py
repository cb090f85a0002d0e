"""Settings by rule: epochs, their steps, and Adam's total distance."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpsgd.runs.recommendation import RecommendationRequest, Settings, default_rate


@dataclass(frozen=True)
class Rule:
    """Settings for any number of rows; a request's own values and SGD's usual rate win.

    >>> rule = Rule(epochs=30, steps=270, distance=1.15, l2_clip_norm=0.7)
    >>> rule(RecommendationRequest(35_327, 1e-5, target_epsilon=3.0))
    ... # doctest: +ELLIPSIS
    Settings(batch_size=4096, epochs=30, l2_clip_norm=0.7, learning_rate=0.07, ...)
    """

    epochs: int
    """Number of passes over the rows."""
    steps: int
    """Approximate number of steps; a batch is a power of two."""
    distance: float
    """Learning rate of Adam times the square root of the steps."""
    l2_clip_norm: float
    tail: float | None = None
    """Fraction of the steps over which parameters are averaged, at a constant rate."""

    def __call__(self, request: RecommendationRequest) -> Settings:
        """Returns the settings of a run."""
        n = request.num_examples
        epochs = request.epochs or self.epochs
        about = max(1.0, n * epochs / self.steps)
        batch_size = request.batch_size or min(n, 2 ** round(math.log2(about)))
        rate = self.distance / math.sqrt(math.ceil(n / batch_size) * epochs)
        if request.optimizer == "sgd":
            rate = default_rate(request.optimizer, request.momentum)
        rate = float(f"{rate:.2g}")
        return Settings(batch_size, epochs, self.l2_clip_norm, rate, average_tail=self.tail)
