"""How well models of a label fit, as people read it: their level, and privacy's cost.

A bid is a value times a predicted rate, so that the level must be right, and not the order alone.
All of it is said of labelled rows, which are given for that: no guarantee covers them.
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
from experiments.results.table import row_of
from experiments.results.views import Cells
from experiments.tasks.clicks.evaluate import Scores
from experiments.tasks.clicks.metrics import BinaryMetrics, binary_metrics
from experiments.tasks.clicks.reliability import (
    FEWEST,
    Group,
    by_category,
    by_decile,
    by_probability,
)
from experiments.tasks.clicks.task import ClickModels

_COSTS = {
    "auc": "AUC",
    "log_loss": "log loss",
    "normalised_entropy": "normalised entropy",
    "predicted_over_observed": "pred/obs",
}
"""What privacy costs something of."""
_QUALITIES = {**_COSTS, "expected_calibration_error": "calibration error"}
_COMPARED = ("sampler", "batch_size", "epochs", "learning_rate", "init_seed")


@dataclass(frozen=True)
class Rows:
    """Labelled rows on which models are looked at.

    Attributes:
      data: A store, or a raw file in the format of the models.
      split: Which rows of a store; None for all.
      by: Categorical column by whose values they are grouped, if any.
    """

    data: Path
    split: str | None = None
    by: str | None = None

    def __str__(self) -> str:
        return f"the {self.split} rows of {self.data}" if self.split else f"the rows of {self.data}"


@dataclass(frozen=True)
class Fit:
    """What one model predicts of labelled rows.

    Attributes:
      name: Of the model, on the page.
      scores: Its logits, with the labels and the column that rows are grouped by.
      metrics: Its quality.
      texts: Values of that column as the file or its declaration spells them, if known.
    """

    name: str
    scores: Scores
    metrics: BinaryMetrics
    texts: Sequence[str] = ()

    @classmethod
    def of(cls, name: str, model: TrainedModel, rows: Rows) -> Fit:
        """Reads the rows and asks the model.

        Raises:
          ValueError: if it is no model of clicks, or the rows or the column are not its.
        """
        if not isinstance(model.task, ClickModels):
            raise ValueError(f"{model.path} is no model of clicks, of which alone this can be said")
        blocks = model.task.read(rows.data, split=rows.split)
        target = model.task.schema.target
        if not target.levels:
            raise ValueError(
                f"{model.path} predicts a label that has not two values: levels by group, and what "
                f"privacy cost, are not shown; `dpsgd evaluate` has its {target.headline}, without "
                "--deciles, --by and --against"
            )
        scores = model.task.score(model.params, blocks, rows.by)
        texts = _spellings(model.task, rows, scores.ids)
        return cls(name, scores, binary_metrics(scores.logits, scores.labels), texts)

    @property
    def probabilities(self) -> np.ndarray:
        """The predicted probabilities of the label 1: float64[rows]."""
        return expit(self.scores.logits.astype(np.float64))

    @property
    def diverged(self) -> bool:
        """Whether a prediction is undefined."""
        return not np.isfinite(self.scores.logits).all()

    def losses(self) -> np.ndarray:
        """Returns the cross entropy of each row, in nats: float64[rows]."""
        z = self.scores.logits.astype(np.float64)
        return np.logaddexp(0.0, z) - self.scores.labels * z

    def deciles(self) -> list[Group]:
        """Returns the rows by decile of the prediction."""
        return by_decile(self.probabilities, self.scores.labels)

    def categories(self) -> list[Group]:
        """Returns the rows by the largest categories of the column."""
        return by_category(self.scores.ids, self.probabilities, self.scores.labels, self.texts)


def _spellings(task: ClickModels, rows: Rows, ids: np.ndarray) -> list[str]:
    """Returns the value of each row in the column `rows.by`; none where only its hash is known."""
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
            f"{model.path} was trained with noise: what privacy cost is seen against a model "
            "without privacy (dpsgd train --non-private)"
        )


def quality(fits: Iterable[Fit]) -> Cells:
    """Returns the table of the models' quality."""
    rows = [
        [fit.name, *(_metric(getattr(fit.metrics, name)) for name in _QUALITIES)] for fit in fits
    ]
    return ["model", *_QUALITIES.values()], rows


