"""Columns of a click data set, and the hashing of categorical values into fixed tables.

Nothing is learned from data. Bucket counts are constants, chosen from cardinalities that the
publishers of the data set made known, so that adding a row, a label or a new token changes no
shape, no bucket count and no compiled program.

Ids. A categorical value becomes ``1 + (hash(value) mod 2^k)``; ``0`` means *missing* and nothing
else. A feature with 2^k buckets therefore has a table of 2^k + 1 rows. If the values of a feature
are declared, the i-th (from 0) becomes 1 + i, and every other value is missing.

Folding. For j <= k, ``(h mod 2^k) mod 2^j = h mod 2^j``, because 2^j divides 2^k. The ids of a
store hashed once, to large tables, fold *exactly* to the ids of smaller tables
(:meth:`Schema.fold`): smaller tables reuse the stored ids, and the result equals rehashing. One
store serves models of every size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from experiments.tasks.clicks.sizes import check_power_of_two
from experiments.tasks.clicks.target import Target, target_of
from experiments.tasks.splits import GOLDEN, mix

MISSING = 0
"""Id of a missing categorical value in every column; no hashed value has it."""

DISPLAY_CARDINALITIES = (
    *(1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194),
    *(27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
"""Distinct values of C1..C26 in the Criteo Display Ads data set (46M rows), as widely published."""

SEARCH_CARDINALITIES = {
    "click_timestamp": 168,  # read as the hour of the week
    "nb_clicks_1week": 4_612,
    "product_age_group": 10,
    "device_type": 7,
    "audience_id": 18_227,
    "product_gender": 16,
    "product_brand": 55_982,
    "product_category_1": 20,
    "product_category_2": 172,
    "product_category_3": 1_036,
    "product_category_4": 1_551,
    "product_category_5": 840,
    "product_category_6": 212,
    "product_category_7": 4,
    "product_country": 22,
    "product_id": 1_628_063,
    "product_title": 790_520,
    "partner_id": 312,
    "user_id": 13_708_490,
}
"""Distinct values of the features of Criteo Sponsored Search (16M rows), *missing* not counted:
from the public profile of the whole file in the repository john-james-ai/cvr."""

SEARCH_OUTCOMES = {
    "SalesAmountInEuro": 513_405,
    "time_delay_for_conversion": 574_346,
    "product_price": 43_143,
}
"""Distinct values of the columns of that data set known only after a sale, or tied to one:
predicting sales from them would read the answer.
"""


def default_buckets(cardinality: int) -> int:
    """Returns the default bucket count of a column.

    It is a power of two. Small tables are cheap, so a column of at most 2^14 values gets four times
    its cardinality, at least 1,024, where few values collide. A larger column gets the nearest
    power of two (in the logarithm), at most 2^20: its tail is values seen once, which no model can
    learn.

    >>> [default_buckets(c) for c in (3, 1_460, 93_145, 286_181, 10_131_227)]
    [1024, 8192, 131072, 262144, 1048576]
    """
    if cardinality <= 1 << 14:
        exponent = (4 * cardinality - 1).bit_length()
    else:
        exponent = round(np.log2(cardinality))
    return 1 << min(20, max(10, exponent))


def log_transform(values: np.ndarray) -> np.ndarray:
    """Returns ``sign(x) * log1p(|x|)``, float32.

    >>> log_transform(np.array([-1, 0, 1]))
    array([-0.6931472,  0.       ,  0.6931472], dtype=float32)
    """
    x = values.astype(np.float64)
    return np.copysign(np.log1p(np.abs(x)), x).astype(np.float32)


def folded(ids: Any, masks: Any) -> Any:
    """Folds hashed ids to smaller tables; missing ids stay 0.

    >>> folded(np.array([0, 5, 9]), np.array([3, 3, 3]))
    array([0, 1, 1])

    Args:
        ids: Hashed ids, int[..., features].
        masks: Masks of `Schema.fold_masks`, int32[features].
    """
    return (ids > MISSING) * (1 + ((ids - 1) & masks))


@dataclass(frozen=True)
class Schema:
    """Names of the feature columns, and the bucket count of each categorical one.

    The label is one column, see `target`. A data set without numeric columns has ``integers = ()``.
    A bucket count is a power of two, or the number of declared values. The fields from `label` on
    are for data whose files name their columns, without a raw format.
    """

    name: str
    integers: tuple[str, ...]
    categories: tuple[str, ...]
    buckets: tuple[int, ...]
    label: str = ""
    """Column of the label in a file; empty if the data set's format fixes it."""
    transform: Literal["log1p", "none", "both"] = "log1p"
    """Transform of numbers: ``sign(x) * log1p(|x|)``, none, or "both": the former, with curves of
    both scales in the model, see `scales`."""
    missing: tuple[str, ...] = ()
    """Texts that stand for a missing value, beside the empty one."""
    classes: tuple[str, ...] = ()
    """Declared texts of the label that mean 0, 1, ...; empty for a label of 0 and 1."""
    label_bounds: tuple[float, ...] = ()
    """Public (low, high) to which a numerical label is clipped."""
    bounds: tuple[tuple[float, ...] | None, ...] = ()
    """Public (low, high) of each number, None for one without; empty if none has any."""
    values: tuple[tuple[str, ...] | None, ...] = ()
    """Declared values of each category, None for one that is hashed; empty if all are."""
    user: str = ""
    """Column that names each row's user, which is no feature; empty for rows without users."""

    def __post_init__(self) -> None:
        if not self.categories and not self.integers:
            raise ValueError(f"schema {self.name!r} has no columns to predict from")
        categories, numbers = len(self.categories), len(self.integers)
        for columns, kind, num_given, template in (
            (categories, "categorical", len(self.buckets), "{} bucket counts"),
            (categories, "categorical", len(self.values) or categories, "declared values of {}"),
            (numbers, "numeric", len(self.bounds) or numbers, "{} bounds"),
        ):
            if num_given != columns:
                counts = f"{columns} {kind} columns but {template.format(num_given)}"
                raise ValueError(f"schema {self.name!r} has {counts}")
        _ = self.target  # refused before anything is read
        for column, count in zip(self.categories, self.buckets, strict=True):
            if (values := self.declared.get(column)) is None:
                check_power_of_two(f"bucket count of {column}", count)
            elif not values or len({*values} - {"", *self.missing}) < len(values):
                raise ValueError(
                    f"values of {column} must be one or more distinct texts, none empty or "
                    f"declared missing, got {', '.join(map(ascii, values)) or 'none'}"
                )
            elif len(values) != count:
                raise ValueError(f"{column} has {len(values)} values but {count} buckets")
        for column, limits in self.bounded.items():
            if len(limits) != 2 or not -math.inf < limits[0] < limits[1] < math.inf:
                text = ":".join(f"{x:g}" for x in limits)
                raise ValueError(f"{column}={text}: bounds are LOW:HIGH, finite, LOW below HIGH")
            with np.errstate(over="ignore", invalid="ignore"):
                scales = self.scales(np.array(limits))
                lengths = scales[:, 1] - scales[:, 0]
            for (low, high), length in zip(scales, lengths, strict=True):
                if not 0 < length < math.inf:
                    distinct = np.ptp(log_transform(np.array(limits))) > 0
                    raise ValueError(
                        f"bounds of {column} become {low} and {high} in float32, as a model reads "
                        f"them; give others{', or use --transform log1p' if distinct else ''}"
                    )

    @property
    def target(self) -> Target:
        """Kind of the label."""
        return target_of(self.classes, self.label_bounds)

    @property
    def bounded(self) -> dict[str, tuple[float, ...]]:
        """Numeric columns with public bounds -> (low, high), before `transform`."""
        named = zip(self.integers, self.bounds, strict=False)  # no bounds: none has any
        return {name: limits for name, limits in named if limits is not None}

    @property
    def declared(self) -> dict[str, tuple[str, ...]]:
        """Categorical columns with declared values -> values."""
        named = zip(self.categories, self.values, strict=False)  # no values: all are hashed
        return {name: texts for name, texts in named if texts is not None}

    def transformed(self, values: np.ndarray) -> np.ndarray:
        """Returns numbers as the model's input, float32, by `transform`."""
        return values.astype(np.float32) if self.transform == "none" else log_transform(values)

    def scales(self, values: np.ndarray) -> np.ndarray:
        """Returns numbers on the scales of the curves, float32[scales, ...]."""
        read = self.transformed(values)
        return np.stack([read, values.astype(np.float32)] if self.transform == "both" else [read])

    def hash(self, values: np.ndarray, feature: int, seed: int) -> np.ndarray:
        """Returns the ids of a categorical feature's values, int32.

        They are ``1 + (mix(value XOR key) mod buckets[feature])``, with mix the 64-bit finaliser of
        SplitMix64 (Steele, Lea and Flood, 2014, with the constants of Stafford's "Mix13") and key
        drawn by the same function from (seed, feature). mix is a bijection on 64 bits, so two
        values collide only in the reduction to buckets; each column has its own hash function. The
        seed is public: it protects nothing.

        Args:
            values: Unsigned integers of any shape.
            feature: Index of the categorical feature.
            seed: Public seed of the hash.
        """
        key = np.uint64(_mix_int(_mix_int(seed) + (feature + 1) * GOLDEN))
        mixed = mix(values.astype(np.uint64, copy=False) ^ key)
        mixed &= np.uint64(self.buckets[feature] - 1)
        ids = mixed.astype(np.int32)
        ids += 1
        return ids

    def fold(self, ids: Any, max_buckets: int) -> Any:
        """Folds hashed ids to at most `max_buckets` buckets.

        The result equals rehashing (see the module); missing ids stay 0. It works on NumPy and JAX
        arrays, also in a compiled program, and keeps the dtype.

        Args:
            ids: Ids, int[..., features].
            max_buckets: Largest number of buckets of a feature, a power of two.

        >>> DISPLAY_ADS.fold(np.arange(26, dtype=np.int32) * 5_000, 1024)[:4]
        array([  0, 904, 784, 664], dtype=int32)
        """
        return folded(ids, self.fold_masks(max_buckets))

    def fold_masks(self, max_buckets: int) -> np.ndarray:
        """Returns the masks of `folded` for `max_buckets`, int32[features]."""
        check_power_of_two("max_buckets", max_buckets)
        masks = np.minimum(np.asarray(self.buckets), max_buckets).astype(np.int32) - 1
        masks[[name in self.declared for name in self.categories]] = -1  # declared ids stay
        return masks

    def table_sizes(self, max_buckets: int = 1 << 30) -> tuple[int, ...]:
        """Returns the rows of each feature's table, *missing* included."""
        check_power_of_two("max_buckets", max_buckets)
        columns = zip(self.categories, self.buckets, strict=True)
        return tuple(
            1 + (count if name in self.declared else min(count, max_buckets))
            for name, count in columns
        )

    def table_offsets(self, max_buckets: int = 1 << 30) -> np.ndarray:
        """Returns each feature's first row in one stacked table, int32.

        ``fold(ids, m) + table_offsets(m)`` are rows of a table of ``sum(table_sizes(m))`` rows in
        which no two features share a row.

        Raises:
            ValueError: If there are more rows than int32 can number.

        >>> sum(DISPLAY_ADS.table_sizes()), DISPLAY_ADS.table_offsets(1024)[:3]
        (6023194, array([   0, 1025, 2050], dtype=int32))
        """
        sizes = self.table_sizes(max_buckets)
        if sum(sizes) > 1 << 31:
            raise ValueError(
                f"max_buckets={max_buckets}: the tables of {self.name} have {sum(sizes):,} rows "
                "together, more than 2^31; use fewer buckets"
            )
        return np.concatenate(([0], np.cumsum(sizes[:-1]))).astype(np.int32)[: len(sizes)]


