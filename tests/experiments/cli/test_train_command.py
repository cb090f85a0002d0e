"""`dpsgd train`, `resume` and `ledger` of a task of one's own: its options, and what is refused."""

import json
import re
import sys
from pathlib import Path

import pytest

from accounting import GaussianProfile, epsilon
from experiments.cli import main

TASK = '''
from dataclasses import dataclass
import numpy as np

@dataclass(frozen=True)
class Mean:
    """The mean of some numbers.

    Attributes:
      rows: How many numbers there are.
    """

    rows: int = 40
    shuffled: bool | None = None

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

class Unreadable:
    shape, dtype, ndim = (40,), np.dtype(np.float32), 1

    def __len__(self):
        return 40

    def __getitem__(self, rows):
        raise AssertionError("a private row is read")

    def __array__(self, *args, **kwargs):
        raise AssertionError("the private rows are read")

@dataclass(frozen=True)
class Closed(Mean):
    def columns(self):
        return {"x": Unreadable()}

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


def test_settings_of_an_own_task_are_options_and_name_its_run(home, command):
    words = ["--task", "own_mean:Mean", "--rows", "50", *SAMPLER, "--shuffled", "true"]
    printed = command("train", *words, "--out", "run", "--no-audit")
    assert "error: on the test rows" in printed
    assert "epsilon in [" in printed
    record = json.loads((home / "run" / "config.json").read_text())["task"]
    assert (record["name"], record["settings"]) == ("own_mean:Mean", {"rows": 50, "shuffled": True})
    command("resume", "run")
    assert "attempt 0: 5 steps from 0 declared of 5" in command("ledger", "run")


FACTS = (
    *(
        "steps: 4",
        "batch: 10 examples expected, padded to ",
        "parameters: 1",
        "memory of the program",
    ),
    *("time of a step: ", "time of all steps: ", "guarantee: epsilon <= ", "nothing was trained"),
)


def without_notes(printed):
    return [line for line in printed.splitlines() if not line.startswith("note: ")]


@pytest.mark.parametrize("out", ["run", "own_mean.py/run"])
def test_a_dry_run_states_facts_reads_no_row_and_writes_nothing(out, home, command):
    words = ["train", "--task", "own_mean:Closed", *SAMPLER, "--out", out, "--dry-run"]
    chosen, *lines = without_notes(command(*words))
    assert re.match(r"chosen: clipping norm \S+, learning rate ", chosen)
    assert len(lines) == len(FACTS)
    assert all(line.startswith(fact) for line, fact in zip(lines, FACTS, strict=True))
    assert {path.name for path in home.iterdir()} <= {"own_mean.py", "__pycache__"}


def test_a_dry_run_needs_neither_rows_nor_devices_nor_a_folder(command):
    words = ["train", *SAMPLER, "--model", "linear", "--dry-run", "--num-examples", "4600"]
    words += ["--max-buckets", "16"]
    _, *lines = without_notes(command(*words, "--num-devices", "100", "--batch-size", "200"))
    assert lines[0] == "steps: 23"
    places = int(re.fullmatch(r"batch: .* to ([\d,]+) places, \d+ on each of 100 devices",
                              lines[1])[1].replace(",", ""))  # fmt: skip
    assert f", {-(-places // 100)} on each" in lines[1]
    assert "one device's share, without the exchange between devices" in lines[4]


def test_help_shows_the_settings_of_the_task_that_is_named(capsys):
    assert main(["train", "--task", "own_mean:Mean", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "How many numbers there are." in printed
    assert "--hidden" not in printed


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--task", "own_mean:Meen"], "module own_mean has no 'Meen': did you mean Mean?"),
        (["--task", "own_mena:Mean"], "own_mena cannot be imported: No module named"),
        (["--task=own_mean:number"], "is not a task: a int lacks columns, init, loss, metr"),
        (["--task", "own_mean:dataclass"], "own_mean:dataclass is not a task: a function lacks"),
        (["--task", "own_mean:Clash"], "its setting learning_rate has the name of an option"),
        (["--task", "image"], "--task image: did you mean images?"),
    ],
)
def test_what_is_wrong_with_a_task_or_a_setting_is_one_line(words, why, command, home):
    assert why in command.refuses("train", *words, *SAMPLER, "--out", "run")
    assert not (home / "run").exists()


SIZES = ["--num-examples", 50, "--batch-size", 10, "--epochs", 1]
DELTA = ["--target-delta", 1e-5]
TRUTH = epsilon(GaussianProfile(1.1), 1e-5)  # 3.92125: 3.92 to the nearest
NOISED = [*SIZES, *DELTA, "--noise-multiplier", 1.1]
PLACES = {
    "report": lambda command: Path("run/report.md").read_text(),
    "model": lambda command: Path("run/guarantee.json").read_text(),
    "ledger": lambda command: command("ledger", "run", "--with", "run"),
    "results": lambda command: command("results", "run"),
    "listing": lambda command: command("results", "run", "run"),
    "epsilon": lambda command: command("epsilon", "sampler:deterministic", *NOISED),
    "calibrate": lambda command: command(
        "calibrate", "sampler:deterministic", *SIZES, *DELTA, "--target-epsilon", TRUTH.upper
    ),
    "compare": lambda command: command("compare", *NOISED),
    "bound": lambda command: f"{TRUTH}, epsilon <= {TRUTH.format_upper()}",
}


@pytest.mark.long
def test_every_place_prints_the_same_ends_of_a_run(command):
    words = "--epochs", 1, "--batch-size", 10, "--noise-multiplier", 1.1, *DELTA, "--rows", 50
    said = {
        "train": command(
            "train", "--task", "own_mean:Mean", "sampler:deterministic", *words, "--no-audit",
            "--out", "run",
        )
    }  # fmt: skip
    said |= {place: tell(command) for place, tell in PLACES.items()}
    for place, text in said.items():
        numbers = re.findall(r"\d+\.\d+", re.sub(r'"epsilon_\w+": [\d.]+', "", text))
        near = {one for one in numbers if abs(float(one) / TRUTH.upper - 1) < 0.005}
        assert "3.93" in near <= {"3.92", "3.93"}, (place, near)
        assert "epsilon <= 3.92" not in text, place
