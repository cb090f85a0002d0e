"""Cache of computed rows: a table that is used while its jobs and its code are unchanged.

Each row holds the digests of the job and of the code that computed it; a file whose content was
edited, torn or computed by other code is not used.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from dpsgd.files import write_atomically
from experiments.processes import each
from experiments.results.points import CODE, SCHEMA, SPECIFICATION, collect

Job = Mapping[str, Any]
"""Settings of a computation: JSON values, and paths of input files."""
Compute = Callable[[Job], Sequence[dict[str, Any]]]
"""Function of a module that returns the rows of a job."""

ROOT = Path(__file__).parents[2]
PACKAGES = ("accounting", "samplers", "dpsgd", "experiments")
"""Folders under `ROOT` whose sources decide the rows."""
LIBRARIES = ("numpy", "scipy", "jax")
"""Distributions whose versions decide the rows."""
_SEAL = "seal"


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
        metadata = {_SEAL: _seal(table)}
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


def _seal(table: pl.DataFrame) -> str:
    return hashlib.sha256(f"{code_digest()}{table.write_json()}".encode()).hexdigest()


def _read(file: Path) -> pl.DataFrame:
    """Returns the table in a file, empty if it is absent, damaged, edited or of other code."""
    try:
        table = pl.read_parquet(file)
        if pl.read_parquet_metadata(file)[_SEAL] == _seal(table):
            return table
    except (OSError, KeyError, pl.exceptions.PolarsError):
        pass
    return pl.DataFrame(schema={**SCHEMA, SPECIFICATION: pl.String})
