"""`dpsgd compare --train`: the compared samplers trained at the noise that is printed."""

import json
import statistics

import polars as pl
import pytest

from dpsgd.runs.resolve import choose
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.task import rows_of
from experiments.figures import comparison
from experiments.figures.comparison import sweep_file
from experiments.sweeps.config import Sweep
from experiments.tasks.clicks.task import Clicks
from samplers.settings import SETTINGS

GRID = {"sampler": [{"name": "shuffle"}, {"name": "poisson"}], "batch_size": 40, "epochs": 1}
POINTS = pl.DataFrame({"curve": ["shuffle", "poisson"], "lower": [1.0, 0.9], "upper": [1.2, 0.901]})


@pytest.mark.parametrize("axis", ["target_epsilon", "noise_multiplier"])
def test_both_ends_are_trained_where_noise_is_uncertain(axis, store):
    content = sweep_file(store, POINTS, {axis: (3.0, 1.0), **GRID}, 1e-4, 2)
    sweep = Sweep.parse(content, "compare")
    assert (sweep.repetitions, dict(sweep.run)) == (2, {"target_delta": 1e-4})
    certified, *optimistic = sweep.grid
    assert (certified.x, certified.axes[axis]) == (axis, [3.0, 1.0])
    assert [entry["name"] for entry in certified.axes["sampler"]] == ["shuffle", "poisson"]
    expected = [[{"name": "shuffle"}]] if axis == "target_epsilon" else []
    assert [grid.axes["sampler"] for grid in optimistic] == expected
    assert all(grid.axes["optimistic"] for grid in optimistic)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
def test_compare_trains_each_optimizer_at_the_rate_of_train(optimizer, store):
    grid = {"target_epsilon": (3.0,), **GRID, "optimizer": [optimizer]}
    sweep = Sweep.parse(sweep_file(store, POINTS, grid, 1e-4, 1), "compare")
    task = Clicks(store, model=sweep.task["model"])
    asked = {"target_epsilon": 3.0, "target_delta": 1e-4, "optimizer": optimizer}
    spec = RunSpec.of(SETTINGS["shuffle"](batch_size=40, epochs=1), **asked)
    trained = choose(spec, task, rows_of(task)).spec
    assert sweep.grid[0].axes["learning_rate"] == trained.optimizer.learning_rate
    assert sweep.grid[0].axes["l2_clip_norm"] == trained.l2_clip_norm
    given = sweep_file(store, POINTS, {**grid, "learning_rate": [0.25]}, 1e-4, 1)
    assert Sweep.parse(given, "compare").grid[0].axes["learning_rate"] == [0.25]


@pytest.mark.long
def test_compare_trains_at_the_noise_that_it_prints(
    store, tmp_path, monkeypatch, command, in_this_process
):
    monkeypatch.setattr(comparison, "each", map)
    monkeypatch.delenv("COLUMNS", raising=False)
    words = ["compare", "--train", store, "--out", tmp_path / "out", "--repetitions", "2"]
    words += ["--target-epsilon", "2", "--sampler", "shuffle", "--batch-size", "40"]
    lines = command(*words, "--plot", tmp_path / "auc.png").splitlines()
    runs = {path.parent.name: json.loads(path.read_text())
            for path in (tmp_path / "out").glob("runs/*/report.json")}  # fmt: skip
    assert len(runs) == 4
    (band,) = (line.split(maxsplit=1)[1] for line in lines if line.startswith("2  "))
    lower, upper = (float(end) for end in band.strip("[]").split(", "))
    means = []
    for optimistic in (False, True):
        pair = [run for name, run in runs.items() if ("optimistic" in name) == optimistic]
        noise = {run["noise_multiplier"] for run in pair}
        assert noise.pop() == pytest.approx(lower if optimistic else upper, rel=0.01)
        assert not noise
        aucs = [run["metrics"]["test_auc"] for run in pair]
        error = statistics.stdev(aucs) / 2**0.5
        means.append(f"{statistics.mean(aucs):.4f} ± {error:.4f}")
    assert " ".join(["2", *means]) in [" ".join(line.split()) for line in lines]
    assert (tmp_path / "auc.png").stat().st_size > 5000
    monkeypatch.setattr("dpsgd.runs.run.run", None)  # no finished run is repeated
    assert command(*words).splitlines() == lines[:-1]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "dpsgd compare needs --num-examples INT, or --train STORE"),
        ("--num-examples 9 --out o", "--train STORE and --out FOLDER belong together; pass both"),
        ("--train {store}", "--train STORE and --out FOLDER belong together; pass both or neither"),
        ("--train none --out o", "none is not a store: it does not exist; run `dpsgd prepare`"),
        ("--train {store} --num-examples 9 --out o", "--num-examples 9 differs from the 160 train"),
        ("--train {store} --out o", "--batch-size is 1024"),
    ],
)
def test_a_comparison_that_cannot_train_is_refused(words, why, store, command):
    assert why in command.refuses("compare", *words.format(store=store).split())
