"""`DPClassifier` and `DPRegressor`: private models in scikit-learn's conventions, a `Run` each fit.

They need scikit-learn (the extra `sklearn`), and read tables as `dpsgd prepare csv` does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_array, check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import (
        check_is_fitted,
        column_or_1d,
        validate_data,
    )
except ImportError as error:
    raise ImportError(f"{error}: estimators need scikit-learn (the extra sklearn)") from None

from dpsgd.models.model import TrainedModel, read_model
from dpsgd.removed import without_removed
from dpsgd.runs.records import build, checked, to_json
from dpsgd.runs.run import Run
from dpsgd.runs.spec import PARTS, RunSpec
from experiments.tasks.clicks.formats import BUCKETS, table_schema
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.sizes import PRESETS, ModelConfig
from experiments.tasks.clicks.task import ClickModels
from samplers.settings import SETTINGS

PyTree = Any

EXPECTED_FAILED_CHECKS = dict.fromkeys(
    (
        "check_classifier_data_not_an_array",
        "check_fit_idempotent",
        "check_regressor_data_not_an_array",
        "check_regressors_int",
        "check_supervised_y_2d",
    ),
    "compares two fits, and noise and batches of each are fresh",
)
"""Of scikit-learn's `check_estimator`: those that cannot hold, with the reason."""

_SET_BY = {
    **dict.fromkeys(PARTS["privacy"], "epsilon"),
    "target_delta": "delta",
    "init_seed": "random_state",
    "sampler": "sampler",
}
"""Options of a run -> the argument that sets them."""


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


