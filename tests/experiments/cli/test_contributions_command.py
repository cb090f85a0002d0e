"""`dpsgd contributions` says that it is not private, or prints a private choice alone."""

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from accounting.releases.contribution import bias_bounds
from experiments import contributions
from experiments.cli.commands.contributions import ContributionsConfig, run

COUNTS = np.repeat([1, 5, 40], [30, 20, 2])
USERS = np.repeat(np.arange(COUNTS.size), COUNTS)
LOSSES = np.linspace(0.0, 1.0, USERS.size)


def test_diagnostics_are_stamped_and_are_the_published_bounds(tmp_path, capsys):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"who": USERS, "loss": LOSSES}), path)
    run(ContributionsConfig(path, "who", "loss", caps=(2, 50)))
    out = capsys.readouterr().out
    assert out.startswith("NOT PRIVATE")
    usage = contributions.read(path, "who", "loss")
    for bound in bias_bounds(COUNTS, 2, usage.losses):
        assert f"{bound:.4f}" in out
    assert "least bound on its error at a cap of 40" in out
    run(ContributionsConfig(path, "who", caps=(2,)))
    assert " -  " in capsys.readouterr().out  # no losses, no variance between users


def test_a_private_choice_prints_nothing_else_of_the_data(tmp_path, capsys):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"who": USERS}), path)
    config = ContributionsConfig(
        path, "who", caps=(1, 5, 50), private_quantile=0.9, quantile_epsilon=100.0000004
    )
    run(config)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("cap 5: chosen with epsilon 100.0000004, delta 0")
    assert "unit: one user" in line
    assert line.endswith("accuracy of at most 1.0000")
