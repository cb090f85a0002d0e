"""Recommended settings of a run, from public numbers alone.

These are the number of rows, the wanted guarantee and, for lazy tables, the size of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from samplers.settings import DEFAULTS


@dataclass(frozen=True)
class Settings:
    """Recommended settings; the defaults hold for tasks that recommend none."""

    batch_size: int = DEFAULTS["batch_size"]
    """Expected number of rows in a batch."""
    epochs: int = DEFAULTS["epochs"]
    """Passes over the rows."""
    l2_clip_norm: float = 4.0
    """Bound on the L2 norm of each clipped gradient; unused without privacy."""
    learning_rate: float = 3e-3
    """Peak step size; the default is for Adam."""
    tables_learning_rate: float | None = None
    """Peak step size of lazy tables; None for the value of `table_step_size`."""
    tables_momentum: float = 0.0
    """Momentum of lazy tables, in [0, 1)."""


@dataclass(frozen=True)
class RecommendationRequest:
    """Public numbers and options that a recommendation may use."""

    num_examples: int
    """Number n of training rows."""
    target_delta: float
    """Delta of the guarantee."""
    noise_multiplier: float | None = None
    """Noise multiplier; None with a target epsilon or without privacy."""
    target_epsilon: float | None = None
    """Epsilon to certify for the whole run; None with a noise multiplier or without privacy."""
    batch_size: int | None = None
    """Expected batch size; None if open."""
    epochs: int | None = None
    """Passes over the rows; None if open."""
    l2_clip_norm: float | None = None
    """Clipping norm; None if open."""
    optimizer: str = "adam"
    """Optimizer: adam, also for AdamW, whose settings are the same; or sgd."""
    momentum: float = 0.0
    """SGD momentum, in [0, 1)."""
    tables: str = "dense"
    """Training of tables: dense, by the optimizer; or lazy, by separate SGD."""
    tables_momentum: float | None = None
    """Momentum of lazy tables; None if open."""

    @property
    def private(self) -> bool:
        """True if the run has noise."""
        return self.noise_multiplier is not None or self.target_epsilon is not None


def generic(request: RecommendationRequest) -> Settings:
    """Returns the settings for a task that recommends none.

    >>> few = generic(RecommendationRequest(500, 1e-3))
    >>> few.batch_size, few.epochs  # no larger batches than there are rows
    (500, 10)
    """
    return Settings(
        batch_size=min(DEFAULTS["batch_size"], request.num_examples),
        epochs=DEFAULTS["epochs"],
        learning_rate=default_rate(request.optimizer, request.momentum),
    )


def default_rate(optimizer: str, momentum: float) -> float:
    """Returns the default peak step size of an optimizer.

    Momentum multiplies a gradient's total effect by 1 / (1 - momentum), which SGD's step size
    undoes.

    >>> default_rate("adam", 0.0), default_rate("sgd", 0.9)
    (0.003, 0.1)

    Args:
      optimizer: adam or sgd.
      momentum: SGD momentum, in [0, 1).
    """
    return Settings.learning_rate if optimizer == "adam" else float(f"{1 - momentum:.6g}")


def warm_rate(rate: float, request: RecommendationRequest) -> float:
    """Returns the step size of a run from an earlier model.

    At its usual rate a run would forget that model. The factor is 0.5 up to epsilon 1 and 0.7 from
    epsilon 3, linear in log(epsilon) between, and 1 without a target epsilon.

    >>> wanted = [RecommendationRequest(88_000, 1e-5, target_epsilon=e) for e in (0.5, 1, 3, 8)]
    >>> [warm_rate(0.01, request) for request in wanted]
    [0.005, 0.005, 0.007, 0.007]

    Args:
      rate: Usual peak step size.
      request: Guarantee and options of the run.
    """
    if (epsilon := request.target_epsilon) is None:
        return rate
    fraction = min(1.0, max(0.0, math.log(epsilon) / math.log(3)))
    return float(f"{rate * (0.5 + 0.2 * fraction):.2g}")


MOST_NOISE = 0.2
"""Largest standard deviation of a coordinate's displacement by noise over a run."""


