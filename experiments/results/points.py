"""Tidy points: rows of curves in panels, each with a value or with certified bounds.

Figures, sweeps and reports print and draw the same columns. Computed rows are cached: each holds
the digests of its job and of the code that computed it; a file that is torn or was computed by
other code is not used. The headline is the metric that is shown first.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import polars as pl

from accounting import Bound
from dpsgd.files import write_atomically
from dpsgd.runs.report import UNDEFINED, label
from experiments.processes import each

Cells = tuple[list[str], list[list[str]]]
"""Header and rows of a printed table."""

ErrorBar = Literal["standard_error", "standard_deviation"]
"""Columns of the errors that a mean can be shown with."""

SCHEMA = {
    "panel": pl.String,
    "curve": pl.String,
    "x": pl.Float64,
    "value": pl.Float64,
    "standard_error": pl.Float64,
    "lower": pl.Float64,
    "upper": pl.Float64,
    "confidence": pl.Float64,
}
"""Columns of points: a value with its standard error, or bounds with their confidence."""
SPECIFICATION, CODE = "specification_sha256", "code_sha256"
"""Columns of the digests of a row's settings and code, in all tables."""


def ends(bound: Bound) -> dict[str, float]:
    """Returns the columns of a bound.

    >>> ends(Bound(0.5, 0.75))
    {'lower': 0.5, 'upper': 0.75, 'confidence': 1.0}
    """
    return {"lower": bound.lower, "upper": bound.upper, "confidence": bound.confidence}


