"""The record of the shipped sweeps is short, and holds what their summaries hold."""

import json
import shutil

import pytest

from experiments.sweeps.config import SHIPPED
from experiments.sweeps.record import lines, record

GRID = {"x": "target_epsilon", "sampler": ("shuffle", "poisson"), "target_epsilon": (1.0, 8.0)}


@pytest.fixture
def folder(summary_of, tmp_path):
    """The folder of a sweep, with what its record is made of."""
    summary = summary_of(lambda run, metric: 0.7 + 0.0123456789 * run.spec.init_seed, GRID)
    (tmp_path / "summary.json").write_text(json.dumps(summary.record()))
    shutil.copy(SHIPPED / "equal-privacy.toml", tmp_path / "sweep.toml")
    return tmp_path


def test_the_record_holds_each_grid_point_on_a_line_and_the_command_that_does_it_again(folder):
    found = record([folder], note="made up")
    text = lines(found)
    assert json.loads(text) == found
    (sweep,) = found["sweeps"]
    assert sweep["command"] == "dpsgd sweep equal-privacy store --out equal-privacy"
    assert len(sweep["results"]) == sum('"test_auc"' in line for line in text.splitlines()) == 4
    point = sweep["results"][0]
    assert point["test_auc"] == [0.70617284, 0.00872971]
    assert (point["epsilon_lower"], point["epsilon_upper"]) == (0.8, 1.0)


def test_what_is_no_shipped_sweep_or_of_another_version_is_not_recorded(folder):
    summary = json.loads((folder / "summary.json").read_text())
    del summary["setting"]
    (folder / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ValueError, match=r"no 'setting': the sweep's own command writes it anew"):
        record([folder])
    (folder / "sweep.toml").write_text("title = 'mine'\n")
    with pytest.raises(ValueError, match="no longer, a shipped sweep"):
        record([folder])
