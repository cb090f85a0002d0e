"""A run of any task: from its rows to a directory with model, report and guarantee."""

import json

from tiny_task import Line

from dpsgd import RunConfig, resume, run
from dpsgd.runs.result import FinishedRun
from samplers import BallsAndBins


def test_a_task_is_trained_to_a_directory_with_its_metrics_and_its_guarantee(tmp_path):
    config = RunConfig(BallsAndBins(160, 16, 2), noise_multiplier=1.0)
    record = run(Line(), config, tmp_path / "run")
    assert record["metrics"]["test_num_examples"] == 50
    assert record["epsilon_upper"] > record["epsilon_lower"] > 0
    assert record["audit"].startswith("passed: ")
    assert record == json.loads((tmp_path / "run" / "report.json").read_text())
    assert resume(tmp_path / "run") == record  # it is finished
    assert FinishedRun.read(tmp_path / "run").config.noise_multiplier == 1.0