def _mix_int(x: int) -> int:
    """Mixes an integer modulo 2^64, as `mix` does after adding the golden ratio."""
    return int(mix(np.array([(x + GOLDEN) % 2**64], dtype=np.uint64))[0])


DISPLAY_ADS = Schema(
    name="criteo-display",
    integers=tuple(f"I{i}" for i in range(1, 14)),
    categories=tuple(f"C{i}" for i in range(1, 27)),
    buckets=tuple(default_buckets(c) for c in DISPLAY_CARDINALITIES),
    bounds=((-3.0, 65_535.0),) * 13,
)
"""Criteo Display Ads: 13 integers, 26 categories, 6.0M buckets (85M parameters of width 14)."""


def sponsored_search(include: tuple[str, ...] = ()) -> Schema:
    """Returns the schema of Criteo Sponsored Search.

    It has 19 categories; outcomes to `include` come last, so that the other ids stay equal.

    >>> sponsored_search(("product_price",)).categories[-1]
    'product_price'

    Raises:
        ValueError: If a name is not in `SEARCH_OUTCOMES`, or is repeated.
    """
    for name in include:
        if name not in SEARCH_OUTCOMES or include.count(name) > 1:
            raise ValueError(
                f"include: expected some of {', '.join(SEARCH_OUTCOMES)}, each once, got "
                f"{', '.join(include)}"
            )
    cardinalities = SEARCH_CARDINALITIES | {name: SEARCH_OUTCOMES[name] for name in include}
    return Schema(
        name="criteo-search",
        integers=(),
        categories=tuple(cardinalities),
        buckets=tuple(default_buckets(c) for c in cardinalities.values()),
    )


SPONSORED_SEARCH = sponsored_search()
"""Criteo Sponsored Search without its outcomes: all features are categories."""
