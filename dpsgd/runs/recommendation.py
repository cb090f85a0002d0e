"""What a run is trained by where its user leaves it open: by public numbers alone.

They are the number of rows, the guarantee that is wanted and, for lazy tables, the noise that they
will get.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from samplers import BatchSampler
from samplers.settings import DEFAULTS


@dataclass(frozen=True)
class Settings:
    """What a run is trained by. The defaults are those of a task that recommends nothing."""

    batch_size: int = DEFAULTS["batch_size"]
    """Expected number of rows in a batch."""
    epochs: int = DEFAULTS["epochs"]
    """Passes over the rows."""
    l2_clip_norm: float = 4.0
    """Bound on the L2 norm of what is clipped as one, which without privacy nothing is."""
    learning_rate: float = 3e-3
    """Peak step size, here of Adam."""
    tables_learning_rate: float | None = None
    """Peak step size of lazy tables; None for that of `table_step_size`."""
    tables_momentum: float = 0.0
    """Of lazy tables."""
    average_tail: float | None = None
    """Share of the steps, at a constant rate, whose parameters are averaged; None for the last
    parameters at a rate that falls."""


@dataclass(frozen=True)
class RecommendationRequest:
    """What a recommendation goes by, all of it public."""

    num_examples: int
    """Training rows n."""
    target_delta: float
    """Delta of the guarantee."""
    noise_multiplier: float | None = None
    """Given; this, the target, or neither: without privacy."""
    target_epsilon: float | None = None
    """To be certified of the whole run."""
    batch_size: int | None = None
    """Given, if it is."""
    epochs: int | None = None
    """Given, if they are."""
    l2_clip_norm: float | None = None
    """Given, if it is."""
    optimizer: str = "adam"
    """Which it is: adam or sgd."""
    momentum: float = 0.0
    """Of SGD."""
    bands: int | str | None = None
    """Steps over which noise is correlated, "auto" if they are chosen later; None for one."""
    tables: str = "dense"
    """How tables are trained: dense, by the optimizer as all else, or lazy, by SGD of their own."""
    tables_momentum: float | None = None
    """Of lazy tables, if it is given."""
    may_average: bool = False
    """Whether `Settings.average_tail` may be chosen, with a learning rate for it."""

    @property
    def private(self) -> bool:
        """Whether there is any noise."""
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
    """Returns the peak step size where none is chosen.

    A gradient moves the parameters of SGD by 1 / (1 - momentum) times the step size in all.

    >>> default_rate("adam", 0.0), default_rate("sgd", 0.9)
    (0.003, 0.1)
    """
    return Settings.learning_rate if optimizer == "adam" else float(f"{1 - momentum:.6g}")


def warm_rate(rate: float, request: RecommendationRequest) -> float:
    """Returns the step size of a run from an earlier model, which the usual one makes it forget.

    It is half the usual one up to epsilon 1 and 0.7 of it from 3 on, linear in log(epsilon)
    between. Where no epsilon is wanted, it is the usual one.

    >>> wanted = [RecommendationRequest(88_000, 1e-5, target_epsilon=e) for e in (0.5, 1, 3, 8)]
    >>> [warm_rate(0.01, request) for request in wanted]
    [0.005, 0.005, 0.007, 0.007]
    """
    if (epsilon := request.target_epsilon) is None:
        return rate
    part = min(1.0, max(0.0, math.log(epsilon) / math.log(3)))
    return float(f"{rate * (0.5 + 0.2 * part):.2g}")


MOST_NOISE = 0.2
"""Standard deviation of how far noise has moved a coordinate by the run's end, at most."""


def table_step_size(
    request: RecommendationRequest,
    settings: Settings,
    *,
    most: float = 10.0,
    without_noise: float = 1.0,
) -> float:
    """Returns the peak step size of lazy tables, by how much noise they get.

    It is 2.1 (1 - mu) / (N r)^(2/3) for N steps with noise of standard deviation r = sigma C / b in
    the mean gradient of each: docs/explanation/step-sizes-of-lazy-tables.md.

    Args:
      request: By which sigma is known, or about; what it gives comes before `settings`.
      settings: b, epochs, C and mu.
      most: At mu = 0 not to be exceeded, however little noise there is.
      without_noise: At mu = 0 where there is none.
    """
    batch_size = request.batch_size or settings.batch_size
    steps = math.ceil(request.num_examples / batch_size) * (request.epochs or settings.epochs)
    rate = without_noise
    if request.private:
        sigma = about_sigma(request, batch_size, steps)
        noise = steps * sigma * (request.l2_clip_norm or settings.l2_clip_norm) / batch_size
        rate = min(most, 2.1 / noise ** (2 / 3), MOST_NOISE / 0.6 * math.sqrt(steps) / noise)
    given = request.tables_momentum
    return float(f"{rate * (1 - (settings.tables_momentum if given is None else given)):.2g}")


