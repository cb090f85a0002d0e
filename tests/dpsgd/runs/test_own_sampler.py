"""A sampler from outside the package: trained, stopped, resumed, ledgered, audited, commanded."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from own_sampler import Coins
from tiny_task import config_of, line, run_and_stop

from accounting import epsilon
from dpsgd import resume, run
from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.ledger import LedgerError, read
from samplers.settings import settings_of

HERE = Path(__file__).parent
SETTINGS = settings_of(Coins)(batch_size=16, epochs=3, heads=0.25)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    from tiny_task import short_blocks

    out = tmp_path_factory.mktemp("own") / "run"
    with short_blocks():
        return run_and_stop(line, config_of(sampler=SETTINGS, audit=True), out)


@pytest.mark.long
def test_a_sampler_of_ones_own_is_trained_stopped_and_resumed_by_its_qualified_name(stopped):
    assert json.loads((stopped / "config.json").read_text())["sampler"] == {
        "name": "own_sampler:Coins", "batch_size": 16, "epochs": 3, "num_shards": 1, "heads": 0.25,
    }  # fmt: skip
    audit = RunDirectory.open(stopped, finished=False).history().audit
    assert audit.startswith("passed: the compiled program and the draws keep")
    ran_through = run(line, config_of(sampler=SETTINGS), stopped.parent / "through")
    said = []
    record = resume(stopped, progress=said.append)
    assert "importing the module of the run's own sampler, own_sampler:Coins" in said
    history = RunDirectory.open(stopped).history()
    assert len(history.attempts) == 1  # nothing was taken anew
    sampler = Coins(160, 16, 3, heads=0.25)
    assert history.attempts[0].terms.mechanism.sampler == sampler
    assert record["epsilon_upper"] == epsilon(sampler.privacy(1.0), 1e-5).upper
    assert record["sampler"] == "own_sampler:Coins"
    assert record["epsilon_upper"] == ran_through["epsilon_upper"]


def test_where_its_module_is_not_imported_a_line_says_what_is_missing(stopped, monkeypatch):
    # As in a process of somebody else, who has the run directory and perhaps the module.
    monkeypatch.delitem(sys.modules, "own_sampler")
    with pytest.raises(LedgerError, match="'own_sampler:Coins' is not of this package") as refusal:
        read(stopped / "ledger.jsonl")
    assert "\n" not in str(refusal.value)
    assert "own_sampler" not in sys.modules


def test_its_code_is_part_of_what_a_resumed_run_must_find_unchanged():
    from dpsgd.runs.fingerprint import task_code_digest

    sampler = Coins(160, 16)
    assert task_code_digest(line, None, sampler) != task_code_digest(line)


@pytest.mark.long  # a process of its own: the rest of the way is tested above
def test_the_command_trains_with_a_sampler_that_lies_in_the_current_folder(tmp_path):
    words = ["train", "--task", "tiny_task:line", "sampler:own_sampler:Coins", "--heads", "0.25"]
    words += ["--batch-size", "16", "--epochs", "2", "--noise-multiplier", "1"]
    code = "import sys; from experiments.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--out", str(tmp_path / "run")],
        cwd=HERE, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "own_sampler:Coins" in done.stdout
    assert np.isfinite(json.loads((tmp_path / "run" / "report.json").read_text())["epsilon_upper"])
