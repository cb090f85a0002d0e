"""The figure of a sweep shows its means with their errors, and where the axis changes."""

from pathlib import Path

import numpy as np
import pytest

from dpsgd import Mechanism, RunSpec
from dpsgd.core.cost import WARM_START
from dpsgd.runs.directory import Configuration
from dpsgd.runs.history import History
from dpsgd.runs.result import FinishedRun
from experiments.results import draw as drawn
from experiments.results.draw import composite_scale, curves
from experiments.results.points import Headline
from experiments.results.views import View
from samplers import Deterministic, Poisson

SIGMAS = (0.01, 0.1, 0.5, 1.0, 5.0)
NOISE = {"x": "noise_multiplier", "sampler": ("shuffle", "poisson"), "noise_multiplier": SIGMAS}
PRIVACY = {"x": "target_epsilon", "sampler": "poisson", "target_epsilon": (1.0, 2.0)}
SIZES = {**PRIVACY, "x": "batch_size", "batch_size": (64, 1024)}


def auc(run, metric):
    del metric
    poisson = run.spec.sampler.name == "poisson"
    noise = run.spec.options().get("noise_multiplier") or 0.0
    return 0.8 - 0.05 * noise + 0.01 * poisson * run.spec.init_seed


def draw(summary):
    return drawn.draw(summary.views, summary.sweep.title)


def panels(figure):
    return [axes for axes in figure.get_axes() if axes.get_xlabel()]


ERRORS = [("standard_error", "s.e.", 0.005), ("standard_deviation", "s.d.", 0.01 / 2**0.5)]


@pytest.mark.parametrize(("error", "short", "size"), ERRORS)
def test_a_curve_is_the_means_with_the_errors_asked_for(summary_of, error, short, size):
    summary = summary_of(auc, NOISE, error=error)
    (axes,) = panels(draw(summary))
    assert axes.get_ylabel() == f"test AUC (mean ± {short} of 2 runs)"
    words = error.replace("_", " ")
    assert f"Mean ± {words} over independent runs, 2 of each" in summary.markdown()
    assert f"| {0.8 - 0.0005 + 0.005:.4f} ± {size:.4f} |" in summary.markdown()  # Poisson
    curves = summary.views[0].curves
    for container, points, spread in zip(axes.containers, curves.values(), (0, size), strict=True):
        line, _, (bars,) = container.lines
        means = [point["value"] for point in points]
        np.testing.assert_array_equal(line.get_xdata(), SIGMAS)
        np.testing.assert_allclose(line.get_ydata(), means)
        ends = np.array(bars.get_segments())[:, :, 1]
        np.testing.assert_allclose(ends.T, [np.subtract(means, spread), np.add(means, spread)])


def test_runs_without_noise_stand_apart_on_the_same_scale(summary_of):
    grid = {**NOISE, "non_private": True, "l2_clip_norm": (1.0, 2.0)}
    apart, main = draw(summary_of(auc, grid)).get_axes()
    assert main.get_shared_y_axes().joined(apart, main)
    shown = [float(container[0].get_ydata()[0]) for container in apart.containers]
    assert shown == pytest.approx([0.8, 0.805])  # one a sampler, whatever the norms
    assert "no noise" in apart.get_xticklabels()[0].get_text()


def test_the_noise_axis_is_logarithmic_below_the_dotted_line(summary_of):
    (axes,) = panels(draw(summary_of(auc, NOISE)))
    (dotted,) = [line for line in axes.get_lines() if line.get_linestyle() == ":"]
    assert set(dotted.get_xdata()) == {0.5}
    place = axes.transScale.transform
    at = {x: place((x, 0.7))[0] for x in (0.005, 0.05, 0.5, 1.0, 1.5)}
    assert at[1.5] - at[1.0] == pytest.approx(at[1.0] - at[0.5])  # equal steps
    assert at[0.5] - at[0.05] == pytest.approx(at[0.05] - at[0.005])  # equal factors
    forward, inverse = composite_scale(0.5)
    x = np.geomspace(1e-3, 10, 50)
    np.testing.assert_allclose(inverse(forward(x)), x, rtol=1e-12)
    below, joint, above = forward(np.array([0.5 - 1e-6, 0.5, 0.5 + 1e-6]))
    assert (joint - below) == pytest.approx(above - joint, rel=1e-4)


TUNED = {**SIZES, "learning_rate": (0.01, 0.1), "l2_clip_norm": 1.0}
TERMS = "delta 1.01e-05, zero-out adjacency, unit: one user"
SEEDS = {"insecure_seeds": (1, 2)}
BOTH = "best learning rate and clipping norm C on the validation rows)"
LABELS = {
    "certified": (PRIVACY, {}, ["certified", TERMS], []),
    "over sizes": (SIZES, {}, [TERMS], ["certified"]),
    "exceeded": (PRIVACY, {"excess": 0.5}, ["ε by which the noise was chosen"], ["certified"]),
    "tuned": ({**TUNED, "tune": "learning_rate"}, {}, ["best learning rate on the valid"], []),
    "tuned, two": ({**TUNED, "tune": ("learning_rate", "l2_clip_norm")}, {}, [BOTH], []),
    **{f"seeds, {g['x']}": (g, SEEDS, [], ["certified", "delta"]) for g in (PRIVACY, SIZES, NOISE)},
}


