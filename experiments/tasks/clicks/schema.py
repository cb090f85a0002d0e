"""The columns of a click data set, and the hashing of its categorical values into fixed tables.

Nothing here is learned from data. Bucket counts are constants, chosen from cardinalities that the
publishers of the data set made known, so that adding a row, a label or a token that was never seen
changes no shape, no bucket count and no compiled program.

Ids. A categorical value becomes ``1 + (hash(value) mod 2^k)``; ``0`` means *missing* and nothing
else. A feature with 2^k buckets therefore has a table of 2^k + 1 rows. Of a feature whose values
are declared, the i-th of them (from 0) becomes 1 + i, and every other value is missing.

Folding. For j <= k, ``(h mod 2^k) mod 2^j = h mod 2^j``, because 2^j divides 2^k. So the ids of a
store hashed once, to large tables, fold *exactly* to the ids that hashing to smaller tables would
have given: :meth:`Schema.fold`. One store serves models of every size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from experiments.tasks.clicks.sizes import check_power_of_two
from experiments.tasks.clicks.target import Target, target_of
from experiments.tasks.splitmix import GOLDEN, mix

MISSING = 0
"""The id of a missing categorical value, in every column; no hashed value has it."""

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
"""Distinct values of the columns of that data set which are known only after a sale, or go with
one: to predict sales from them would be to read the answer."""


def default_buckets(cardinality: int) -> int:
    """Return the power of two to which a column with `cardinality` distinct values is hashed.

    Small tables cost nothing, so columns of at most 2^14 values get four times their cardinality
    (at least 1,024), where few values collide. Larger ones get the nearest power of two (in the
    logarithm), at most 2^20: their tails are values seen once, which no model can learn.

    >>> [default_buckets(c) for c in (3, 1_460, 93_145, 286_181, 10_131_227)]
    [1024, 8192, 131072, 262144, 1048576]
    """
    if cardinality <= 1 << 14:
        exponent = (4 * cardinality - 1).bit_length()
    else:
        exponent = round(np.log2(cardinality))
    return 1 << min(20, max(10, exponent))


def log_transform(values: np.ndarray) -> np.ndarray:
    """Return ``sign(x) * log1p(|x|)`` as float32: a fixed transform, nothing learned from data.

    >>> log_transform(np.array([-1, 0, 1]))
    array([-0.6931472,  0.       ,  0.6931472], dtype=float32)
    """
    x = values.astype(np.float64)
    return np.copysign(np.log1p(np.abs(x)), x).astype(np.float32)


def folded(ids: Any, masks: Any) -> Any:
    """Returns `ids` [..., features] folded by the masks of `Schema.fold_masks`."""
    return (ids > MISSING) * (1 + ((ids - 1) & masks))


@dataclass(frozen=True)
class Schema:
    """Names of the feature columns and the bucket count of each categorical one.

    The label is one column, see `target`. A data set without numeric columns has
    ``integers = ()``. A bucket count is a power of two, or the number of declared values. The
    fields from `label` on are of data whose files name their columns, and which have no format of
    their own.
    """

    name: str
    integers: tuple[str, ...]
    categories: tuple[str, ...]
    buckets: tuple[int, ...]
    label: str = ""
    """Column of the label in a file; empty where the format of the data set says which it is."""
    transform: Literal["log1p", "none", "both"] = "log1p"
    """What becomes of numbers: ``sign(x) * log1p(|x|)``, or nothing. Where it is both, it is the
    former, and a model learns curves of both, see `scales`."""
    missing: tuple[str, ...] = ()
    """Texts that stand for a missing value, beside the empty one."""
    classes: tuple[str, ...] = ()
    """Texts of the label that mean 0, 1, ..., as they were declared; none where it is 0 or 1."""
    label_bounds: tuple[float, ...] = ()
    """Public (low, high) of a label that is a number, to which it is clipped."""
    bounds: tuple[tuple[float, ...] | None, ...] = ()
    """Public (low, high) of each number, None for one without; empty if none has any."""
    values: tuple[tuple[str, ...] | None, ...] = ()
    """Declared values of each category, None for one that is hashed; empty if all are."""

    def __post_init__(self) -> None:
        if not self.categories and not self.integers:
            raise ValueError(f"schema {self.name!r} has no columns to predict from")
        categories, numbers = len(self.categories), len(self.integers)
        for columns, kind, given, what in (
            (categories, "categorical", len(self.buckets), "{} bucket counts"),
            (categories, "categorical", len(self.values) or categories, "declared values of {}"),
            (numbers, "numeric", len(self.bounds) or numbers, "{} bounds"),
        ):
            if given != columns:
                said = f"{columns} {kind} columns but {what.format(given)}"
                raise ValueError(f"schema {self.name!r} has {said}")
        _ = self.target  # refused before anything is read
        for column, count in zip(self.categories, self.buckets, strict=True):
            if (values := self.declared.get(column)) is None:
                check_power_of_two(f"bucket count of {column}", count)
            elif not values or len({*values} - {"", *self.missing}) < len(values):
                raise ValueError(
                    f"values of {column} must be different texts, at least one, none of them empty "
                    f"or missing, not {', '.join(map(ascii, values)) or 'none'}"
                )
            elif len(values) != count:
                raise ValueError(f"{column} has {len(values)} values but {count} buckets")
        for column, ends in self.bounded.items():
            if len(ends) != 2 or not -math.inf < ends[0] < ends[1] < math.inf:
                shown = ":".join(f"{end:g}" for end in ends)
                raise ValueError(f"bounds of {column} must be finite, low:high, not {shown}")
            with np.errstate(over="ignore", invalid="ignore"):
                scales = self.scales(np.array(ends))
                lengths = scales[:, 1] - scales[:, 0]
            for (low, high), length in zip(scales, lengths, strict=True):
                if not 0 < length < math.inf:
                    taken = np.ptp(log_transform(np.array(ends))) > 0
                    raise ValueError(
                        f"bounds of {column} are {low} and {high} in float32, as a model reads "
                        f"them: give others{', or take --transform log1p' if taken else ''}"
                    )

    @property
    def target(self) -> Target:
        """What the label is."""
        return target_of(self.classes, self.label_bounds)

    @property
    def bounded(self) -> dict[str, tuple[float, ...]]:
        """Numeric columns with public bounds -> (low, high), before `transform`."""
        named = zip(self.integers, self.bounds, strict=False)  # no bounds: none has any
        return {name: ends for name, ends in named if ends is not None}

    @property
    def declared(self) -> dict[str, tuple[str, ...]]:
        """Categorical columns whose values are declared -> these."""
        named = zip(self.categories, self.values, strict=False)  # no values: all are hashed
        return {name: texts for name, texts in named if texts is not None}

    def transformed(self, values: np.ndarray) -> np.ndarray:
        """Return numbers as a model reads them: float32, by `transform`, which no row decides."""
        return values.astype(np.float32) if self.transform == "none" else log_transform(values)

    def scales(self, values: np.ndarray) -> np.ndarray:
        """Return numbers on each scale on which curves are learned: float32[scales, ...]."""
        read = self.transformed(values)
        return np.stack([read, values.astype(np.float32)] if self.transform == "both" else [read])

    def hash(self, values: np.ndarray, feature: int, seed: int) -> np.ndarray:
        """Return the ids of `values` (any shape, unsigned integers) of categorical `feature`.

        ``1 + (mix(value XOR key) mod buckets[feature])`` as int32, where mix is the 64-bit
        finaliser of SplitMix64 (Steele, Lea and Flood, 2014, with the constants of Stafford's
        "Mix13") and key is drawn by the same function from (seed, feature). mix is a bijection on
        64 bits, so two values collide only in the reduction to buckets; a seed gives each column
        its own hash function. The seed is public: it is not a secret and protects nothing.
        """
        key = np.uint64(_mix_int(_mix_int(seed) + (feature + 1) * GOLDEN))
        mixed = mix(values.astype(np.uint64, copy=False) ^ key)
        mixed &= np.uint64(self.buckets[feature] - 1)
        ids = mixed.astype(np.int32)
        ids += 1
        return ids

    def fold(self, ids: Any, max_buckets: int) -> Any:
        """Return `ids` [..., features] as if hashed to at most `max_buckets` (a power of two).

        Exact: see the module's note on folding. Missing stays 0. Works on NumPy and JAX arrays,
        inside a compiled program too; the dtype is kept.

        >>> DISPLAY_ADS.fold(np.arange(26, dtype=np.int32) * 5_000, 1024)[:4]
        array([  0, 904, 784, 664], dtype=int32)
        """
        return folded(ids, self.fold_masks(max_buckets))

    def fold_masks(self, max_buckets: int) -> np.ndarray:
        """Returns what `folded` takes to fold to at most `max_buckets`: int32[features]."""
        check_power_of_two("max_buckets", max_buckets)
        masks = np.minimum(np.asarray(self.buckets), max_buckets).astype(np.int32) - 1
        masks[[name in self.declared for name in self.categories]] = -1  # they stay as they are
        return masks

    def table_sizes(self, max_buckets: int = 1 << 30) -> tuple[int, ...]:
        """Return the number of rows of each feature's table, the row of *missing* included."""
        check_power_of_two("max_buckets", max_buckets)
        columns = zip(self.categories, self.buckets, strict=True)
        return tuple(
            1 + (count if name in self.declared else min(count, max_buckets))
            for name, count in columns
        )

    def table_offsets(self, max_buckets: int = 1 << 30) -> np.ndarray:
        """Return where each feature's rows begin (int32) in one stacked table.

        ``fold(ids, m) + table_offsets(m)`` are rows of a table of ``sum(table_sizes(m))`` rows in
        which no two features share one.

        Raises:
            ValueError: there are more rows than int32 can number.

        >>> sum(DISPLAY_ADS.table_sizes()), DISPLAY_ADS.table_offsets(1024)[:3]
        (6023194, array([   0, 1025, 2050], dtype=int32))
        """
        sizes = self.table_sizes(max_buckets)
        if sum(sizes) > 1 << 31:
            raise ValueError(
                f"max_buckets {max_buckets}: the tables of {self.name} have {sum(sizes):,} rows "
                "together, and a program can number 2^31"
            )
        return np.concatenate(([0], np.cumsum(sizes[:-1]))).astype(np.int32)[: len(sizes)]


def _mix_int(x: int) -> int:
    """Mix one Python integer, taken modulo 2^64, as `mix` does after adding the golden ratio."""
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
    """Return the schema of Criteo Sponsored Search: 19 categories, and outcomes to `include`.

    Outcomes come last, so that the ids of the others stay what they are.

    Raises:
        ValueError: a name is none of `SEARCH_OUTCOMES`, or is there twice.
    """
    for name in include:
        if name not in SEARCH_OUTCOMES or include.count(name) > 1:
            raise ValueError(
                f"can include each of {', '.join(SEARCH_OUTCOMES)} once, not {', '.join(include)}"
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
