"""Bounds of numbers and values of categories, chosen from noisy counts of the training rows.

One Gaussian release counts all columns together. The bounds and the values are functions of it; its
cost is recorded in the store, and every run on it counts it. Proof:
docs/explanation/private-bounds-and-values.md.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.special import ndtr, ndtri

from accounting import (
    DataRelease,
    GaussianProfile,
    WithFailureProfile,
    calibrate,
    check_guarantee_delta,
    default_delta,
)
from dpsgd.noise.secure import KEY_BYTES, MAX_CELLS, rounded_gaussian
from experiments.tasks.clicks.encoding import ColumnError, absent
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.store import Columns

BINS = 64
"""Bins of a number's public range, of equal widths on the scale that a model reads."""
OUTSIDE = 0.01
"""Share of the rows that may lie beyond either bound."""
_FAILURE = 0.1
"""Share of delta for values that one row alone has."""
_SURE = 3.0
"""Standard deviations of noise that a sum of counts must exceed."""


@dataclass(frozen=True)
class PrivateColumns:
    """What is to be chosen, at its own epsilon.

    Attributes:
      ranges: Numbers -> public (low, high), within which their bounds are looked for.
      values: Categories whose values are looked for.
      epsilon: What the choice may cost, > 0, by itself.
      delta: Of that guarantee; by default that of as many training rows.

    Raises:
      ValueError: If nothing is to be chosen, or a number is out of range.
    """

    ranges: Mapping[str, tuple[float, float]]
    values: tuple[str, ...]
    epsilon: float
    delta: float | None = None

    def __post_init__(self) -> None:
        if not (self.ranges or self.values):
            raise ValueError("name columns whose bounds or values are to be chosen")
        if not 0.0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon of a private choice must be > 0, got {self.epsilon}")
        if self.delta is not None:
            check_guarantee_delta(self.delta)

    def counts(self, schema: Schema) -> Counts:
        """Returns counts of no rows.

        Raises:
          ValueError: for a column that is no number or no category of `schema`, or a range that is
            none.
        """
        for name, found, kind in [
            *((name, schema.integers, "number") for name in self.ranges),
            *((name, schema.categories, "category") for name in self.values),
        ]:
            if name not in found:
                raise ValueError(f"{name!a} is no {kind} of the table: there is nothing to choose")
            if name in schema.bounded or name in schema.declared:
                raise ValueError(f"{name!a} has public bounds or values: give these or have them "
                                 "chosen, not both")  # fmt: skip
        schema.choosing(self.ranges, schema.declared)  # refuses what is no range
        grids = {}
        for name, ends in self.ranges.items():
            low, high = schema.transformed(np.array(ends)).tolist()
            grids[name] = np.linspace(low, high, BINS + 1)
        none = {name: np.zeros(BINS, np.int64) for name in grids}
        return Counts(schema, grids, {name: Counter() for name in self.values}, none)


