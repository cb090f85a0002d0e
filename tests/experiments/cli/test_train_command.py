"""`dpsgd train`, `resume` and `ledger` of a task of one's own: its options, and what is refused."""

import json
import sys

import pytest

from experiments.cli import main

TASK = '''
from dataclasses import dataclass
import numpy as np

@dataclass(frozen=True)
class Mean:
    """The mean of some numbers."""

    rows: int = 40
    """How many numbers there are."""

    def columns(self):
        return {"x": np.linspace(0, 1, self.rows, dtype=np.float32)}

    def init(self, seed):
        return {"m": np.zeros((), np.float32)}

    def loss(self, params, example):
        return (params["m"] - example["x"]) ** 2

    def metrics(self, params):
        return {"test_error": float(params["m"] - 0.5) ** 2}

    def generated(self, count):
        return {"x": np.zeros(count, np.float32)}

    def describe(self):
        return {}

@dataclass(frozen=True)
class Clash(Mean):
    learning_rate: float = 1.0

task = Mean()
number = 3
'''
SAMPLER = ["sampler:poisson", "--batch-size", "10", "--epochs", "1", "--noise-multiplier", "2"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    (tmp_path / "own_mean.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("own_mean", None)


def test_settings_of_ones_own_task_are_options_and_its_run_goes_by_its_name(home, command):
    words = ["train", "--task", "own_mean:Mean", "--rows", "50", *SAMPLER, "--out", "run"]
    printed = command(*words, "--no-audit")
    assert "error: of the test rows" in printed
    assert "epsilon in [" in printed
    record = json.loads((home / "run" / "config.json").read_text())["task"]
    assert (record["name"], record["settings"]) == ("own_mean:Mean", {"rows": 50})
    command("resume", "run")
    assert "attempt 0: 5 steps from 0 declared of 5" in command("ledger", "run")


def test_help_shows_the_settings_of_the_task_that_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--task", "own_mean:Mean", "--help"])
    printed = capsys.readouterr().out
    assert "How many numbers there are." in printed
    assert "--hidden" not in printed


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--task", "own_mean:Meen"], "module own_mean has no 'Meen': did you mean Mean?"),
        (["--task", "own_mena:Mean"], "there is no module own_mena, where own_mena:Mean should"),
        (["--task=own_mean:number"], "is no task: it is a int without columns, init, loss, metr"),
        (["--task", "own_mean:dataclass"], "own_mean:dataclass is no task: it is a function with"),
        (["--task", "own_mean:Clash"], "its setting learning_rate is called as one of the comm"),
        (["--task", "image"], "--task image: did you mean images?"),
        (["--task"], "--task needs a name, one of clicks, images, ratings, or module:object"),
        (["--task", "images", "--task", "clicks"], "--task names several: images, clicks"),
    ],
)
def test_what_is_wrong_with_a_task_or_a_setting_is_one_line(words, why, command, home):
    assert why in command.refuses("train", *words, *SAMPLER, "--out", "run")
    assert not (home / "run").exists()
