"""Quality of models of a label, for people: their level, and privacy's cost.

A bid is a value times a predicted rate, so that the level must be right as well as the order. The
numbers come from labelled rows given for this purpose: no guarantee covers them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.special import expit

from dpsgd.models.model import TrainedModel
from dpsgd.runs import report
from dpsgd.runs.result import FinishedRun
from experiments.figures.drawing import MARKERS, PALETTE, blank, legend, panels
from experiments.results.points import Cells
from experiments.results.table import PRIVACY, WITH_NOISE, Table
from experiments.tasks.clicks.metrics import (
    FEWEST,
    BinaryMetrics,
    Group,
    binary_metrics,
    by_category,
    by_decile,
    by_probability,
)
from experiments.tasks.clicks.model import Scores
from experiments.tasks.clicks.task import ClickModels

_COSTS = {
    "auc": "AUC",
    "log_loss": "log loss",
    "normalised_entropy": "normalised entropy",
    "predicted_over_observed": "pred/obs",
}
"""Metrics in which the cost of privacy is shown."""
_QUALITIES = {**_COSTS, "expected_calibration_error": "calibration error"}
_NOT_COMPARED = {*WITH_NOISE, *PRIVACY, "l2_clip_norm", "non_private", "data", "insecure_seed"}
_NOT_COMPARED |= {"audit", "checkpoint_seconds", "data_on", "microbatch_size"}
"""Settings of noise and clipping, and settings that change no model."""


@dataclass(frozen=True)
class Rows:
    """Labelled rows for evaluation.

    Attributes:
      data: Store, or raw file in the format of the models.
      split: Split of a store; None for all rows.
      by: Categorical column that groups the rows, if any.
    """

    data: Path
    split: str | None = None
    by: str | None = None

    def __str__(self) -> str:
        return f"the {self.split} rows of {self.data}" if self.split else f"the rows of {self.data}"


@dataclass(frozen=True)
class Fit:
    """Predictions of one model for labelled rows.

    Attributes:
      name: Name of the model on the page.
      scores: Logits, labels, and the column that groups the rows.
      metrics: Quality of the model.
      texts: Values of that column as the file or its declaration spells them, if known.
    """

    name: str
    scores: Scores
    metrics: BinaryMetrics
    texts: Sequence[str] = ()

    @classmethod
    def read(cls, name: str, model: TrainedModel, rows: Rows) -> Fit:
        """Reads the rows and predicts them.

        Args:
          name: Name of the model on the page.
          model: Model of clicks.
          rows: Labelled rows.

        Raises:
          ValueError: If the model is not of clicks, or does not fit the rows or the column.
        """
        if not isinstance(model.task, ClickModels):
            raise ValueError(f"{model.path} is not a model of clicks; leave out --data")
        blocks = model.task.read(rows.data, split=rows.split)
        target = model.task.schema.target
        if target.kind != "binary":
            raise ValueError(
                f"{model.path} predicts a label without two values; use `dpsgd evaluate` for its "
                f"{target.headline}, without --deciles, --by and --against"
            )
        scores = model.task.score(model.params, blocks, rows.by)
        texts = _spellings(model.task, rows, scores.ids)
        return cls(name, scores, binary_metrics(scores.logits, scores.labels), texts)

    @property
    def probabilities(self) -> np.ndarray:
        """Predicted probabilities of the label 1, float64[rows]."""
        return expit(self.scores.logits.astype(np.float64))

    @property
    def diverged(self) -> bool:
        """True if a prediction is undefined."""
        return not np.isfinite(self.scores.logits).all()

    def losses(self) -> np.ndarray:
        """Returns the cross entropy of each row, nats: float64[rows]."""
        z = self.scores.logits.astype(np.float64)
        return np.logaddexp(0.0, z) - self.scores.labels * z

    def deciles(self) -> list[Group]:
        """Returns the rows grouped by decile of the prediction."""
        return by_decile(self.probabilities, self.scores.labels)

    def categories(self) -> list[Group]:
        """Groups the rows by the column's largest categories."""
        return by_category(self.scores.ids, self.probabilities, self.scores.labels, self.texts)


def _spellings(task: ClickModels, rows: Rows, ids: np.ndarray) -> list[str]:
    """Returns each row's text in the column `rows.by`; empty if only hashes are known."""
    if rows.by is None:
        return []
    if (declared := task.schema.declared.get(rows.by)) is not None:
        return [("", *declared)[id_] for id_ in ids.tolist()]
    if rows.data.is_dir() or not task.schema.label:
        return []
    try:
        return list(task.keys(rows.data, rows.by))
    except ValueError:  # bytes that are no text
        return []


def check_twin(model: TrainedModel) -> None:
    """Raises ValueError unless a model was trained without noise."""
    if model.guarantee["noise_multiplier"]:
        raise ValueError(
            f"{model.path} was trained with noise; compare with a model without privacy "
            "(dpsgd train --non-private)"
        )


def quality(fits: Iterable[Fit]) -> Cells:
    """Returns the table of the models' metrics."""
    rows = [[fit.name, *(_metric(fit, name) for name in _QUALITIES)] for fit in fits]
    return ["model", *_QUALITIES.values()], rows


