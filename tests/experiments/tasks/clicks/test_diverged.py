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


def test_a_diverged_run_finishes_with_undefined_metrics(diverged):
    record = json.loads((diverged / "report.json").read_text())
    for split in ("validation", "test"):
        for metric in ("auc", "log_loss", "normalised_entropy", "predicted_over_observed"):
            assert record["metrics"][f"{split}_{metric}"] is None
        assert record["metrics"][f"{split}_num_examples"] == 20
    assert record["epsilon_upper"] > 0
    assert FinishedRun.read(diverged).record["epsilon_upper"] == record["epsilon_upper"]
    assert not (diverged / "secret.json").exists()
    text = (diverged / "report.md").read_text()
    assert "\n\n**The training diverged: validation_auc, " in text
    assert "| test | undefined | undefined | undefined | undefined | undefined | 20 | " in text
    assert "nan" not in text.lower().split()


@pytest.mark.parametrize(
    ("command", "says"),
    {
        "resume": "\nnote: the training diverged: validation_auc, ",
        "evaluate STORE --split test": "error: undefined\nnum_examples: 20\n",
        "export OUT": "",
        "score STORE --split test --out OUT.csv": " rows without a probability (nan)",
        "report --out OUT.html": "",
    }.items(),
)
def test_every_command_takes_a_diverged_run_and_says_so(
    diverged, store, tmp_path, capsys, command, says
):
    name, *more = command.replace("OUT", str(tmp_path / "out")).split()
    words = [name, str(diverged), *(str(store) if word == "STORE" else word for word in more)]
    capsys.readouterr()
    assert cli.main(words) == 0
    assert says in "\n".join(capsys.readouterr())
    if name == "report":
        page = (tmp_path / "out.html").read_text()
        assert "The training of steep diverged" in page
        assert ">undefined</td>" in page
        assert "quality.svg" not in page
    if name == "score":
        scores = [float(line) for line in (tmp_path / "out.csv").read_text().splitlines()[1:]]
        assert np.isnan(scores).any()
        assert len(scores) == 20  # of the test split
