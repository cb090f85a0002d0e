"""`DPClassifier`: a private model of a table in scikit-learn's conventions, trained by a `Run`.

It needs scikit-learn (the extra `sklearn`), and reads tables as `dpsgd prepare csv` does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise ImportError(f"{error}: estimators need scikit-learn (the extra sklearn)") from None

from dpsgd.models.model import TrainedModel, read_model
from dpsgd.runs.run import Run
from dpsgd.runs.spec import RunSpec
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.sizes import PRESETS, ModelConfig
from experiments.tasks.clicks.tabular.format import BUCKETS, table_schema
from experiments.tasks.clicks.task import ClickModels, DescribedClicks
from samplers.settings import SETTINGS

PyTree = Any

EXPECTED_FAILED_CHECKS = dict.fromkeys(
    ("check_classifier_data_not_an_array", "check_fit_idempotent", "check_supervised_y_2d"),
    "compares two fits, and noise and batches of each are fresh",
)
"""Of scikit-learn's `check_estimator`: those that cannot hold, with the reason."""


@dataclass(frozen=True, eq=False)
class _Rows(ClickModels):
    """Encoded rows in memory, which train; none is held back."""

    sizes: ModelConfig
    schema: Schema
    hash_seed: int
    rows: PyTree

    def columns(self) -> PyTree:
        return self.rows

    def metrics(self, params: PyTree) -> dict[str, float]:
        return {}  # of rows that train they would be private