@dataclass
class Counts:
    """Private: how often the training rows have which values.

    Attributes:
      schema: Of the rows.
      grids: Numbers -> edges of their bins, as a model reads them, float64[BINS + 1].
      texts: Categories -> how often they have which text.
      bins: Numbers -> how many rows lie in which bin, int64[BINS].
      num_rows: Training rows: public.
    """

    schema: Schema
    grids: Mapping[str, np.ndarray]
    texts: Mapping[str, Counter[str]]
    bins: dict[str, np.ndarray]
    num_rows: int = 0

    def add(self, block: Columns, texts: Mapping[str, pa.Array], is_counted: np.ndarray) -> None:
        """Counts rows.

        Args:
          block: Their columns, as a store has them.
          texts: How the categories of `texts` are spelled.
          is_counted: Which of them train, bool[rows].

        Raises:
          ColumnError: for a category that is no text.
        """
        self.num_rows += int(is_counted.sum())
        for name, edges in self.grids.items():
            j = self.schema.integers.index(name)
            x = block["integers"][:, j][is_counted & ~block["integers_missing"][:, j]]
            places = (x.astype(np.float64) - edges[0]) * (BINS / (edges[-1] - edges[0]))
            places = np.clip(places, 0, BINS - 1).astype(np.int64)
            self.bins[name] += np.bincount(places, minlength=BINS)
        for name, counted in self.texts.items():
            column = texts[name]
            if not column.type.equals(pa.string()):
                raise ColumnError("holds bytes that are no text", column=name)
            kept = is_counted & ~absent(column, self.schema.missing)
            for entry in pc.value_counts(column.filter(pa.array(kept))).to_pylist():
                counted[entry["values"]] += entry["counts"]

    def released(
        self, asked: PrivateColumns, key: bytes | None = None
    ) -> tuple[Schema, dict[str, Any]]:
        """Returns the schema with what was chosen, and the record of the release.

        Args:
          asked: What the counts are of.
          key: 32 secret bytes of the noise, for tests; by default fresh ones.

        Raises:
          ValueError: if the epsilon is too small for any noise that can be drawn.
        """
        columns = len(self.grids) + len(self.texts)
        delta = default_delta(self.num_rows) if asked.delta is None else asked.delta
        failure = _FAILURE * delta if self.texts else 0.0
        sigma = calibrate(
            lambda sigma: WithFailureProfile(GaussianProfile(sigma), failure),
            epsilon=asked.epsilon,
            delta=delta,
        )
        cells = math.ceil(sigma * math.sqrt(columns))
        if cells > MAX_CELLS:
            raise ValueError(
                f"epsilon {asked.epsilon} of a private choice asks for noise of {cells:,} rows: "
                "raise it"
            )
        release = DataRelease(cells / math.sqrt(columns) * (1.0 - 1e-15), failure)
        key = secrets.token_bytes(KEY_BYTES) if key is None else key

        def noisy(exact: np.ndarray, leaf: int) -> np.ndarray:
            return exact + rounded_gaussian(key, 0, leaf, exact.shape, cells)

        bounds = dict[str, tuple[float, float]](self.schema.bounded)  # type: ignore[arg-type]
        for leaf, (name, edges) in enumerate(self.grids.items()):
            low, high = _ends(noisy(self.bins[name], leaf), self.num_rows, cells)
            first, last = asked.ranges[name]
            found = self._untransformed(edges[[low, high]])
            bounds[name] = (found[0] if low else first, found[1] if high < BINS else last)
        values = dict(self.schema.declared)
        if self.texts:
            least = _threshold(cells, failure / len(self.texts))
        for leaf, (name, counted) in enumerate(self.texts.items(), len(self.grids)):
            texts = sorted(counted)
            exact = np.array([counted[text] for text in texts], np.int64)
            frequent = noisy(exact, leaf) >= least
            if kept := tuple(text for text, keep in zip(texts, frequent, strict=True) if keep):
                values[name] = kept
        record = {
            **dataclasses.asdict(release),
            "epsilon": asked.epsilon,
            "delta": delta,
            "bounds": list(self.grids),
            "values": list(self.texts),
        }
        return self.schema.choosing(bounds, values), record

    def _untransformed(self, edges: np.ndarray) -> tuple[float, float]:
        if self.schema.transform != "none":
            edges = np.copysign(np.expm1(np.abs(edges)), edges)
        low, high = edges.tolist()
        return low, high


def _ends(noisy: np.ndarray, num_rows: int, cells: int) -> tuple[int, int]:
    """Returns the bins' edges beyond which few rows lie: 0 and BINS where no count is clear."""

    def first(counts: np.ndarray) -> int:
        noise = _SURE * cells * np.sqrt(np.arange(1, BINS + 1))
        clear = np.cumsum(counts) >= np.maximum(OUTSIDE * num_rows, noise)
        return int(np.argmax(clear)) if clear.any() else 0

    low, high = first(noisy), BINS - first(noisy[::-1])
    return (low, high) if low < high else (0, BINS)


def _threshold(cells: int, failure: float) -> int:
    """Returns the least T for which P(1 + round(s Z) >= T) <= `failure`, s = `cells`.

    1 + round(s Z) >= T is s Z >= T - 3/2.
    """
    least = math.floor(1.5 - cells * float(ndtri(failure)))
    while float(ndtr(-(least - 1.5) / cells)) * (1.0 + 1e-9) > failure:
        least += 1
    return least