def collect(*tables: pl.DataFrame | Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Joins rows and tables to one with `SCHEMA`'s columns."""
    frames = [pl.DataFrame(schema=SCHEMA)]
    for table in tables:
        rows = table if isinstance(table, pl.DataFrame) else list(table)
        frames.append(pl.DataFrame(rows, infer_schema_length=None))
    return pl.concat(frames, how="diagonal_relaxed")


def text(point: Mapping[str, Any], error_name: ErrorBar = "standard_error") -> str:
    """Prints a point: a bound rounded outward, or a mean.

    A mean has its error and the number of diverged runs, if known.

    Args:
      point: Columns of the point.
      error_name: Column of the error.

    >>> text({"value": 0.72, "standard_error": 0.00577, "runs": 3, "undefined": 1})
    '0.7200 ± 0.0058 (1 of 4 diverged)'
    >>> text({"value": 7100.0}), text({"value": None, "undefined": 2})
    ('7100', 'undefined')
    >>> text({"lower": 0.40371, "upper": 0.40376})
    '[0.403, 0.404]'
    """
    if point.get("lower") is not None:
        return str(Bound(point["lower"], point["upper"], point.get("confidence") or 1.0))
    value, error, lost = (point.get(name) for name in ("value", error_name, "undefined"))
    if value is None:
        return UNDEFINED if lost else ""
    form = ".4f" if value == 0 or 0.01 <= abs(value) < 100 else ".4g"
    diverged = f" ({lost} of {lost + point['runs']} diverged)" if lost else ""
    return f"{value:{form}}{'' if error is None else f' ± {error:{form}}'}{diverged}"


def pivot(
    points: Iterable[Mapping[str, Any]],
    show: Callable[[Mapping[str, Any]], str] = text,
    name: Callable[[Any], str] = lambda x: f"{x:.4g}",
    corner: str = "",
    curves: Iterable[str] = (),
) -> Cells:
    """Returns a table: rows by x, columns by curve.

    >>> pivot([{"x": 1, "curve": "a", "value": 0.5}, {"x": 2, "curve": "b", "value": 0.25}])
    (['', 'a', 'b'], [['1', '0.5000', ''], ['2', '', '0.2500']])

    Args:
      points: Points; an x appears once per curve.
      show: Text of a point.
      name: Text of an x.
      corner: Heading of the first column.
      curves: Order of the columns; by default the order of the points.
    """
    cells = {(point["x"], point["curve"]): show(point) for point in points}
    columns = dict.fromkeys([*curves, *(curve for _, curve in cells)])
    rows = [
        [name(x), *(cells.get((x, curve), "") for curve in columns)]
        for x in dict.fromkeys(x for x, _ in cells)
    ]
    return [corner, *columns], rows


Job = Mapping[str, Any]
"""Settings of a computation: JSON values, and paths of input files."""
Compute = Callable[[Job], Sequence[dict[str, Any]]]
"""Function of a module that returns the rows of a job."""

ROOT = Path(__file__).parents[2]
PACKAGES = ("accounting", "samplers", "dpsgd", "experiments")
"""Folders under `ROOT` whose sources decide the rows."""
LIBRARIES = ("numpy", "scipy", "jax")
"""Distributions whose versions decide the rows."""


@functools.cache
def code_digest() -> str:
    """Returns the SHA-256 of all sources and library versions."""
    digest = hashlib.sha256()
    for path in sorted(file for name in PACKAGES for file in (ROOT / name).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    for name in LIBRARIES:
        digest.update(f"{name} {importlib.metadata.version(name)}\n".encode())
    return digest.hexdigest()


def specification_digest(compute: Compute, job: Job) -> str:
    """Returns the SHA-256 of a job and its input files.

    Args:
      compute: Function that computes the rows; its name is part of the digest.
      job: Settings of the computation.

    Raises:
      OSError: If an input file cannot be read.
    """
    name = f"{compute.__module__}.{compute.__qualname__}"
    text = json.dumps([name, dict(job)], sort_keys=True, default=_content_digest)
    return hashlib.sha256(text.encode()).hexdigest()


def _content_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def computed(
    compute: Compute,
    jobs: Iterable[Job],
    file: Path,
    progress: Callable[[str], None] = lambda line: None,
) -> pl.DataFrame:
    """Returns the rows of all jobs, cached in a file.

    Missing rows are computed on all processors. The file is written after every job, so an
    interrupted computation continues.

    Args:
      compute: Function that computes the rows of one job; pickled.
      jobs: Settings of each computation.
      file: Parquet file of the rows.
      progress: Function of one line of text, called after every job.
    """
    jobs_by_digest = {specification_digest(compute, job): job for job in jobs}
    table = _read(file)
    missing = [digest for digest in jobs_by_digest if digest not in table[SPECIFICATION]]
    work = each(partial(_timed, compute), [jobs_by_digest[digest] for digest in missing])
    for count, (digest, rows) in enumerate(zip(missing, work, strict=True), 1):
        digests = {SPECIFICATION: digest, CODE: code_digest()}
        table = collect(table, [{**row, **digests} for row in rows])
        metadata = {CODE: code_digest()}
        write_atomically(file, partial(table.write_parquet, metadata=metadata))
        progress(f"{count} of {len(missing)}")
    order = pl.DataFrame({SPECIFICATION: list(jobs_by_digest)})
    return order.join(table, on=SPECIFICATION, how="left", maintain_order="left_right")


def _timed(compute: Compute, job: Job) -> list[dict[str, Any]]:
    """Returns the rows of a job, each with its share of the job's CPU seconds."""
    began = time.process_time()
    rows = compute(job)
    share = (time.process_time() - began) / len(rows)
    return [{**row, "seconds": share} for row in rows]


def _read(file: Path) -> pl.DataFrame:
    """Returns the table in a file, empty if it is absent, damaged or of other code."""
    try:
        if pl.read_parquet_metadata(file)[CODE] == code_digest():
            return pl.read_parquet(file)
    except (OSError, KeyError, pl.exceptions.PolarsError):
        pass
    return pl.DataFrame(schema={**SCHEMA, SPECIFICATION: pl.String})


Better = Literal["higher", "lower"]


@dataclass(frozen=True)
class Headline:
    """Metric that tables and figures show first.

    Attributes:
      name: Name of the metric, "<split>_<metric>".
      better: Direction of better values; None if neither the task nor the user states it.
    """

    name: str
    better: Better | None = None

    @property
    def label(self) -> str:
        """Name of the metric for people."""
        return label(self.name)

    @property
    def split(self) -> str:
        """Split of its rows; empty if its name has none."""
        return self.name.partition("_")[0] if "_" in self.name else ""

    @property
    def rows(self) -> str:
        """Rows of the metric, in words."""
        return f"the {self.split} rows" if self.split else "the rows that it is measured on"

    def merit(self, value: float | None, undefined: int = 0) -> tuple[int, float]:
        """Returns a sort key, higher for better means.

        Fewer diverged runs count as better: the mean of the other runs would favour settings that
        diverge, as it averages only the lucky runs.

        >>> Headline("test_log_loss", "lower").merit(0.4)
        (0, -0.4)

        Args:
          value: Mean of the runs with a number, if any.
          undefined: Number of diverged runs.
        """
        sign = -1.0 if self.better == "lower" else 1.0
        return -undefined, -math.inf if value is None else sign * value

    def on_split(self, split: str, metrics: Iterable[str]) -> Headline | None:
        """Returns the metric on another split; None if unmeasured.

        Args:
          split: Name of the split.
          metrics: Names of the measured metrics.

        >>> Headline("test_auc").on_split("validation", ["validation_auc"]).name
        'validation_auc'
        """
        name = f"{split}_{self.name.partition('_')[2]}"
        return Headline(name, self.better) if name in metrics else None

    def beside(self, metrics: Iterable[str]) -> list[str]:
        """Returns this metric and others on its split.

        >>> Headline("test_auc").beside(["test_auc", "train_auc", "test_log_loss"])
        ['test_auc', 'test_log_loss']
        """
        further_names = [n for n in metrics if n != self.name and Headline(n).split == self.split]
        return [self.name, *further_names]
