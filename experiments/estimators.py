"""`DPClassifier` and `DPRegressor`: private scikit-learn estimators; each fit is a `Run`.

They need scikit-learn (the extra `sklearn`), and read tables as `dpsgd prepare csv` does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
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
from dpsgd.runs.stop import Stopped
from experiments.tasks.clicks.encoding import as_arrow
from experiments.tasks.clicks.formats import BUCKETS, table_schema
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.sizes import PRESETS, ModelConfig
from experiments.tasks.clicks.task import ClickModels
from experiments.tasks.kinds import User
from experiments.tasks.splits import ColumnError
from samplers import cap_contributions
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
    "compares two fits, which draw fresh noise and batches",
)
"""Checks of scikit-learn's `check_estimator` that cannot pass -> reason."""

_SET_BY = {
    **dict.fromkeys(PARTS["privacy"], "epsilon"),
    "target_delta": "delta",
    "init_seed": "random_state",
    "sampler": "sampler",
}
"""Options of a run -> argument of the estimator that sets them."""


@dataclass(frozen=True, eq=False)
class _Rows(ClickModels):
    """Task of encoded rows in memory; all train, except rows beyond the cap of a user."""

    sizes: ModelConfig
    schema: Schema
    hash_seed: int
    rows: PyTree
    users: np.ndarray | None
    max_contributions: int | None

    def columns(self) -> PyTree:
        """Returns the training rows."""
        if self.users is None:
            return self.rows
        assert self.max_contributions is not None, "refused by `fit`"
        return cap_contributions(self.users, self.max_contributions).of_examples(self.rows)

    def metrics(self, params: PyTree) -> dict[str, float]:
        """Returns nothing: metrics of training rows would not be private."""
        return {}