@pytest.mark.parametrize(("grid", "how", "said", "unsaid"), LABELS.values(), ids=LABELS)
def test_the_axis_says_what_epsilons_hold_for(summary_of, grid, how, said, unsaid):
    figure = draw(summary_of(auc, grid, **how))
    (axes,) = panels(figure)
    label = " ".join(axes.get_xlabel().split())
    assert all(words in label for words in said)
    assert not any(words in label for words in unsaid)
    void = "\nreproducible noise: no guarantee" if how is SEEDS else ""
    assert figure.get_suptitle() == f"A title{void}"


def test_grids_of_one_title_share_a_panel_and_hatched_area(summary_of):
    def by_noise(run, metric):
        return 0.72 if run.spec.options().get("optimistic") else 0.7

    upper = {**PRIVACY, "sampler": ("deterministic", "shuffle"), "title": "bounds"}
    summary = summary_of(by_noise, upper, {**upper, "sampler": "shuffle", "optimistic": True})
    (axes,) = panels(draw(summary))
    looks = {c.get_label(): c.lines[0].get_linestyle() for c in axes.containers}
    assert looks == {"deterministic": "-", "shuffle": "-", "shuffle, optimistic": "--"}
    (area,) = [part for part in axes.collections if part.get_hatch()]
    box = area.get_paths()[0].get_extents()
    assert [box.x0, box.y0, box.x1, box.y1] == pytest.approx([1.0, 0.7, 2.0, 0.72])
    assert not any("optimistic" in verdict for verdict in summary.views[0].verdicts())


def test_sweeps_are_drawn_as_rows_and_grids_as_panels(summary_of):
    generated = {"headline": "test_auc", "better": "higher", "generated": {"test_auc": 0.75}}
    summary = summary_of(auc, NOISE, SIZES, {**SIZES, "batch_size": (8, 16)}, task=generated)
    assert [axes.get_xlabel().split("\n")[0] for axes in panels(draw(summary))] == [
        "noise multiplier σ", "batch size", "batch size",
    ]  # fmt: skip
    figure = drawn.draw_rows([(summary.title, summary.views)] * 2)
    assert len(panels(figure)) == 6
    titles = [part.get_suptitle() for part in figure.subfigs]
    assert titles == ["A title\ngenerated rows (best reachable test AUC: 0.7500)"] * 2


def test_epsilon_bars_span_the_certified_interval_of_each_run(summary_of):
    table = summary_of(auc, NOISE, repetitions=1).table.where(noise_multiplier=1.0)
    figure = drawn.draw([View(table, "epsilon_upper", Headline("test_auc"), by=("run",))])
    (axes,) = figure.axes
    bars = [line.get_xdata() for line in axes.get_lines() if line.get_alpha() == 0.4]
    assert [list(bar) for bar in bars] == [[1.0, 1.25], [1.0, 1.25]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == table.values("run")


def test_any_column_of_numbers_is_drawn_over_any_setting(summary_of):
    table = summary_of(auc, NOISE).table
    (axes,) = drawn.draw([View(table, "sampler", Headline("seconds"))]).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["shuffle", "poisson"]
    for x, y, problem in (("sigma", "test_auc", "column 'sigma'"), ("sampler", "audit", "number")):
        with pytest.raises(ValueError, match=problem):
            View(table, x, Headline(y))


class Run(FinishedRun):
    """A finished run whose mechanism and settings do not come from files."""

    mechanism = property(lambda self: self.record["mechanism"])
    spec = RunSpec.of(Poisson(1000, 100, 1), noise_multiplier=1.0)
    task = property(lambda self: {})


def made(name, sigma=5.0, unit="example", notes=()):
    mechanism = Mechanism(Deterministic(1000, 100, 1), sigma, 1.0)  # whose profile is the cheapest
    record = {"sampler": "deterministic", "mechanism": mechanism, "epsilon_upper": 1.0}
    record |= {
        "adjacency": "zero-out",
        "unit": unit,
        "delta": 1e-3,
        "guarantee": "",
        "notes": notes,
    }
    return Run(Path(name), Configuration(Path(name), {}), record, History())


RUNS = {
    "each mechanism has a curve": (
        {"a": made("a"), "b": made("b", 4.0)}, ["a (deterministic)", "b (deterministic)"],
    ),
    "runs of one mechanism share a curve": (
        {f"run{i}": made(f"run{i}") for i in range(6)},
        ["run0, run1, run2 and 3 more (deterministic)"],
    ),
    "units that differ are said": (
        {"a": made("a"), "b": made("b", unit="user")},
        ["a (deterministic, unit: one example)", "b (deterministic, unit: one user)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("runs", "labels"), RUNS.values(), ids=RUNS)
def test_every_curve_names_its_runs(runs, labels):
    [axes] = curves(runs).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == labels


def test_curves_of_warm_starts_say_whose_rows_are_covered():
    [axes] = curves({"a": made("a", notes=[WARM_START])}).axes
    assert "rows that did not train the initial model" in axes.get_title().replace("\n", " ")
    [axes] = curves({"a": made("a")}).axes
    assert "initial model" not in axes.get_title()