def about_sigma(request: RecommendationRequest, batch_size: int, steps: int) -> float:
    """Returns about the noise multiplier that the guarantee takes; no guarantee is made of it."""
    if request.noise_multiplier is not None:
        return request.noise_multiplier
    epsilon = request.target_epsilon  # mu^2 / 2 + mu tail, about
    assert epsilon is not None, "it is asked of runs with noise"
    tail = -NormalDist().inv_cdf(min(0.5, request.target_delta))
    mu = 2 * epsilon / (math.hypot(tail, math.sqrt(2 * epsilon)) + tail)
    ratio = mu * request.num_examples / batch_size / math.sqrt(steps)
    return 1 / math.sqrt(math.log1p(min(ratio, 1e150) ** 2))


_ROWS_AGAIN = 20 / 3
"""Rows of the tables, for each that a batch looks up, that a flush reads once in so many steps: to
read a row, differentiate, noise and write it takes a step at least three times what a flush takes
for it, which so is at most a twentieth of the steps."""


def table_sizes(
    task: Any, init_seed: int, rows: Any, sampler: BatchSampler, pattern: str | None = None
) -> tuple[int, int]:
    """Returns how many rows the tables of a model have, and how many a batch looks up.

    Of parameters and `rows` the shapes alone are read; `pattern` is that of `RunSpec.train`.

    Raises:
      ValueError: if there are no tables, or a step has several passes.
    """
    import jax

    from dpsgd.engine.lazy.group import find_tables
    from dpsgd.engine.programs import shapes_of_rows
    from dpsgd.gradients.frozen import RunLoss

    params = jax.eval_shape(lambda: task.init(init_seed))
    example = shapes_of_rows(rows, *sampler.clipped_shape)
    loss = RunLoss.restrict(task.loss, pattern)
    found = find_tables(loss, params, example)
    leaves = jax.tree.leaves(params)
    clipped = sampler.padded_batch_size // math.prod(sampler.clipped_shape)
    return (
        sum(leaves[k].shape[0] for k in found),
        clipped * sum(found.values()),
    )


def flush_every(count: int, looked_up: int) -> int:
    """Returns the steps between flushes, such that these take at most a twentieth of the time.

    >>> flush_every(5_000_000, 26 * 1024)
    1280
    """
    from dpsgd.engine.feed import BLOCK_STEPS  # a flush ends a block: it comes after whole ones

    return BLOCK_STEPS * math.ceil(_ROWS_AGAIN * count / looked_up / BLOCK_STEPS)


CHOICES = {
    "batch_size": "batch size",
    "epochs": "epochs",
    "l2_clip_norm": "clipping norm",
    "learning_rate": "learning rate",
    "tables_learning_rate": "learning rate of tables",
    "tables_momentum": "momentum of tables",
    "flush_every": "steps between flushes",
    "average_tail": "mean of the last share of steps",
}
"""Options that a run chooses, in words."""


def sentence(chosen: Mapping[str, Any]) -> str:
    """Returns what a run chose, as `ResolvedRun` has it, for people.

    >>> sentence({"settings": {"batch_size": 1024, "learning_rate": 3e-3}})
    'chosen: batch size 1,024, learning rate 0.003'
    """
    warm = chosen.get("warm")
    found = [
        f"{CHOICES[name]} {value:{',' if isinstance(value, int) else 'g'}}"
        + (f" (lower than usual, as {warm['why']})" if warm and name == "learning_rate" else "")
        for name, value in chosen.get("settings", {}).items()
    ]
    reasons: dict[str, list[str]] = {}
    for name, own in chosen.get("task", {}).items():
        reasons.setdefault(own["why"], []).append(f"{name} {own['value']}")
    found += [f"{', '.join(names)}, as {why}" for why, names in reasons.items()]
    if tables := chosen.get("tables"):
        found.append(f"tables {tables['tables']}, as {tables['why']}")
    if noise := chosen.get("noise"):
        bands, sigma = noise["bands"], noise["noise_multiplier"]
        of = f"of {bands:,} bands" if bands > 1 else "independent"
        found.append(f"noise {of}, sigma {sigma:.4g}, as {noise['why']}")
    line = f"chosen: {', '.join(found)}"
    return line
