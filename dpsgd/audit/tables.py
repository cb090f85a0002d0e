"""Tables with deferred noise, as an audit sees them: a snapshot, and the rows that are read.

A release is small however large a table is: it holds the rows that some example of the audit reads.
There is one copy of a table on the devices, which one call after the other borrows; after each, the
rows that were read get their numbers back. All others must stay the same to the bit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.core.state import Table, TrainState
from dpsgd.engine.placement import hosted
from dpsgd.engine.programs import compiled

_CHUNK = 2**20  # rows that are compared together


class TableSnapshot:
    """The tables of a run, on the host and, one copy, on the devices.

    Attributes:
      tables: On the host, by the number of the leaf; all rows up to date.
      rows: Rows that examples of the audit look up: int32, in order.
    """

    def __init__(self, state: TrainState, rows: dict[int, np.ndarray]):
        self.tables = {k: Table(*table) for k, table in state.lazy_tables.items()}
        self.rows = rows
        self._now: dict[int, Any] | None = None
        self._strayed = ""

    def borrow(self, step: int) -> dict[int, Table]:
        """Returns the tables on the devices, to be given away: all rows up to date at `step`."""
        now, self._now = self._now, None
        if now is None:
            now = {k: Table(*jax.tree.map(jnp.array, table)) for k, table in self.tables.items()}
        return {
            k: table._replace(steps=jnp.full(len(table.values), step, jnp.int32))
            for k, table in now.items()
        }

    def take_back(self, tables: dict[int, Table], step: int) -> dict[int, Table]:
        """Returns what the step `step` left in `rows`, on the host, and mends these."""
        found = some_rows(tables, self.rows)
        steps = {k: table.steps for k, table in tables.items()}
        arguments = steps, np.int32(step + 1)
        written = compiled(_written, (), arguments)(*arguments)
        for k, rows in found.items():
            if int(hosted(written[k])) != np.count_nonzero(rows.steps == step + 1):
                self._strayed = f"step {step:,} wrote rows of leaf {k} that no example reads"
        without: dict[int, Any] = {k: table._replace(steps=None) for k, table in tables.items()}
        self._now = put_rows(without, self.rows, self.first())
        return found

    def first(self) -> dict[int, Table]:
        """Returns what `rows` hold as the run begins or resumes."""
        return {
            k: jax.tree.map(lambda x, rows=self.rows[k]: x[rows], table)
            for k, table in self.tables.items()
        }

    def stray(self) -> str:
        """Compares the copy with the snapshot, and returns where they differ; empty if nowhere.

        The next call borrows another copy.
        """
        now, self._now = self._now, None
        for k, table in (now or {}).items():
            pairs: Any = zip(table[:2], self.tables[k][:2], strict=True)
            for found, kept in pairs:
                for start in range(0, 0 if kept is None else len(kept), _CHUNK):
                    part = hosted(found[start : start + _CHUNK])
                    if part.tobytes() != kept[start : start + _CHUNK].tobytes():
                        self._strayed = f"rows of leaf {k} from {start:,} on are others"
        return self._strayed


def some_rows(tables: dict[int, Any], rows: dict[int, np.ndarray]) -> dict[int, Table]:
    """Returns some rows of tables of the devices."""
    found = compiled(_some, (), (tables, rows))(tables, rows)
    return {k: Table(*hosted(table)) for k, table in found.items()}


def put_rows(
    tables: dict[int, Any], rows: dict[int, np.ndarray], new: dict[int, Table]
) -> dict[int, Table]:
    """Returns tables, whose buffers are given away, with other rows."""
    arguments = tables, rows, new
    return compiled(_put, (), arguments, donate_argnums=(0,))(*arguments)


def _some(tables, rows):
    return {k: jax.tree.map(lambda x, at=rows[k]: x[at], table) for k, table in tables.items()}


def _put(tables, rows, new):
    return {
        k: Table(
            *jax.tree.map(lambda x, y, at=rows[k]: x.at[at].set(y), tuple(table), tuple(new[k]))
        )
        for k, table in tables.items()
    }


def _written(steps, stop):
    return {k: jnp.sum(x == stop) for k, x in steps.items()}