def cost(fits: Iterable[Fit], twin: Fit) -> Cells:
    """Returns the table of differences from a model without privacy.

    The log loss differs by a mean over rows, given with its standard error.

    Args:
      fits: Predictions of the models.
      twin: Predictions of the model without privacy.
    """

    def difference(fit: Fit, name: str) -> str:
        value = getattr(fit.metrics, name) - getattr(twin.metrics, name)
        if not math.isfinite(value):
            return report.UNDEFINED
        losses = fit.losses() - twin.losses()
        error = f" ± {np.std(losses) / math.sqrt(losses.size):.4f}" if name == "log_loss" else ""
        return f"{value:+.4f}{error}"

    rows = [[fit.name, *(difference(fit, name) for name in _COSTS)] for fit in fits]
    return ["model", *_COSTS.values()], rows


def groups(what: str, found: Iterable[Group], *, intervals: bool = True) -> Cells:
    """Returns the table of predicted and observed positives by group.

    Args:
      what: Heading of the column of groups.
      found: Groups of rows.
      intervals: Whether to include Wilson's 95 % intervals of the observed rates.
    """
    columns: dict[str, Callable[[Group], str]] = {
        what: lambda group: group.name,
        "rows": lambda group: f"{group.rows:,}",
        "predicted": lambda group: f"{group.prediction:.2%}",
        "observed": lambda group: f"{group.rate:.2%}",
        "95 % interval": lambda group: "{:.2%} to {:.2%}".format(*group.interval()),
        "positives predicted": lambda group: f"{group.predicted:,.1f}",
        "positives observed": lambda group: f"{group.observed:,}",
        "pred/obs": lambda group: _metric(group, "predicted_over_observed"),
    }
    if not intervals:
        del columns["95 % interval"]
    return list(columns), [[show(group) for show in columns.values()] for group in found]


def _metric(owner: Fit | Group, name: str) -> str:
    value = getattr(owner.metrics if isinstance(owner, Fit) else owner, name)
    return report.metric(value if math.isfinite(value) else None)


def draw(fits: Sequence[Fit], twin: Fit | None = None, *, bins: int = 15) -> Figure:
    """Draws the reliability diagram of models, above the counts.

    Error bars are Wilson's 95 % intervals; the model without privacy is grey.

    Args:
      fits: Predictions of the models.
      twin: Predictions of the model without privacy, if any.
      bins: Number of bins of the predicted probability.
    """
    figure = blank(6, 5)
    upper, lower = panels(figure, 2, sharex=True, height_ratios=(3, 1))
    upper.plot([0, 1], [0, 1], color="0.4", lw=0.8, ls=":")
    largest = 0.0
    for number, fit in enumerate([*fits, *([twin] if twin else [])]):
        bin_groups = by_probability(fit.probabilities, fit.scores.labels, bins)
        bin_groups = [group for group in bin_groups if group.rows >= FEWEST]
        xs, rates = [g.prediction for g in bin_groups], [g.rate for g in bin_groups]
        errors = np.abs(np.array([g.interval() for g in bin_groups]).reshape(-1, 2).T - rates)
        is_twin = fit is twin
        style: dict[str, Any] = {"color": "0.5" if is_twin else PALETTE[number % len(PALETTE)]}
        style |= {"ls": "--" if is_twin else "-", "lw": 1.3}
        label = f"{fit.name}, without privacy" if is_twin else fit.name
        marker = MARKERS[number % len(MARKERS)]
        upper.errorbar(xs, rates, errors, capsize=2, ms=4, marker=marker, label=label, **style)
        counts, edges = np.histogram(fit.probabilities, bins, (0.0, 1.0))
        lower.stairs(counts, edges, **style)
        largest = max(largest, fit.probabilities.max(), *rates)
    top = min(1.0, 1.08 * largest) or 1.0
    upper.set(ylabel="observed rate of the label 1", xlim=(0, top), ylim=(0, min(1.0, 1.05 * top)))
    legend(upper, loc="upper left")
    lower.set(xlabel="predicted probability of the label 1", ylabel="rows", yscale="log")
    lower.set_ylim(bottom=0.7)
    return figure


def differences(run: FinishedRun, twin: FinishedRun) -> list[str]:
    """Lists differences between two runs, except noise and clipping.

    Args:
      run: Private run.
      twin: Run without privacy.
    """
    table = Table.collect({"run": run, "twin": twin})
    names = [name for name in table.settings if name not in _NOT_COMPARED]
    sizes = [dict(x.task["description"].get("model_sizes", {})) for x in (run, twin)]
    pairs = {name: table.frame[name].to_list() for name in names}
    pairs |= {name: [size.get(name) for size in sizes] for name in sizes[0] | sizes[1]}
    differing = [
        f"{name.replace('_', ' ')} ({x} and {y})" for name, (x, y) in pairs.items() if x != y
    ]
    return differing + (["the rows they were trained on"] if run.data != twin.data else [])