def cost(fits: Iterable[Fit], twin: Fit) -> Cells:
    """Returns the table of what is gained or lost against a model without privacy.

    The log loss differs by a mean over rows, whose standard error is given.
    """
    rows = []
    for fit in fits:
        pairs = [(getattr(fit.metrics, name), getattr(twin.metrics, name)) for name in _COSTS]
        cells = dict(zip(_COSTS, (_difference(one - other) for one, other in pairs), strict=True))
        if not (fit.diverged or twin.diverged):
            error = np.std(fit.losses() - twin.losses()) / math.sqrt(fit.metrics.num_examples)
            cells["log_loss"] += f" ± {error:.4f}"
        rows.append([fit.name, *cells.values()])
    return ["model", *_COSTS.values()], rows


def groups(what: str, found: Iterable[Group], *, intervals: bool = True) -> Cells:
    """Returns the table of predicted against observed positives, as rates and as numbers."""
    columns: dict[str, Callable[[Group], str]] = {
        what: lambda group: group.name,
        "rows": lambda group: f"{group.rows:,}",
        "predicted": lambda group: f"{group.prediction:.2%}",
        "observed": lambda group: f"{group.rate:.2%}",
        "95 % interval": lambda group: "{:.2%} to {:.2%}".format(*group.interval()),
        "positives predicted": lambda group: f"{group.predicted:,.1f}",
        "positives observed": lambda group: f"{group.observed:,}",
        "pred/obs": lambda group: _metric(group.predicted_over_observed),
    }
    if not intervals:
        del columns["95 % interval"]
    return list(columns), [[show(group) for show in columns.values()] for group in found]


def _metric(value: float) -> str:
    return report.metric(value if math.isfinite(value) else None)


def _difference(value: float) -> str:
    return f"{value:+.4f}" if math.isfinite(value) else report.UNDEFINED


def draw(fits: Sequence[Fit], twin: Fit | None = None, *, bins: int = 15) -> Figure:
    """Draws the reliability diagram of models: observed over predicted rates, above the counts.

    Error bars are Wilson's intervals at 95 %; the model without privacy, if any, is grey.
    """
    figure = blank(6, 5)
    upper, lower = panels(figure, 2, sharex=True, height_ratios=(3, 1))
    upper.plot([0, 1], [0, 1], color="0.4", lw=0.8, ls=":")
    largest = 0.0
    for number, fit in enumerate([*fits, *([twin] if twin else [])]):
        found = by_probability(fit.probabilities, fit.scores.labels, bins)
        found = [group for group in found if group.rows >= FEWEST]
        at, rates = [g.prediction for g in found], [g.rate for g in found]
        reach = np.abs(np.array([g.interval() for g in found]).reshape(-1, 2).T - rates)
        without = fit is twin
        look: dict[str, Any] = {"color": "0.5" if without else PALETTE[number % len(PALETTE)]}
        look |= {"ls": "--" if without else "-", "lw": 1.3}
        label = f"{fit.name}, without privacy" if without else fit.name
        marker = MARKERS[number % len(MARKERS)]
        upper.errorbar(at, rates, reach, capsize=2, ms=4, marker=marker, label=label, **look)
        counts, edges = np.histogram(fit.probabilities, bins, (0.0, 1.0))
        lower.stairs(counts, edges, **look)
        largest = max(largest, fit.probabilities.max(), *rates)
    top = min(1.0, 1.08 * largest) or 1.0
    upper.set(ylabel="observed rate of the label 1", xlim=(0, top), ylim=(0, min(1.0, 1.05 * top)))
    legend(upper, loc="upper left")
    lower.set(xlabel="predicted probability of the label 1", ylabel="rows", yscale="log")
    lower.set_ylim(bottom=0.7)
    return figure


def differences(run: FinishedRun, twin: FinishedRun) -> list[str]:
    """Returns what else two runs differ in than noise and clipping, in words."""
    both = [row_of("", one) for one in (run, twin)]
    sizes = [dict(one.task["description"].get("model_sizes", {})) for one in (run, twin)]
    pairs = {name: [row[name] for row in both] for name in _COMPARED}
    pairs |= {name: [size.get(name) for size in sizes] for name in sizes[0] | sizes[1]}
    found = [
        f"{name.replace('_', ' ')} ({one} and {other})"
        for name, (one, other) in pairs.items()
        if one != other
    ]
    return found + (["the rows they were trained on"] if run.data != twin.data else [])
