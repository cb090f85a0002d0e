"""Rows of any schema with nothing to learn in them: what a program is tried on that is audited."""

from __future__ import annotations

import numpy as np

from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.store import Columns


def uniform_rows(schema: Schema, count: int) -> Columns:
    """Return `count` synthetic probe rows of `schema`; a fifth of their numbers are missing."""
    rng = np.random.default_rng(0)
    shape = count, len(schema.integers)
    missing = rng.random(shape) < 0.2
    return {
        "label": schema.target.generated(rng, count),
        "integers": np.where(missing, 0, rng.uniform(0, 12, shape)).astype(np.float32),
        "integers_missing": missing,
        "categories": rng.integers(
            0, schema.buckets, (count, len(schema.buckets)), endpoint=True
        ).astype(np.int32),
    }
