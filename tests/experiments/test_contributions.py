"""Usage by users and private models of ratings; `dpsgd contributions` and `dpsgd choose`.

Tables of every kind are read; a bad one is refused by row and column.
"""

import gzip
import re

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from experiments import contributions
from experiments.papers.contribution import bias_bounds

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
        ("who,loss\n", "has a header but no rows"),
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
    with pytest.raises(ValueError, match=r"column who: holds list<.*>, expected texts"):
        contributions.read(tmp_path / "rows.parquet", "who")


def test_diagnostics_are_stamped_and_are_the_published_bounds(table, command):
    words = ["contributions", table, "--user", "who"]
    out = command(*words, "--loss", "loss", "--caps", "2", "50")
    assert out.startswith("NOT PRIVATE")
    usage = contributions.read(table, "who", "loss")
    for bound in bias_bounds(COUNTS, 2, usage.losses):
        assert f"{bound:.4f}" in out
    assert "least bound on its error at a cap of 40" in out
    assert " -  " in command(*words, "--caps", "2")  # no losses, no variance between users


@pytest.fixture
def u_data(tmp_path):
    rng = np.random.default_rng(0)
    rows = [(u, i, rng.integers(1, 6), 10 * u + i) for u in range(9) for i in range(1, 4 + u % 3)]
    (tmp_path / "u.data").write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))
    return tmp_path / "u.data"


def test_the_rating_model_has_one_guarantee_for_all_outputs(u_data, command):
    words = ["choose", u_data, "--target-epsilon", "0.7"]
    model, guarantee = command(*words, "--caps", "2", "3").splitlines()
    assert guarantee.startswith(
        "epsilon <= 0.7 at delta 0 (zero-out adjacency, unit: one user; 0.1"
    )
    assert re.fullmatch(r"rating = [0-9.]+ \+ \S+ position \+ \S+ own, cap [23]", model)
    assert "cap public" in command(*words, "--max-ratings", "4")
    u_data.unlink()
    dry = command(*words, "--dry-run").splitlines()
    assert dry[2] == f"guarantee: {guarantee}"
    assert not any("rating =" in line for line in dry)
