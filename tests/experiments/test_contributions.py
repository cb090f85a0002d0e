"""Usage by users, read from tables of every kind; a bad one is refused by row and column."""

import gzip

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from experiments import contributions

COUNTS = np.repeat([1, 5, 40], [30, 20, 2])
USERS = np.repeat(np.arange(COUNTS.size), COUNTS)
LOSSES = np.linspace(0.0, 1.0, USERS.size)


@pytest.fixture(params=["rows.csv", "rows.tsv", "rows.csv.gz", "rows.parquet"])
def table(request, tmp_path):
    path = tmp_path / request.param
    if request.param.endswith("parquet"):
        parquet.write_table(pa.table({"who": USERS, "loss": LOSSES}), path)
        return path
    mark = "\t" if ".tsv" in request.param else ","
    rows = [f"who{mark}loss"] + [
        f"{u}{mark}{x!r}" for u, x in zip(USERS, LOSSES.tolist(), strict=True)
    ]
    text = ("\n".join(rows) + "\n").encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def test_every_kind_of_table_gives_the_same_usage(table):
    usage = contributions.read(table, "who", "loss")
    np.testing.assert_array_equal(usage.counts, COUNTS)
    starts = np.cumsum(COUNTS) - COUNTS
    expected = [LOSSES[s : s + c].mean() for s, c in zip(starts, COUNTS, strict=True)]
    np.testing.assert_allclose(usage.losses, expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user,loss\na,1\n", "has no column who; it has user, loss"),
        ("who,loss\n1,0.5\n,0.5\n", "line 3, column who: found nothing, expected a user"),
        ("who,loss\na,x\n", "line 2, column loss: found 'x', expected a finite number"),
        ("who,loss\na,1\nb,\n", "line 3, column loss: found nothing, expected a finite number"),
        ("who,loss\na,1\nb,inf\n", "line 3, column loss: found 'inf', expected a finite number"),
        ("who,loss\na,1\nb,1,1\n", "line 3: found 3 columns, expected the 2 of the header"),
        ("who,loss\n", "has a header and no rows"),
        ("who,who,loss\n1,2,3\n", "has the column who 2 times"),
    ],
)
def test_a_bad_table_is_refused_by_file_row_and_column(tmp_path, text, message):
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(ValueError, match=message) as refusal:
        contributions.read(tmp_path / "rows.csv", "who", "loss")
    assert "\n" not in str(refusal.value)
    assert "rows.csv" in str(refusal.value)


def test_a_column_of_lists_names_no_users(tmp_path):
    parquet.write_table(pa.table({"who": [[1], [2, 3]]}), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"column who: holds list<.*>, which is no text"):
        contributions.read(tmp_path / "rows.parquet", "who")
