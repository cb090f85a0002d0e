"""Figures of the papers: certified points, one command, and a page of all pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from accounting import Bound, GaussianProfile, epsilon
from dpsgd.audit.black_box import bound_epsilon
from dpsgd.removed import NOTICE, REMOVED
from experiments.figures import (
    FIGURES,
    Options,
    black_box,
    comparison,
    contributions,
    crossing,
    delta,
    drawing,
    episodes,
    never_worse,
    rating_model,
)
from experiments.figures import __main__ as figures
from experiments.figures.__main__ import figure_of, main
from experiments.figures.drawing import save
from experiments.results import points as computed
from experiments.results.points import collect, pivot

GONE = [f"--{x[8:].replace('_', '-')}" for x in sorted(REMOVED) if x.startswith("figures=")]
RECORDS = computed.ROOT / "experiments" / "records"


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(computed, "each", map)


@pytest.fixture(scope="module")
def curves():
    """Points of every curve of a small panel of delta over epsilon, by the name of the curve."""
    shared = delta.panel_of(("tiny", 1.0, 20, 1.0), 2)
    names = ("deterministic", "shuffle", "poisson", delta.DP_ACCOUNTING, "balls-and-bins")
    jobs = [{**shared, "curve": name} for name in names]
    for name, estimator in delta.ESTIMATORS.items():
        jobs.append({**shared, "curve": name, "estimator": estimator, "num_samples": 500})
    return {job["curve"]: delta.compute(job) for job in jobs}


def test_sampled_balls_and_bins_bounds_meet_the_certified_curve(curves):
    for i, certified in enumerate(curves["balls-and-bins"]):
        for name in delta.ESTIMATORS:
            sampled = curves[name][i]
            assert sampled["confidence"] < 1.0 == certified["confidence"]
            assert sampled["lower"] <= certified["upper"]
            assert certified["lower"] <= sampled["upper"]
        assert certified["lower"] <= curves["shuffle"][i]["lower"]
        assert curves["shuffle"][i]["upper"] == curves["deterministic"][i]["upper"]


def test_poisson_is_bounded_by_two_accountants(curves):
    pairs = zip(curves["poisson"], curves[delta.DP_ACCOUNTING], strict=True)
    for ours, other in pairs:
        assert other["lower"] <= ours["upper"]
        assert ours["lower"] <= other["upper"]


def test_sampled_bounds_are_crosses_labelled_by_confidence(curves):
    axes = drawing.blank(2, 2).subplots()
    drawing.draw_curves(axes, collect(*curves.values()))
    crosses = {line.get_label(): line for line in axes.lines if line.get_marker() == "x"}
    assert set(crosses) == {f"{name} (99.9 %)" for name in delta.ESTIMATORS}
    expected = [point["upper"] for point in curves[comparison.MONTE_CARLO]]
    assert list(crosses["balls-and-bins, Monte Carlo (99.9 %)"].get_ydata()) == expected


def test_a_proved_interval_is_a_band_below_its_upper_end():
    points = [{"curve": "a", "x": x, "lower": 1.0, "upper": 2.0 * x, "confidence": 1.0}
              for x in (1.0, 2.0)]  # fmt: skip
    axes = drawing.blank(2, 2).subplots()
    drawing.draw_curves(axes, collect(points))
    upper, lower = axes.lines
    assert (list(upper.get_ydata()), list(lower.get_ydata())) == ([2.0, 4.0], [1.0, 1.0])
    assert len(axes.collections) == 1


def test_error_bars_are_standard_errors():
    points = [{"curve": "a", "x": 1.0, "value": 5.0, "standard_error": 0.25}]
    axes = drawing.blank(2, 2).subplots()
    drawing.draw_curves(axes, collect(points))
    [bars] = axes.collections
    assert bars.get_segments()[0].tolist() == [[1.0, 4.75], [1.0, 5.25]]
    assert pivot(points)[1] == [["1", "5.0000 ± 0.2500"]]


def test_the_comparison_prints_and_draws_what_it_computes(tmp_path, monkeypatch, command):
    monkeypatch.setattr(comparison, "each", map)
    words = ["--num-examples", "1000", "--batch-size", "100", "--noise-multiplier", "0.5", "1"]
    heading, header, *rows = command("compare", *words, "--plot", tmp_path / "a.png").splitlines()
    assert heading.endswith("at delta 1e-05 (zero-out adjacency, unit: one example)")
    assert header.split() == ["sigma", "deterministic", "shuffle", "poisson", "balls-and-bins"]
    assert [row.split()[0] for row in rows][-3:-1] == ["0.5", "1"]
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.long
def test_noise_at_equal_privacy_brackets_the_target():
    profiles = {
        name: sampler.privacy for name, sampler in comparison.all_samplers(1000, 100, 1).items()
    }
    for point in comparison.noise_multipliers(profiles, 1e-5, 3.0):
        privacy = profiles[point["curve"]]
        assert epsilon(privacy(point["upper"]), 1e-5).upper <= 3.0
        assert epsilon(privacy(point["lower"]), 1e-5).lower > 3.0
        assert 0.99 * point["upper"] < point["lower"] or point["curve"] == "shuffle"


def test_noise_of_fixed_batches_brackets_the_analytic_gaussian():
    def excess(sigma, epsilon):
        tails = norm.logcdf([0.5 / sigma - epsilon * sigma, -0.5 / sigma - epsilon * sigma])
        return np.exp(tails[0]) - np.exp(epsilon + tails[1]) - 1e-5

    profiles = {"deterministic": GaussianProfile}
    for target in (0.5, 3.0, 8.0):
        [point] = comparison.noise_multipliers(profiles, 1e-5, target)
        root = brentq(excess, 0.1, 50.0, args=(target,), xtol=1e-13)
        assert point["lower"] < root < point["upper"] < point["lower"] * (1 + 3e-4)


@pytest.mark.long
def test_recorded_crossings_are_tight_with_one_sign_change():
    rows = json.loads((RECORDS / "crossing.json").read_text())
    assert len(rows) == 187
    for row in rows.values():
        lower, upper = row["epsilon"]
        assert 0 < lower < upper < 1.012 * lower
        assert row["zero"] > 0
        assert re.fullmatch(">{4}<{2,}|>{4}<", row["signs"])
    recorded = rows["10.0 5"]
    point, deltas, *_ = crossing.compute({"sigma": 10.0, "steps": 5})
    assert [point["lower"], point["upper"]] == pytest.approx(recorded["epsilon"], rel=2e-4)
    assert [deltas["lower"], deltas["upper"]] == pytest.approx(recorded["delta"], rel=2e-3)
    assert point["signs"] == recorded["signs"]


def test_recorded_cells_are_never_worse_at_a_small_delta():
    rows = json.loads((RECORDS / "never_worse.json").read_text())
    for row in rows.values():
        assert re.fullmatch(r">*<*[.]*", row["signs"])
        assert len(row["signs"]) == len(never_worse.EPSILONS)
        for low, high, poisson_low, poisson_high in row.get("bounds", {}).values():
            assert 0.034 < poisson_low <= poisson_high < low <= high
    job = {"panel": "", "batch_size": 65_536, "steps": 195, "sigma": 0.6, "epochs": 5}
    points, recorded = never_worse.compute(job), rows["195 0.6 5"]
    assert "".join(point["sign"] for point in points) == recorded["signs"]
    ends = ("lower", "upper", "poisson_lower", "poisson_upper")
    for point in points:
        if point["sign"] == ">":
            found = [point[name] for name in ends]
            assert found == pytest.approx(recorded["bounds"][f"{point['x']:g}"], rel=1e-3)


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("small", [False, True])
def test_every_figure_has_jobs_of_json_values_that_differ(name, small):
    module = figure_of(name)
    options = Options(name=name, out=Path("a.svg"), seeds=2, small=small)
    jobs = [json.dumps(job, sort_keys=True) for job in module.jobs(options)]
    assert len(set(jobs)) == len(jobs) > 1
    assert hasattr(module, "LAYOUT") != hasattr(module, "draw")


def draws_squares(monkeypatch, fails=()):
    """Replaces every figure by one of its name with three points."""

    class Squares:
        NOTES = ("squares",)
        LAYOUT = drawing.Layout((2, 2), 1, {})

        def __init__(self, name):
            self.name = name

        def jobs(self, options):
            return [{"name": self.name, "ratings": str(options.ratings)}]

        @staticmethod
        def compute(job):
            if job["name"] in fails:
                raise KeyboardInterrupt
            return [{"panel": "p", "curve": "c", "x": x, "value": x**2} for x in (1.0, 2.0, 3.0)]

    monkeypatch.setattr(figures, "figure_of", Squares)


def test_the_page_has_every_figure_with_its_table_and_command(in_process, tmp_path, monkeypatch):
    draws_squares(monkeypatch)
    assert main(["all", "--small", str(tmp_path / "out"), "--ratings", "u.data"]) == 0
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("data:image/svg+xml") == page.count("9.0000") == len(FIGURES)
    assert "dpsgd sweep criteo-display-small" in page
    for name, description in FIGURES.items():
        assert description in page.replace("&#x27;", "'")
        assert f"<code>scripts/figures {name} --small --ratings u.data</code>" in page


def test_interrupted_figures_leave_the_page_of_those_before(in_process, tmp_path, monkeypatch):
    draws_squares(monkeypatch, fails=("estimators",))
    assert main(["all", "--small", str(tmp_path)]) == 130
    assert (tmp_path / "index.html").read_text().count("data:image/svg+xml") == 2
    assert not (tmp_path / "estimators.svg").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["samplers", "a.png"], "unknown figure 'samplers'; choose among epsilon, "),
        (["epsilon", "a.jpeg"], "OUT must end in .png, .pdf or .svg, got a.jpeg"),
        (["epsilon"], "scripts/figures needs OUT"),
        (["epsilon", "a.png", "--seed", "2"], "--seed"),
        (["contributions", "a.png", "--seeds", "1"], "--seeds must be an integer >= 2, got 1"),
        (["rating_model", "a.png", "--ratings", "nowhere"], "nowhere"),
        (["all", __file__], "File exists"),
        *((["all", "a", option, "2"], f"{option} was {NOTICE}") for option in GONE),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(words, problem, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    line = capsys.readouterr().err
    assert line.startswith("scripts/figures: ")
    assert problem in line
    assert line.count("\n") == 1
    assert not list(Path().iterdir())


def test_help_lists_every_figure(capsys):
    with pytest.raises(SystemExit):
        main([])
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in (*FIGURES, "all"))


SMALL = {
    "amplification": "jointly (1, 1e-06)-DP",
    "contributions": "NOT PRIVATE",
    "crossing": "T = 100",
    "episodes": "NO GUARANTEE",
    "rating_model": "NOT PRIVATE",
}


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_a_small_figure_is_computed_and_drawn(name, tmp_path, capsys, monkeypatch):
    models = {panel: (model, (3.0,)) for panel, (model, _) in rating_model.MODELS.items()}
    monkeypatch.setattr(rating_model, "MODELS", models)
    monkeypatch.setattr(rating_model, "SMALL_CAPS", (5, 20))
    monkeypatch.setattr(episodes, "STEPS", 20)
    assert main([name, "--small", str(tmp_path / "a.svg")]) == 0
    assert (tmp_path / "a.svg").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "zero-out" in printed
    assert SMALL[name] in printed


def test_users_with_few_ratings_have_a_figure_of_contributions(tmp_path):
    file = tmp_path / "u.data"
    file.write_text("".join(f"{u}\t{i}\t4\t{i}\n" for u in range(1, 30) for i in range(1, 5)))
    options = Options(name="contributions", out=tmp_path / "a.svg", small=True, ratings=file)
    points = [point for job in contributions.jobs(options) for point in contributions.compute(job)]
    ((_, rows),) = contributions.lines(collect(points))
    assert len(rows) == len(contributions.EPSILONS)


def test_a_panel_without_worse_cells_names_no_largest_epsilon():
    point = {"panel": "a", "x": 1.0, "poisson_lower": 0.3, "lower": 0.1, "upper": 0.2}
    table = collect([{**point, "sign": "<"}, {**point, "x": 2.0, "sign": "?"}])
    ((_, [row]),) = never_worse.lines(table)
    assert row == ["a", "1", "0", "1", "0", "none", "none", ">= 1.4999"]


def test_a_violation_can_be_drawn(tmp_path):
    rng = np.random.default_rng(0)

    def play(others, trials):
        return {"sum": rng.standard_normal(trials) + 1}, {"sum": rng.standard_normal(trials)}

    report = bound_epsilon(play, Bound(0.0, 0.1), delta=0.01, trials=600)
    assert report.violation
    (line,) = (line for line in report.lines() if line.startswith("epsilon >= "))
    assert float(line.split()[2]) <= report.epsilon_lower < float(line.split()[2]) + 1e-3
    save(black_box.draw(report), tmp_path / "audit.svg")
    assert (tmp_path / "audit.svg").read_text().startswith("<?xml")
