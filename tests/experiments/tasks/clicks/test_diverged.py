"""A run that diverges comes to its end: priced, with a model, and metrics that are undefined."""

import json
import warnings

import numpy as np
import pytest

from dpsgd.runs.result import FinishedRun
from experiments import cli

TINY = ["--embedding-dim", "2", "--max-buckets", "16", "--hidden", "4"]
WORDS = ["--batch-size", "40", "--epochs", "2", "--noise-multiplier", "1", "--no-audit", *TINY]


@pytest.fixture(scope="module")
def diverged(store):
    """The directory of a run that diverged, and what was printed at its end."""
    out = store.parent / "steep"
    words = ["train", store, "sampler:deterministic", "--learning-rate", "1e30", "--out", out]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert cli.main([str(word) for word in [*words, *WORDS]]) == 0
    return out


def test_it_is_a_finished_run_whose_metrics_are_undefined(diverged):
    record = json.loads((diverged / "report.json").read_text())
    for split in ("validation", "test"):
        for metric in ("auc", "log_loss", "normalised_entropy", "predicted_over_observed"):
            assert record["metrics"][f"{split}_{metric}"] is None
        assert record["metrics"][f"{split}_num_examples"] == 20
    assert record["epsilon_upper"] > 0
    found = FinishedRun.read(diverged)
    assert found.record["epsilon_upper"] == record["epsilon_upper"]
    assert not (diverged / "secret.json").exists()


@pytest.mark.short("evaluate", "resume", "export")
@pytest.mark.parametrize("command", ["resume", "report", "evaluate", "export"])
def test_every_command_takes_it_and_says_that_it_diverged(
    diverged, store, tmp_path, capsys, command
):
    more = {
        "resume": [], "report": ["--out", tmp_path / "page.html"],
        "evaluate": [store, "--split", "test"], "export": [tmp_path / "model"],
    }  # fmt: skip
    capsys.readouterr()
    assert cli.main([str(word) for word in [command, diverged, *more[command]]]) == 0
    printed = capsys.readouterr().out
    if command == "resume":
        (line,) = [line for line in printed.splitlines() if "diverged" in line]
        assert line.startswith("note: the training diverged: validation_auc, ")
        assert printed.count("undefined") == 5 + 1  # in the table, and in the note
    if command == "report":
        page = (tmp_path / "page.html").read_text()
        assert "The training of steep diverged" in page
        assert ">undefined</td>" in page
        assert "quality.svg" not in page
    if command == "evaluate":
        assert "auc: undefined" in printed
        assert "num_examples: 20" in printed


def test_its_report_says_so_in_bold(diverged):
    text = (diverged / "report.md").read_text()
    assert "\n\n**The training diverged: validation_auc, " in text
    assert "| test | undefined | undefined | undefined | undefined | undefined | 20 | " in text
    assert "nan" not in text.lower().split()


def test_scores_of_its_model_are_none_and_counted(diverged, store, tmp_path, capsys):
    out = tmp_path / "scores.csv"
    words = ["score", diverged, store, "--split", "test", "--out", out]
    assert cli.main([str(word) for word in words]) == 0
    lines = out.read_text().splitlines()[1:]
    undefined = np.isnan([float(line) for line in lines]).sum()
    assert undefined > 0
    assert f"note: {undefined} rows without a probability (nan)" in capsys.readouterr().err