@dataclass(eq=False, repr=False)
class _Estimator(BaseEstimator):
    # Any: scikit-learn has `fit`, not this, refuse what is wrong.
    epsilon: Any = 1.0
    """Of the guarantee of one fit; None trains without privacy."""
    _: KW_ONLY
    delta: Any = None
    """Of the guarantee; by default `accounting.default_delta` of the number of rows."""
    bounds: Any = None
    """Public (low, high) of numbers: one pair for all of them, one for each column, or by column
    name. They must not be read from the training rows."""
    categories: Any = ()
    """Columns whose values are hashed; those of arrays are called x0, x1, ..."""
    number_transform: Any = "both"
    """Of numbers: "none", "log1p", that is sign(x) log(1 + abs(x)), or curves of both."""
    model: Any = "linear"
    """Preset of the model, as of `dpsgd train`."""
    sampler: Any = "balls-and-bins"
    """Name of the sampler."""
    options: Any = None
    """Other settings of the run, as `RunSpec.of` has them, and of its sampler: {"epochs": 5}."""
    random_state: Any = None
    """Seed of the initial parameters alone. Noise and batches are always fresh."""

    @without_removed
    def __new__(cls, *args: Any, **given: Any) -> Any:
        """Makes an estimator without parameters, for `__init__`."""
        return super().__new__(cls)

    @without_removed
    def fit(self, X: Any, y: Any) -> Any:
        """Trains on rows X, [rows, columns], with labels y, [rows]; returns this estimator.

        Args:
          X: Array or data frame of numbers and categories.
          y: Labels.

        Raises:
          ValueError: if what must be public is not declared, or the data do not fit it.
        """
        for name, value, known in (
            ("model", self.model, PRESETS),
            ("sampler", self.sampler, SETTINGS),
            ("number_transform", self.number_transform, ("none", "log1p", "both")),
        ):
            if value not in tuple(known):
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!a:.40}")
        checked(self.categories, list[str] | tuple[str, ...], "categories")
        options = {**checked(self.options or {}, Mapping[str, Any], "options")}
        for name in filter(_SET_BY.__contains__, options):
            raise ValueError(
                f"options: {name} is set by the argument {_SET_BY[name]}: leave it out"
            )
        table, names = self._table(X, reset=True)
        count = len(table[names[0]])
        labels, declared = self._labels(y)
        if len(labels) != count:
            raise ValueError(f"y has {len(labels)} labels and X has {count} rows")
        noise = {"non_private": True} if self.epsilon is None else {"target_epsilon": self.epsilon}
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        kind = SETTINGS[self.sampler]
        drawn = {f.name: options.pop(f.name) for f in fields(kind) if f.name in options}
        sampler = build(kind, to_json(drawn), "options")
        spec = RunSpec.of(sampler, **options, **noise, target_delta=self.delta, init_seed=seed)
        schema = self._schema(names, declared)
        model = ClickModels(PRESETS[self.model], schema, hash_seed=0)
        rows = {"label": labels, **model.encode(table)}
        task = _Rows(model.sizes, schema, model.hash_seed, rows)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            Run.create(task, spec, out).train()
            found = read_model(out, task=model)
        self.bounds_, self.guarantee_ = dict(schema.bounded), dict(found.guarantee)
        if self._caveat:
            self.guarantee_["guarantee"] += f"; {self._caveat}"
            self.guarantee_["not_covered"] = [*self.guarantee_["not_covered"], self._caveat]
        params = jax.tree.map(np.asarray, found.params)
        self._model = TrainedModel(Path(), {}, self.guarantee_, model, params)
        return self

    @property
    def _caveat(self) -> str:
        """What else the guarantee does not cover, if anything."""
        return ""

    def _predicted(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        table, _ = self._table(X, reset=False)
        return np.asarray(self._model.predict(table), np.float64)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
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

    def _labels(self, y: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Returns labels as a store has them, and what `table_schema` takes of them."""
        raise NotImplementedError

    def _schema(self, names: list[str], declared: Mapping[str, Any]) -> Schema:
        if unknown := [name for name in self.categories if name not in names]:
            raise ValueError(f"categories: X has no column {', '.join(map(str, unknown))}")
        numbers = [name for name in names if name not in self.categories]
        if numbers and self.bounds is None:
            raise ValueError(
                "bounds of numbers must be given, such as bounds=(0, 100) or one pair a column: "
                "read from the rows, they would be those of single rows, which no guarantee covers"
            )
        return table_schema(
            "\0label",
            categories=list(self.categories),
            numbers=numbers,
            buckets=(BUCKETS,),
            transform=self.number_transform,
            bounds={} if self.bounds is None else _pairs("bounds", self.bounds, numbers),
            **declared,
        )


def _pairs(what: str, given: Any, names: Sequence[str]) -> dict[str, Any]:
    """Returns name -> (low, high)."""
    if isinstance(given, Mapping):
        checked(given, Mapping[str, Any], what)
        if missing := [name for name in names if name not in given]:
            raise ValueError(f"{what}: there are none of {', '.join(missing)}")
        return {
            name: _pairs(f"{what} of {name}", ends, [name])[name] for name, ends in given.items()
        }
    try:
        pairs = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        pairs = np.empty(())
    if pairs.shape not in ((2,), (len(names), 2)):
        raise ValueError(
            f"{what} of {len(names)} columns of numbers: one pair for all, a pair for each, or "
            f"pairs by column name are expected, got {given!a:.60}"
        )
    pairs = np.broadcast_to(pairs, (len(names), 2))
    return dict(zip(names, map(tuple, pairs.tolist()), strict=True))


@dataclass(eq=False, repr=False)
class DPClassifier(ClassifierMixin, _Estimator):
    """Classifier with a guarantee of differential privacy for its training rows.

    Each call of `fit` is a release of its own: fits on the same rows compose.

    Attributes:
      classes_: The labels, sorted, [classes].
      bounds_: Column -> (low, high).
      guarantee_: The guarantee as JSON values; "guarantee" is its sentence.
    """

    _: KW_ONLY
    classes: Any = None
    """The labels, two or more, declared. "from y" reads them from the training rows, which
    `guarantee_` does not cover and says so."""

    @property
    def _caveat(self) -> str:
        if not isinstance(self.classes, str):
            return ""
        return "classes were read from y: no guarantee covers which labels there are"

    def predict_proba(self, X: Any) -> np.ndarray:
        """Returns the probabilities of the classes, float[rows, classes]."""
        p = self._predicted(X)
        if p.ndim == 1:
            return np.stack([1 - p, p], axis=1)
        return p / p.sum(axis=1, keepdims=True)  # of float32, to the last digit

    def predict(self, X: Any) -> np.ndarray:
        """Returns the likeliest class of each row, [rows]."""
        p = self.predict_proba(X)
        return self.classes_[p.argmax(axis=1)]

    def _labels(self, y: Any) -> tuple[np.ndarray, dict[str, Any]]:
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        if self.classes is None:
            raise ValueError(
                "classes must be declared, as in classes=(0, 1): read from y, they would tell "
                'whether any row has a label, which no guarantee covers (classes="from y" does so)'
            )
        from_y = isinstance(self.classes, str) and self.classes == "from y"
        wrong = f'classes must be labels of one kind or "from y", got {self.classes!a:.40}'
        if isinstance(self.classes, str) != from_y:
            raise ValueError(wrong)
        try:
            self.classes_ = np.unique(y if from_y else list(self.classes))
        except TypeError:
            raise ValueError(wrong) from None
        if len(self.classes_) < 2:
            raise ValueError(f"two classes or more are needed, got {len(self.classes_)} class(es)")
        if not np.isin(y, self.classes_).all():
            raise ValueError("y has a label that is none of classes")
        places = np.searchsorted(self.classes_, y)
        if len(self.classes_) == 2:
            return places.astype(np.uint8), {}
        return places.astype(np.int32), {"classes": [str(k) for k in range(len(self.classes_))]}


@dataclass(eq=False, repr=False)
class DPRegressor(RegressorMixin, _Estimator):
    """Regression by squared error with a guarantee for its training rows; see `DPClassifier`.

    Attributes:
      bounds_: Column -> (low, high).
      guarantee_: The guarantee as JSON values; "guarantee" is its sentence.
    """

    _: KW_ONLY
    label_bounds: Any = None
    """Public (low, high) of labels, to which they are clipped, as are predictions. They must not be
    read from the training rows."""

    def predict(self, X: Any) -> np.ndarray:
        """Returns the number of each row within `label_bounds`, float[rows]."""
        return self._predicted(X)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # on the few rows of its checks
        return tags

    def _labels(self, y: Any) -> tuple[np.ndarray, dict[str, Any]]:
        y = column_or_1d(y, warn=True)
        y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
        if self.label_bounds is None:
            raise ValueError(
                "label_bounds must be given, such as label_bounds=(0, 100): the least and the most "
                "of y would be those of single rows, which no guarantee covers"
            )
        low, high = _pairs("label_bounds", self.label_bounds, ["y"])["y"]
        return np.clip(y, low, high).astype(np.float32), {"label_bounds": (low, high)}