def table_step_size(
    request: RecommendationRequest,
    settings: Settings,
    *,
    most: float = 10.0,
    without_noise: float = 1.0,
) -> float:
    """Returns the peak step size of lazy tables.

    It is about 2.1 (1 - mu) / (N r)^(2/3), for N steps whose mean gradients have noise of standard
    deviation r = sigma C / b, with sigma the noise multiplier. See
    docs/explanation/step-sizes-of-lazy-tables.md.

    Args:
      request: Guarantee and options of the run; its options override `settings`.
      settings: Batch size b, epochs, clipping norm C and momentum mu.
      most: Largest step size at mu = 0.
      without_noise: Step size at mu = 0 of a run without noise.
    """
    batch_size = request.batch_size or settings.batch_size
    steps = math.ceil(request.num_examples / batch_size) * (request.epochs or settings.epochs)
    rate = without_noise
    if request.private:
        sigma = about_sigma(request, batch_size, steps)
        noise = steps * sigma * (request.l2_clip_norm or settings.l2_clip_norm) / batch_size
        rate = min(most, 2.1 / noise ** (2 / 3), MOST_NOISE / 0.6 * math.sqrt(steps) / noise)
    momentum = request.tables_momentum
    return float(f"{rate * (1 - (settings.tables_momentum if momentum is None else momentum)):.2g}")


def about_sigma(request: RecommendationRequest, batch_size: int, steps: int) -> float:
    """Returns an approximate noise multiplier, which no guarantee uses.

    >>> round(about_sigma(RecommendationRequest(8_000, 1e-5, target_epsilon=3.0), 400, 200), 1)
    1.3

    Args:
      request: Guarantee of the run and number of rows.
      batch_size: Expected batch size.
      steps: Number of steps.
    """
    if request.noise_multiplier is not None:
        return request.noise_multiplier
    epsilon = request.target_epsilon  # mu^2 / 2 + mu tail, about
    assert epsilon is not None, "it is asked of runs with noise"
    tail = -NormalDist().inv_cdf(min(0.5, request.target_delta))
    mu = 2 * epsilon / (math.hypot(tail, math.sqrt(2 * epsilon)) + tail)
    ratio = mu * request.num_examples / batch_size / math.sqrt(steps)
    return 1 / math.sqrt(math.log1p(min(ratio, 1e150) ** 2))


LEAST_SIGNAL = 1000.0
"""Smallest `Mechanism.signal_to_noise` of a reliable model, measured on four tables of 455 to 8,800
rows at epsilon 1, 3 and 8."""


def weak_signal(ratio: float | None, num_examples: int) -> str | None:
    """Returns a warning that noise outweighs the signal, or None.

    Args:
      ratio: `Mechanism.signal_to_noise`, or None.
      num_examples: Number of training rows.

    >>> weak_signal(2_000.0, 8_800) is None
    True
    """
    if ratio is None or ratio >= LEAST_SIGNAL:
        return None
    return (
        f"noise will probably drown the signal of {num_examples:,} rows (ratio {ratio:,.0f}; below "
        f"{LEAST_SIGNAL:,.0f} models often learn nothing): use more rows or a larger epsilon, and "
        "test the model before you trust it"
    )


CHOICES = {
    "batch_size": "batch size",
    "epochs": "epochs",
    "l2_clip_norm": "clipping norm",
    "learning_rate": "learning rate",
    "tables_learning_rate": "learning rate of tables",
    "tables_momentum": "momentum of tables",
    "flush_every": "steps between flushes",
}
"""Words for the options that a run chooses."""


def sentence(chosen: Mapping[str, Any]) -> str:
    """Returns a sentence on a run's choices, `ResolvedRun.chosen`.

    >>> sentence({"settings": {"batch_size": 1024, "learning_rate": 3e-3}})
    'chosen: batch size 1,024, learning rate 0.003'
    """
    warm = chosen.get("warm")
    clauses = [
        f"{CHOICES[name]} {value:{',' if isinstance(value, int) else 'g'}}"
        + (f" (lower than usual, as {warm['why']})" if warm and name == "learning_rate" else "")
        for name, value in chosen.get("settings", {}).items()
    ]
    reasons: dict[str, list[str]] = {}
    for name, choice in chosen.get("task", {}).items():
        reasons.setdefault(choice["why"], []).append(f"{name} {choice['value']}")
    clauses += [f"{', '.join(names)}, as {why}" for why, names in reasons.items()]
    if tables := chosen.get("tables"):
        clauses.append(f"tables {tables['tables']}, as {tables['why']}")
    if noise := chosen.get("noise"):
        bands, sigma = noise["bands"], noise["noise_multiplier"]
        law = f"of {bands:,} bands" if bands > 1 else "independent"
        clauses.append(f"noise {law}, sigma {sigma:.4g}, as {noise['why']}")
    return f"chosen: {', '.join(clauses)}"
