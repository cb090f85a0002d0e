"""The record of the shipped sweeps is short, and holds what their runs hold."""

import json
import shutil

import pytest

from experiments.sweeps import engine
from experiments.sweeps.config import SHIPPED
from experiments.sweeps.record import lines, record

GRID = {"x": "target_epsilon", "sampler": ("shuffle", "poisson"), "target_epsilon": (1.0, 8.0)}


@pytest.fixture
def folder(summary_of, tmp_path, monkeypatch):
    """The folder of a shipped sweep, whose runs are made up."""
    summary = summary_of(lambda run, metric: 0.7 + 0.0123456789 * run.spec.init_seed, GRID)
    monkeypatch.setattr(engine, "read", lambda path: summary)
    shutil.copy(SHIPPED / "equal-privacy.toml", tmp_path / "sweep.toml")
    return tmp_path


def test_the_record_holds_each_cell_on_a_line_and_the_command_that_does_it_again(folder):
    found = record([folder], note="made up")
    text = lines(found)
    assert json.loads(text) == found
    (sweep,) = found["sweeps"]
    assert sweep["command"] == "dpsgd sweep equal-privacy store --out equal-privacy"
    assert len(sweep["results"]) == sum('"test_auc"' in line for line in text.splitlines()) == 4
    point = sweep["results"][0]
    assert point["test_auc"] == [0.70617284, 0.00872971]
    assert (point["epsilon_lower"], point["epsilon_upper"]) == (0.8, 1.0)


def test_no_sweep_but_a_shipped_one_is_recorded(folder):
    (folder / "sweep.toml").write_text("title = 'mine'\n")
    with pytest.raises(ValueError, match="no longer, a shipped sweep"):
        record([folder])
