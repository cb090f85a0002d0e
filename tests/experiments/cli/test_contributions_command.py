"""`dpsgd contributions` says that it is not private; `dpsgd choose` is."""

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


def test_diagnostics_are_stamped_and_are_the_published_bounds(tmp_path, command):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"who": USERS, "loss": LOSSES}), path)
    words = ["contributions", path, "--user", "who"]
    out = command(*words, "--loss", "loss", "--caps", "2", "50")
    assert out.startswith("NOT PRIVATE")
    usage = contributions.read(path, "who", "loss")
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


def test_a_model_of_ratings_is_chosen_with_a_guarantee_of_all_that_is_released(u_data, command):
    words = ["choose", u_data, "--target-epsilon", "0.7", "--caps", "2", "3"]
    model, guarantee = command(*words).splitlines()
    assert guarantee.startswith(
        "epsilon <= 0.7 at delta 0 (zero-out adjacency, unit: one user; 0.1"
    )
    assert re.fullmatch(r"rating = [0-9.]+ \+ \S+ position \+ \S+ own, cap [23]", model)
    assert "cap public" in command(*words, "--max-ratings", "4")