class DPClassifier(ClassifierMixin, BaseEstimator):
    """Binary classifier with a guarantee of differential privacy for its training rows.

    Each call of `fit` is a release of its own: fits on the same rows compose.

    Args:
      epsilon: Of the guarantee of one fit; None trains without privacy.
      delta: Of the guarantee; by default `accounting.default_delta` of the number of rows.
      bounds: Public (low, high) of numbers: one pair for all of them, one for each column, or by
        column name. They must not be read from the training rows.
      categories: Columns whose values are hashed; those of arrays are called x0, x1, ...
      classes: The two labels, declared. "from y" reads them from the training rows, which
        `guarantee_` does not cover and says so.
      number_transform: Of numbers and their bounds: sign(x) log(1 + abs(x)), or none.
      model: Preset of the model, as of `dpsgd train`.
      sampler: Name of the sampler.
      options: Other settings of the run, as `RunSpec.of` has them: {"epochs": 5}.
      random_state: Seed of the initial parameters alone. Noise and batches are always fresh.

    Attributes:
      classes_: The two labels, [2].
      guarantee_: The guarantee as JSON values; "guarantee" is its sentence.
    """

    # Any: scikit-learn has `fit`, not this, refuse what is wrong.
    def __init__(
        self,
        epsilon: Any = 1.0,
        *,
        delta: Any = None,
        bounds: Any = None,
        categories: Any = (),
        classes: Any = None,
        number_transform: Any = "none",
        model: Any = "linear",
        sampler: Any = "balls-and-bins",
        options: Any = None,
        random_state: Any = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.bounds = bounds
        self.categories = categories
        self.classes = classes
        self.number_transform = number_transform
        self.model = model
        self.sampler = sampler
        self.options = options
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> DPClassifier:
        """Trains on rows X, [rows, columns], and labels y, [rows]; returns this estimator.

        Raises:
          ValueError: if bounds or classes are not declared, or the data do not fit them.
        """
        for name, value, known in (
            ("model", self.model, PRESETS),
            ("sampler", self.sampler, SETTINGS),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!a:.40}")
        table, names = self._table(X, reset=True)
        labels = self._labels(y, len(table[names[0]]))
        model = DescribedClicks(PRESETS[self.model], self._schema(names), hash_seed=0)
        rows = {**model.encode(table), "label": labels}
        task = _Rows(model.sizes, model.schema, model.hash_seed, rows)
        noise = {"non_private": True} if self.epsilon is None else {"target_epsilon": self.epsilon}
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        given = {**(self.options or {}), **noise, "target_delta": self.delta, "init_seed": seed}
        sizes = {k: given.pop(k) for k in ("batch_size", "epochs") if k in given}
        spec = RunSpec.of(SETTINGS[self.sampler](**sizes), **given)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            Run.create(task, spec, out).train()
            found = read_model(out, task=model)
        self.guarantee_ = dict(found.guarantee)
        if isinstance(self.classes, str):
            note = "classes were read from y: no guarantee covers which labels there are"
            self.guarantee_["guarantee"] += f"; {note}"
        params = jax.tree.map(np.asarray, found.params)
        self._model = TrainedModel(Path(), {}, self.guarantee_, model, params)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Returns the probabilities of both classes, float[rows, 2]."""
        check_is_fitted(self)
        table, _ = self._table(X, reset=False)
        p = np.asarray(self._model.predict(table), np.float64)
        return np.stack([1 - p, p], axis=1)

    def predict(self, X: Any) -> np.ndarray:
        """Returns the likelier class of each row, [rows]."""
        check_is_fitted(self)
        return self.classes_[self.predict_proba(X).argmax(axis=1)]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        tags.input_tags.allow_nan = True
        tags.non_deterministic = True
        return tags

    def _table(self, X: Any, reset: bool) -> tuple[dict[str, Any], list[str]]:
        if hasattr(X, "columns"):  # pandas and polars
            validate_data(self, X, reset=reset, skip_check_array=True)
            return {str(name): np.asarray(X[name]) for name in X.columns}, list(map(str, X.columns))
        dtype = None if self.categories else np.float64
        X = validate_data(self, X, reset=reset, dtype=dtype, ensure_all_finite="allow-nan")
        names = [f"x{j}" for j in range(X.shape[1])]
        return dict(zip(names, X.T, strict=True)), names

    def _labels(self, y: Any, rows: int) -> np.ndarray:
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        if len(y) != rows:
            raise ValueError(f"y has {len(y)} labels and X has {rows} rows")
        if self.classes is None:
            raise ValueError(
                "classes must be declared, as in classes=(0, 1): read from y, they would tell "
                'whether any row has a label, which no guarantee covers (classes="from y" does so)'
            )
        self.classes_ = np.unique(y if isinstance(self.classes, str) else list(self.classes))
        if len(self.classes_) != 2:
            raise ValueError(
                "Only binary classification is supported: two classes are needed, got "
                f"{len(self.classes_)} class(es)"
            )
        if not np.isin(y, self.classes_).all():
            raise ValueError("y has a label that is none of classes")
        return (y == self.classes_[1]).astype(np.uint8)

    def _schema(self, names: list[str]) -> Schema:
        if unknown := [name for name in self.categories if name not in names]:
            raise ValueError(f"categories: X has no column {', '.join(map(str, unknown))}")
        numbers = [name for name in names if name not in self.categories]
        bounds: Any = self.bounds
        if numbers and bounds is None:
            raise ValueError(
                "bounds of numbers must be given, such as bounds=(0, 100) or one pair a column: "
                "read from the rows, they would be those of single rows, which no guarantee covers"
            )
        if bounds is None:
            bounds = {}
        elif not isinstance(bounds, Mapping):
            pairs = np.asarray(bounds, np.float64)
            if pairs.shape not in ((2,), (len(numbers), 2)):
                raise ValueError(
                    f"bounds of {len(numbers)} columns of numbers: one pair for all, a pair for "
                    f"each, or pairs by column name are expected, got shape {pairs.shape}"
                )
            pairs = np.broadcast_to(pairs, (len(numbers), 2))
            bounds = dict(zip(numbers, map(tuple, pairs.tolist()), strict=True))
        if missing := [name for name in numbers if name not in bounds]:
            raise ValueError(f"bounds: there are none of {', '.join(missing)}")
        return table_schema(
            "\0label",
            categories=list(self.categories),
            numbers=numbers,
            buckets=(BUCKETS,),
            transform=self.number_transform,
            bounds=bounds,
        )
