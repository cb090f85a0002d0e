"""A private selection's file, and `dpsgd sweep --private`."""

import io
import re
import sys
import time
from pathlib import Path

import pytest
from tiny_task import Line

import dpsgd
from accounting import TrialCount
from dpsgd import TargetEpsilon
from dpsgd.runs.result import FinishedRun
from experiments.cli import console
from experiments.results.page import page as page_of
from experiments.sweeps import engine
from experiments.sweeps.config import Sweep, file_of
from experiments.sweeps.private import PrivateSweep

FILE = """
target_epsilon = 8.0
mean_trials = 2.0
score = "test_error"
better = "lower"

[task]
name = "tiny_task:Line"
width = 3

[run]
audit = false

[[grid]]
sampler = "deterministic"
batch_size = 32
epochs = 2
learning_rate = [0.01, 0.02]
"""


def parse(text):
    return PrivateSweep.parse(text.encode(), "FILE")


def test_the_candidates_are_the_distinct_grid_combinations():
    sweep = parse(FILE + "l2_clip_norm = [1, 4.0]\n" + FILE[FILE.index("[[grid]]") :])
    found = sweep.candidates("FILE")
    assert [(c.optimizer.learning_rate, c.l2_clip_norm) for c in found] == [
        (0.01, 1), (0.01, 4.0), (0.02, 1), (0.02, 4.0), (0.01, None), (0.02, None),
    ]  # fmt: skip
    assert {c.privacy for c in found} == {TargetEpsilon(8.0)}
    assert {(c.sampler.batch_size, c.sampler.epochs, c.audit) for c in found} == {(32, 2, False)}
    assert sweep.count == TrialCount(2.0, 0.0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "[[grid]]",
            "[[grid]]\ntarget_epsilon = 3",
            "target_epsilon applies to the whole selection",
        ),
        ("[[grid]]", "[[grid]]\nnon_private = true", "non_private voids the guarantee"),
        ("audit = false", "insecure_seed = 1", "insecure_seed voids the guarantee"),
        ("0.02]", '"high"]', "learning_rate must be a finite number > 0, got high"),
        ("learning_rate", "rate", "rate is unknown"),
        ("[0.01, 0.02]", "[]", "learning_rate needs at least one value"),
        ("mean_trials = 2.0", "mean_trials = 0.5", "the mean number of trials must be in"),
        ("mean_trials", "repetitions", "a sweep that shows every run: leave out --private"),
        ('"deterministic"', '"lottery"', "unknown sampler 'lottery'"),
    ],
)
def test_what_cannot_be_asked_for_is_named_in_one_line(old, new, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse(FILE.replace(old, new, 1)).candidates("FILE")
    assert str(error.value).startswith("FILE")
    assert "\n" not in str(error.value)


def test_the_score_is_the_headline_metric_on_validation_rows():
    class Described(Line):
        def describe(self):
            return {"headline": "test_auc", "better": "higher"}

    own = parse(FILE.replace('score = "test_error"\nbetter = "lower"\n', ""))
    assert own.scored(Described(), "FILE") == ("validation_auc", "higher")
    other = parse(FILE.replace('better = "lower"\n', ""))
    with pytest.raises(ValueError, match="better is missing"):
        other.scored(Described(), "FILE")
    with pytest.raises(ValueError, match="measured on protected rows"):
        parse(FILE.replace("test_error", "train_auc")).scored(Described(), "FILE")


def test_the_shipped_selection_is_named_and_needs_its_option():
    content = file_of(Path("private-selection")).read_bytes()
    assert len(PrivateSweep.parse(content, "private-selection").candidates("FILE")) > 1
    with pytest.raises(ValueError, match=r"private-selection is the file of .*: add --private"):
        Sweep.parse(content, "private-selection")
    with pytest.raises(ValueError, match="a sweep that shows every run: leave out --private"):
        PrivateSweep.parse(file_of(Path("equal-privacy")).read_bytes(), "FILE")


def test_the_command_releases_a_model_with_the_joint_guarantee(tmp_path, command):
    (tmp_path / "file.toml").write_text(FILE)
    words = ["sweep", tmp_path / "file.toml", "--private", "--out", tmp_path / "out"]
    said = command(*words)
    run = FinishedRun.read(tmp_path / "out")
    assert 7.9 < run.record["epsilon_upper"] <= 8.0
    assert run.record["guarantee"] in " ".join(said.split())
    page = page_of([tmp_path / "out"]).markdown
    assert run.record["guarantee"] in page
    assert "--private --out out" in page
    assert "curves.svg" not in page  # of one trial's mechanism
    told = command("ledger", tmp_path / "out")
    assert told.splitlines()[-1] == run.record["guarantee"]
    assert "--workers does not go with --private" in command.refuses(*words, "--workers", "2")
    (tmp_path / "file.toml").write_text(FILE.replace("0.02", "0.03"))
    assert "another candidates" in command.refuses(*words)


def test_a_dry_run_prices_a_selection_and_reads_no_row(tmp_path, command, monkeypatch):
    def time_runs(task, specs, workers):
        return iter(["a device", *(360.0 for _ in specs)])

    monkeypatch.setattr(engine, "time_runs", time_runs)
    text = FILE.replace("tiny_task:Line", "test_dry_run:ClosedLine")
    (tmp_path / "file.toml").write_text(text.replace("epochs = 2", "epochs = [2, 4]"))
    said = command("sweep", tmp_path / "file.toml", "--private", "--dry-run")
    for line in (  # 160 rows in batches of 32; 2 trials on average
        "candidates: 4, each equally likely to be a trial",
        "trials: 2 on average; ",
        "steps of a trial: 10 to 20\n",
        "time of a trial: 1 to 2 hours of steps, measured on generated rows (a device)",
        "time of all trials: 3 hours on average, one after another, ",
    ):
        assert line in said
    assert 7.9 < float(re.search(r"guarantee: epsilon <= ([\d.]+) .* secret number", said)[1]) <= 8
    assert [path.name for path in tmp_path.iterdir()] == ["file.toml"]


class Terminal(io.StringIO):
    """A stdout that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.short("pipe")
@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_elapsed_time_of_a_selection_is_not_shown(terminal, tmp_path, monkeypatch, capsys, command):
    monkeypatch.setattr(console, "EVERY", 0.05)
    monkeypatch.setattr(console, "PATIENCE", 0.05)
    (tmp_path / "file.toml").write_text(FILE)
    words = ["sweep", tmp_path / "file.toml", "--private", "--out"]
    command(*words, tmp_path / "out")
    record = FinishedRun.read(tmp_path / "out").record

    def shown(seconds: float) -> set[str]:
        def select(task, candidates, out, *, progress, **asked):
            for line in ("running trials", "releasing the best"):
                progress(line)
                time.sleep(seconds)
            return record

        monkeypatch.setattr(dpsgd, "select", select)
        out, err = (Terminal() if terminal else io.StringIO() for _ in range(2))
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        command(*words, tmp_path / "out")
        said = out.getvalue() + err.getvalue()
        assert ("running trials" in said) == terminal
        assert "report.md" in said
        return set(re.split(r"[\r\n]|\x1b\[[0-9;?]*[a-zA-Z]|[⠀-⣿]", said))  # the last spins

    assert shown(0.2) == shown(1.2)
