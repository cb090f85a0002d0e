"""Holds tables with deferred noise in an audit.

A release contains only the rows that some example of the audit looks up, so that it is small for
tables of every size. The devices hold one copy of each table, which successive calls borrow. After
each call the looked-up rows are restored; all other rows must stay the same to the bit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd.core.state import Table, TrainState
from dpsgd.engine.copies import hosted
from dpsgd.engine.programs import compiled

_CHUNK = 2**20  # rows that are compared together


class TableSnapshot:
    """Tables of a run on the host, and one copy on the devices.

    Attributes:
      tables: Tables on the host, by leaf index; all rows are up to date.
      rows: Row indices that examples of the audit look up, by leaf index: int32, ascending.
    """

    def __init__(self, state: TrainState, rows: dict[int, np.ndarray]):
        self.tables = {k: Table(*table) for k, table in state.lazy_tables.items()}
        self.rows = rows
        self._now: dict[int, Any] | None = None
        self._strayed = ""

    def borrow(self, step: int) -> dict[int, Table]:
        """Returns the donatable device copy, up to date at `step`."""
        now, self._now = self._now, None
        if now is None:
            now = {k: Table(*jax.tree.map(jnp.array, table)) for k, table in self.tables.items()}
        return {
            k: table._replace(steps=jnp.full(len(table.values), step, jnp.int32))
            for k, table in now.items()
        }

    def take_back(self, tables: dict[int, Table], step: int) -> dict[int, Table]:
        """Returns the looked-up rows after a step, and restores them.

        Args:
          tables: Tables on the devices after the step.
          step: Number of the step.
        """
        looked_up = some_rows(tables, self.rows)
        steps = {k: table.steps for k, table in tables.items()}
        arguments = steps, np.int32(step + 1)
        written = compiled(_written, (), arguments)(*arguments)
        for k, rows in looked_up.items():
            if int(hosted(written[k])) != np.count_nonzero(rows.steps == step + 1):
                self._strayed = f"step {step:,} wrote rows of leaf {k} that no example looks up"
        without: dict[int, Any] = {k: table._replace(steps=None) for k, table in tables.items()}
        self._now = put_rows(without, self.rows, self.first())
        return looked_up

    def first(self) -> dict[int, Table]:
        """Returns the looked-up rows before the first step."""
        return {
            k: jax.tree.map(lambda x, rows=self.rows[k]: x[rows], table)
            for k, table in self.tables.items()
        }

    def stray(self) -> str:
        """Describes rows of the device copy that differ from the snapshot; empty if none.

        It sees the calls that returned the copy, and nothing while a call borrows it.
        """
        for k, table in (self._now or {}).items():
            pairs: Any = zip(table[:2], self.tables[k][:2], strict=True)
            for current, original in pairs:
                for start in range(0, 0 if original is None else len(original), _CHUNK):
                    chunk = hosted(current[start : start + _CHUNK])
                    if chunk.tobytes() != original[start : start + _CHUNK].tobytes():
                        self._strayed = (
                            f"rows of leaf {k} from {start:,} on changed without a look-up"
                        )
        return self._strayed


def some_rows(tables: dict[int, Any], rows: dict[int, np.ndarray]) -> dict[int, Table]:
    """Copies rows of tables to the host."""
    copies = compiled(_select_rows, (), (tables, rows))(tables, rows)
    return {k: Table(*hosted(table)) for k, table in copies.items()}


def put_rows(
    tables: dict[int, Any], rows: dict[int, np.ndarray], new: dict[int, Table]
) -> dict[int, Table]:
    """Writes rows into tables, whose buffers are donated."""
    arguments = tables, rows, new
    return compiled(_write_rows, (), arguments, donate_argnums=(0,))(*arguments)


def _select_rows(tables, rows):
    return {k: jax.tree.map(lambda x, at=rows[k]: x[at], table) for k, table in tables.items()}


def _write_rows(tables, rows, new):
    return {
        k: Table(
            *jax.tree.map(lambda x, y, at=rows[k]: x.at[at].set(y), tuple(table), tuple(new[k]))
        )
        for k, table in tables.items()
    }


def _written(steps, stop):
    return {k: jnp.sum(x == stop) for k, x in steps.items()}
