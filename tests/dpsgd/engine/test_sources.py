"""Rows that are read by their indices train the same model as arrays do, or stop the run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import polars
import pyarrow
import pytest

from dpsgd import Mechanism, RowSource, dpsgd, row_source, train, train_blocks
from dpsgd.engine.sources import columns_of_source
from samplers import BallsAndBins, Deterministic

N = 60
COLUMNS = {
    "x": np.random.default_rng(0).normal(size=N).astype(np.float32),
    "y": np.arange(N, dtype=np.int32) % 7,
}
MECHANISM = Mechanism(BallsAndBins(N, 12, 2), 1.0, 1.0)


class Stored:
    """Rows of arrays in a store that is read by a program, with its calls."""

    def __init__(self):
        self.calls = []

    def __len__(self):
        return N

    def take(self, indices):
        self.calls.append(indices)
        return {name: column[indices] for name, column in COLUMNS.items()}


def examples():
    return [{name: column[i] for name, column in COLUMNS.items()} for i in range(N)]


class Batched:
    """Random-access source as in grain, which reads several examples at once."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        raise AssertionError("examples are read one by one")

    def __getitems__(self, indices):
        return [examples()[index] for index in indices]


def of_pandas():
    return pytest.importorskip("pandas").DataFrame(COLUMNS)


SOURCES = {
    "own": Stored,
    "arrow": lambda: pyarrow.table(COLUMNS),
    "polars": lambda: polars.DataFrame(COLUMNS),
    "pandas": of_pandas,
    "examples": lambda: row_source(examples()),
    "batched examples": lambda: row_source(Batched()),
    "columns": lambda: row_source(
        pyarrow.table({**COLUMNS, "name": ["?"] * N}), columns=["x", "y"]
    ),
}


def loss_fn(w, example):
    return jnp.square(w[0] * example["x"] + w[1] - example["y"])


ALGORITHM = dpsgd(loss_fn, optax.sgd(0.1))  # one, and so one program


def trained(data, **how):
    how = {"insecure_seed": 1, "audit": False, "block_steps": 4, **how}
    return train(ALGORITHM, MECHANISM, jnp.ones(2), data, **how).params


@pytest.mark.short("own-None", "columns-device")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("data_on", [None, "device"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_source_trains_the_model_of_its_columns(source, data_on):
    expected = trained(COLUMNS, data_on="host")
    np.testing.assert_array_equal(trained(SOURCES[source](), data_on=data_on), expected)


LABELS = {
    "turned round": np.arange(N)[::-1],
    "doubled": np.arange(N) // 2,
    "beyond the rows": np.arange(N) + N,
}
"""Indices of series, whose rows count by place all the same."""


@pytest.mark.short("turned round-host")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("data_on", ["host", "device"])
@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
def test_labels_of_a_series_choose_no_rows(labels, data_on):
    series = pytest.importorskip("pandas").Series
    data = {"x": series(COLUMNS["x"], index=labels), "y": polars.Series(COLUMNS["y"])}
    expected = trained(COLUMNS, data_on=data_on)
    np.testing.assert_array_equal(trained(data, data_on=data_on), expected)


def test_a_series_is_no_table_but_data():
    column = polars.Series(COLUMNS["x"])
    with pytest.raises(ValueError, match="table is a Series, not a table"):
        row_source(column)
    for data in (column, pyarrow.chunked_array([COLUMNS["x"]])):
        assert isinstance(columns_of_source(data), np.ndarray)


def test_a_source_is_audited_without_reading_rows():
    source = Stored()
    result = train(
        ALGORITHM,
        MECHANISM,
        jnp.ones(2),
        source,
        on_block=lambda step, params: True,
        block_steps=4,
    )
    assert any("audit before training: passed" in note for note in result.guarantee.notes)
    assert len(source.calls) <= FIRST + 3  # and the blocks under way


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("data_on", "reads"), [("host", 3), ("device", 1)])
def test_columns_are_read_together_without_repeats(data_on, reads):
    source = Stored()
    trained(source, data_on=data_on)  # ten steps in blocks of four
    assert all((np.diff(indices) > 0).all() for indices in source.calls)
    assert len(source.calls) == FIRST + reads


FIRST = 5
"""Requests before training: a row for the types; three rows, together and alone."""


class Damaged(Stored):
    def __init__(self, problem):
        super().__init__()
        self.problem = problem

    def __len__(self):
        return N + (self.problem == "length" and len(self.calls) > FIRST + 1)

    def take(self, indices):
        rows = super().take(indices)
        if len(self.calls) <= FIRST + 1:
            return rows
        if self.problem == "error":
            raise OSError("the disk is gone")
        return {
            "rows": {name: column[:-1] for name, column in rows.items()},
            "dtype": {**rows, "x": rows["x"].astype(np.float64)},
            "structure": {"x": rows["x"], "z": rows["y"]},
            "lists": {**rows, "x": list(rows["x"])},
            "length": rows,
        }[self.problem]


DAMAGED = {
    "error": "from index 0 failed: OSError: the disk is gone",
    "rows": r"returned float32\[39\] in place of float32\[40\]",
    "dtype": r"returned float64\[40\] in place of float32",
    "structure": r"returned columns without \['y'\] and with \['z'\], unlike before",
    "lists": r"returned a value of type \w+ at \['x'\]\[0\]; return arrays",
    "length": "data has 61 rows, 60 before",
}


@pytest.mark.parametrize("problem", DAMAGED)
def test_a_damaged_source_stops_a_run_after_the_last_good_block(problem):
    mechanism = Mechanism(Deterministic(N, 10, 2), 1.0, 1.0)
    state, steps = ALGORITHM.init(jnp.ones(2), mechanism), []
    blocks = train_blocks(ALGORITHM, mechanism, state, Damaged(problem), block_steps=4)
    with pytest.raises(ValueError, match=DAMAGED[problem]) as why:
        steps.extend(block.steps.stop for block in blocks)
    assert steps == [4]
    assert "data.take of 40 rows" in str(why.value)
    assert "\n" not in str(why.value)


@pytest.mark.parametrize("order", [[1, 0, 2], [0, 2, 1], [0, 0, 0]])
def test_a_source_that_permutes_rows_is_refused(order):
    source = Stored()
    source.take = lambda rows: Stored.take(source, rows[order] if len(rows) == 3 else rows)
    with pytest.raises(ValueError, match=r"index \d+ alone and within the indices \[0, 20, 59\]"):
        trained(source)


def test_what_is_no_source_is_refused_in_one_line():
    with pytest.raises(ValueError, match="table is a int, not a table of Arrow"):
        row_source(3)
    with pytest.raises(ValueError, match="columns names 'z'; the table has x, y"):
        row_source(pyarrow.table(COLUMNS), columns=["z"])
    with pytest.raises(ValueError, match="has 60 rows, but the sampler"):
        train(
            ALGORITHM,
            Mechanism(BallsAndBins(61, 12), 1.0, 1.0),
            jnp.ones(2),
            Stored(),
        )
    assert isinstance(Stored(), RowSource)
    assert not isinstance(jax.tree.leaves(COLUMNS), RowSource)