@dataclass(eq=False, repr=False)
class _Estimator(BaseEstimator):
    # Any: by scikit-learn's rules `fit` checks arguments.
    epsilon: Any = 1.0
    """Epsilon of one fit; None trains without privacy."""
    _: KW_ONLY
    delta: Any = None
    """Delta of one fit; by default `accounting.default_delta` of the number of rows."""
    bounds: Any = None
    """Public (low, high) of numbers: one pair for all columns, one for each, or a mapping by column
    name. Bounds must not be read from the training rows."""
    categories: Any = ()
    """Columns whose values are hashed; those of arrays are called x0, x1, ..."""
    number_transform: Any = "both"
    """Transform of numbers: "none", "log1p", sign(x) log(1 + abs(x)), or "both" scales."""
    model: Any = "linear"
    """Preset of the model, as --model of `dpsgd train`."""
    interaction: Any = "none"
    """Interaction of embeddings, as --interaction of `dpsgd train`; not of the model linear."""
    sampler: Any = "balls-and-bins"
    """Name of the sampler; "user-poisson" to protect users, with `groups` of `fit`."""
    max_contributions: Any = None
    """Largest number of rows of one user in `groups`: the first rows train, others are left out."""
    options: Any = None
    """Further arguments of `RunSpec.of` and of the sampler, such as {"epochs": 5}."""
    random_state: Any = None
    """Seed of the initial parameters alone; noise and batches are always fresh."""

    @without_removed
    def __new__(cls, *args: Any, **given: Any) -> Any:
        """Creates an estimator, and refuses removed arguments."""
        return super().__new__(cls)

    @without_removed
    def fit(self, X: Any, y: Any, groups: Any = None) -> Any:
        """Trains on rows and labels, and returns this estimator.

        Args:
          X: Array or data frame of numbers and categories, [rows, columns].
          y: Labels, [rows].
          groups: User of each row, texts or integers, [rows]; None to protect single rows.

        Raises:
          ValueError: If bounds or classes are not declared, or the data do not fit them.
          KeyboardInterrupt: If Ctrl-C or SIGTERM stopped it; nothing is released.
        """
        for name, value, choices in (
            ("model", self.model, PRESETS),
            ("interaction", self.interaction, ("none", "dot", "cross")),
            ("sampler", self.sampler, SETTINGS),
            ("number_transform", self.number_transform, ("none", "log1p", "both")),
        ):
            if value not in tuple(choices):
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!a:.40}")
        checked(self.categories, list[str] | tuple[str, ...], "categories")
        options = {**checked(self.options or {}, Mapping[str, Any], "options")}
        for name in filter(_SET_BY.__contains__, options):
            raise ValueError(
                f"options: {name} is set by the argument {_SET_BY[name]}; leave it out"
            )
        table, names = self._table(X, reset=True)
        count = len(table[names[0]])
        labels, declared = self._labels(y)
        if len(labels) != count:
            raise ValueError(
                f"y has {len(labels)} labels but X has {count} rows; pass one label per row"
            )
        users = self._users(groups, count)
        noise = {"non_private": True} if self.epsilon is None else {"target_epsilon": self.epsilon}
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        kind = SETTINGS[self.sampler]
        sampler_options = {f.name: options.pop(f.name) for f in fields(kind) if f.name in options}
        sampler = build(kind, to_json(sampler_options), "options")
        spec = RunSpec.of(sampler, **options, **noise, target_delta=self.delta, init_seed=seed)
        schema = self._schema(names, declared)
        sizes = replace(PRESETS[self.model], interaction=self.interaction)
        model = ClickModels(sizes, schema, hash_seed=0)
        rows = {"label": labels, **model.encode(table)}
        sizes, most = model.sizes, self.max_contributions
        task = _Rows(sizes, schema, model.hash_seed, rows, users, most)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            try:
                Run.create(task, spec, out).train()
            except Stopped:  # searches of scikit-learn go on after other errors
                raise KeyboardInterrupt("fit was stopped, and keeps nothing") from None
            trained = read_model(out, task=model)
        self.bounds_, self.guarantee_ = dict(schema.bounded), dict(trained.guarantee)
        if self._caveat:
            self.guarantee_["guarantee"] += f"; {self._caveat}"
            self.guarantee_["not_covered"] = [*self.guarantee_["not_covered"], self._caveat]
        params = jax.tree.map(np.asarray, trained.params)
        self._model = TrainedModel(Path(), {}, self.guarantee_, model, params)
        return self

    def _users(self, groups: Any, count: int) -> np.ndarray | None:
        """Returns the user of each row; None to protect rows."""
        protects_users = self.sampler == "user-poisson"
        if {groups is not None, self.max_contributions is not None} != {protects_users}:
            raise ValueError(
                'to protect users, pass sampler="user-poisson", max_contributions and fit(X, y, '
                "groups=...), the user of each row; to protect rows, pass none of the three"
            )
        if groups is None:
            return None
        try:
            users = User().decode(as_arrow(groups, "groups"), "groups").values
        except ColumnError as error:
            place = "" if error.row is None else f", row {error.row}"
            raise ValueError(f"groups{place}: {error.problem}") from None
        if len(users) != count:
            raise ValueError(f"groups has {len(users)} users but X has {count} rows; pass one each")
        return users

    @property
    def _caveat(self) -> str:
        """Limit of the guarantee due to the arguments; "" for none."""
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
        """Returns encoded labels, and arguments of `table_schema` about them."""
        raise NotImplementedError

    def _schema(self, names: list[str], declared: Mapping[str, Any]) -> Schema:
        if unknown := [name for name in self.categories if name not in names]:
            raise ValueError(f"categories: X has no column {', '.join(map(str, unknown))}")
        numbers = [name for name in names if name not in self.categories]
        if numbers and self.bounds is None:
            raise ValueError(
                "bounds must be declared, such as bounds=(0, 100) or one pair per number column; "
                "bounds read from X would reveal single rows, which the guarantee does not cover"
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


def _pairs(what: str, bounds: Any, names: Sequence[str]) -> dict[str, Any]:
    """Returns name -> (low, high)."""
    if isinstance(bounds, Mapping):
        checked(bounds, Mapping[str, Any], what)
        if missing := [name for name in names if name not in bounds]:
            raise ValueError(f"{what}: add the missing {', '.join(missing)}")
        return {
            name: _pairs(f"{what} of {name}", pair, [name])[name] for name, pair in bounds.items()
        }
    try:
        pairs = np.asarray(bounds, np.float64)
    except (TypeError, ValueError):
        pairs = np.empty(())
    if pairs.shape not in ((2,), (len(names), 2)):
        raise ValueError(
            f"{what} of {len(names)} number columns must be one pair, a pair per column, or pairs "
            f"by column name, got {bounds!a:.60}"
        )
    pairs = np.broadcast_to(pairs, (len(names), 2))
    return dict(zip(names, map(tuple, pairs.tolist()), strict=True))


@dataclass(eq=False, repr=False)
class DPClassifier(ClassifierMixin, _Estimator):
    """Classifier with a guarantee of differential privacy for its training rows.

    Each call of `fit` is a separate release: the privacy costs of fits on the same rows compose.

    Attributes:
      classes_: Labels, sorted, [classes].
      bounds_: Column -> (low, high).
      guarantee_: Guarantee as JSON values; "guarantee" is its sentence.

    >>> DPClassifier(epsilon=3.0, bounds=(0, 100), classes=(0, 1)).get_params()["epsilon"]
    3.0
    """

    _: KW_ONLY
    classes: Any = None
    """Declared labels, two or more. "from y" reads them from the training rows, which the guarantee
    does not cover; `guarantee_` states so."""

    @property
    def _caveat(self) -> str:
        if not isinstance(self.classes, str):
            return ""
        return "classes were read from y: the guarantee does not hide which labels occur"

    def predict_proba(self, X: Any) -> np.ndarray:
        """Returns the probabilities of the classes, float[rows, classes]."""
        p = self._predicted(X)
        if p.ndim == 1:
            return np.stack([1 - p, p], axis=1)
        return p / p.sum(axis=1, keepdims=True)  # float32 sums differ from 1

    def predict(self, X: Any) -> np.ndarray:
        """Returns the likeliest class of each row, [rows]."""
        p = self.predict_proba(X)
        return self.classes_[p.argmax(axis=1)]

    def _labels(self, y: Any) -> tuple[np.ndarray, dict[str, Any]]:
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        if self.classes is None:
            raise ValueError(
                "classes must be declared, such as classes=(0, 1); classes read from y "
                '(classes="from y") reveal which labels occur, which the guarantee does not cover'
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
            raise ValueError(f"classes must be two or more, got {len(self.classes_)} class(es)")
        if not np.isin(y, self.classes_).all():
            raise ValueError("y has a label that is not in classes; declare all labels")
        places = np.searchsorted(self.classes_, y)
        if len(self.classes_) == 2:
            return places.astype(np.uint8), {}
        return places.astype(np.int32), {"classes": [str(k) for k in range(len(self.classes_))]}


@dataclass(eq=False, repr=False)
class DPRegressor(RegressorMixin, _Estimator):
    """Regressor by squared error with a guarantee for its training rows, see `DPClassifier`.

    Attributes:
      bounds_: Column -> (low, high).
      guarantee_: Guarantee as JSON values; "guarantee" is its sentence.
    """

    _: KW_ONLY
    label_bounds: Any = None
    """Public (low, high) to which labels and predictions are clipped. The bounds must not be read
    from the training rows."""

    def predict(self, X: Any) -> np.ndarray:
        """Returns predictions within `label_bounds`, float[rows]."""
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
                "label_bounds must be declared, such as label_bounds=(0, 100); bounds read from y "
                "would reveal single rows, which the guarantee does not cover"
            )
        low, high = _pairs("label_bounds", self.label_bounds, ["y"])["y"]
        return np.clip(y, low, high).astype(np.float32), {"label_bounds": (low, high)}
