"""The figure of a sweep shows its means, its standard deviations, and where the axis changes."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.results import draw as drawn
from experiments.results.draw import composite_scale
from experiments.results.metrics import Headline
from experiments.results.views import View

SIGMAS = (0.01, 0.1, 0.5, 1.0, 5.0)
NOISE = {"x": "noise_multiplier", "sampler": ("shuffle", "poisson"), "noise_multiplier": SIGMAS}


def auc(run, metric):
    del metric
    poisson = run.spec.sampler.name == "poisson"
    noise = run.spec.options().get("noise_multiplier") or 0.0
    return 0.8 - 0.05 * noise + 0.01 * poisson * run.spec.init_seed


def draw(summary):
    return drawn.draw(summary.views, summary.sweep.title)


def panels(figure: Figure):
    return [axes for axes in figure.get_axes() if axes.get_xlabel()]


def test_a_line_is_the_means_and_its_band_one_standard_deviation_to_each_side(summary_of):
    summary = summary_of(auc, NOISE)
    (axes,) = panels(draw(summary))
    assert axes.get_ylabel() == "test AUC (mean ± s.d. of 2 runs)"
    lines = {line.get_label(): line for line in axes.get_lines()}
    for (label, results), band in zip(
        summary.views[0].lines.items(), axes.collections, strict=True
    ):
        means = [result["test_auc"].mean for result in results]
        np.testing.assert_array_equal(lines[label].get_xdata(), SIGMAS)
        np.testing.assert_allclose(lines[label].get_ydata(), means)
        edges = band.get_paths()[0].vertices
        sd = results[0]["test_auc"].sd
        first = edges[np.isclose(edges[:, 0], SIGMAS[0]), 1]
        assert (first.min(), first.max()) == pytest.approx((means[0] - sd, means[0] + sd))


def test_runs_without_noise_stand_apart_on_the_same_scale(summary_of):
    figure = draw(summary_of(auc, {**NOISE, "non_private": True}))
    apart, main = figure.get_axes()
    assert main.get_shared_y_axes().joined(apart, main)
    drawn = [float(container[0].get_ydata()[0]) for container in apart.containers]
    assert drawn == pytest.approx([0.8, 0.805])
    assert "no noise" in apart.get_xticklabels()[0].get_text()


def test_the_axis_of_noise_is_linear_above_and_logarithmic_below_the_dotted_line(summary_of):
    (axes,) = panels(draw(summary_of(auc, NOISE)))
    (dotted,) = [line for line in axes.get_lines() if line.get_linestyle() == ":"]
    assert set(dotted.get_xdata()) == {0.5}
    place = axes.transScale.transform
    at = {x: place((x, 0.7))[0] for x in (0.005, 0.05, 0.5, 1.0, 1.5)}
    assert at[1.5] - at[1.0] == pytest.approx(at[1.0] - at[0.5])  # equal steps
    assert at[0.5] - at[0.05] == pytest.approx(at[0.05] - at[0.005])  # equal factors


def test_the_composite_scale_is_smooth_and_comes_back():
    forward, inverse = composite_scale(0.5)
    x = np.geomspace(1e-3, 10, 50)
    np.testing.assert_allclose(inverse(forward(x)), x, rtol=1e-12)
    below, joint, above = forward(np.array([0.5 - 1e-6, 0.5, 0.5 + 1e-6]))
    assert (joint - below) == pytest.approx(above - joint, rel=1e-4)


PRIVACY = {"x": "target_epsilon", "sampler": "poisson", "target_epsilon": (1.0, 2.0)}
SIZES = {**PRIVACY, "x": "batch_size", "batch_size": (64, 1024)}
GENERATED = {"headline": "test_auc", "better": "higher", "generated": {"test_auc": 0.75}}


@pytest.mark.parametrize("grid", [PRIVACY, SIZES], ids=lambda grid: grid["x"])
def test_epsilons_are_drawn_with_the_delta_adjacency_and_unit_of_the_reports(summary_of, grid):
    (axes,) = panels(draw(summary_of(auc, grid)))
    assert "delta 1.01e-05, zero-out adjacency, unit: one user" in " ".join(
        axes.get_xlabel().split()
    )
    assert ("certified" in axes.get_xlabel()) == (grid is PRIVACY)


def test_an_epsilon_that_a_run_exceeds_is_not_drawn_as_certified(summary_of):
    (axes,) = panels(draw(summary_of(auc, PRIVACY, excess=0.5)))
    assert axes.get_xlabel().startswith("ε by which the noise was chosen")


@pytest.mark.parametrize(
    ("tune", "said"),
    [
        ("learning_rate", "best learning rate on the validation rows)"),
        (("learning_rate", "l2_clip_norm"), "best learning rate and clipping norm C on the valid"),
    ],
)
def test_what_is_tuned_is_named_under_the_axis(summary_of, tune, said):
    tuned = {**SIZES, "learning_rate": (0.01, 0.1), "l2_clip_norm": 1.0, "tune": tune}
    (axes,) = panels(draw(summary_of(auc, tuned)))
    assert said in " ".join(axes.get_xlabel().split())


def test_grids_of_one_title_share_a_panel_in_which_a_band_lies_between_the_ends_of_epsilon(
    summary_of,
):
    def by_noise(run, metric):
        return 0.72 if run.spec.options().get("optimistic") else 0.7

    upper = {**PRIVACY, "sampler": ("deterministic", "shuffle"), "title": "bounds"}
    lower = {**upper, "sampler": "shuffle", "optimistic": True}
    summary = summary_of(by_noise, upper, lower)
    (axes,) = panels(draw(summary))
    looks = {line.get_label(): line.get_linestyle() for line in axes.get_lines()}
    assert looks == {"deterministic": "-", "shuffle": "-", "shuffle, optimistic": "--"}
    (band,) = [part for part in axes.collections if part.get_hatch()]
    box = band.get_paths()[0].get_extents()
    assert [box.x0, box.y0, box.x1, box.y1] == pytest.approx([1.0, 0.7, 2.0, 0.72])
    (view,) = summary.views
    assert not any("optimistic" in verdict for verdict in view.verdicts())


def test_sweeps_are_drawn_as_rows_of_one_figure(summary_of):
    summary = summary_of(auc, NOISE, SIZES, task=GENERATED)
    figure = drawn.draw_rows([(summary.title, summary.views)] * 2)
    assert len(panels(figure)) == 4
    titles = [part.get_suptitle() for part in figure.subfigs]
    assert titles == ["A title\ngenerated rows, of which the best reachable test AUC is 0.7500"] * 2


@pytest.mark.parametrize("grid", [PRIVACY, SIZES, NOISE], ids=lambda grid: grid["x"])
def test_with_written_seeds_the_title_says_that_nothing_is_guaranteed(summary_of, grid):
    figure = draw(summary_of(auc, grid, insecure_seeds=(1, 2)))
    assert figure.get_suptitle() == "A title\nreproducible noise: no guarantee"
    (axes,) = panels(figure)
    assert "certified" not in axes.get_xlabel()
    assert "delta" not in axes.get_xlabel()


def test_the_norms_of_runs_with_noise_leave_one_point_without(summary_of):
    grid = {**NOISE, "non_private": True, "l2_clip_norm": (1.0, 2.0)}
    apart, main = draw(summary_of(auc, grid)).get_axes()
    assert len(apart.containers) == 2  # one a sampler
    assert len(main.get_legend().get_texts()) == 6


def test_each_grid_has_its_panel(summary_of):
    sizes = {"sampler": "poisson", "noise_multiplier": 1.0}
    figure = draw(
        summary_of(
            auc,
            {**sizes, "x": "batch_size", "batch_size": (64, 1024)},
            {**sizes, "x": "epochs", "epochs": (1, 2)},
            {**sizes, "x": "batch_size", "batch_size": (8, 16), "noise_multiplier": (),
             "non_private": True},
        )
    )  # fmt: skip
    assert figure.get_figwidth() < 12
    labels = [axes.get_xlabel() for axes in panels(figure)]
    assert labels == ["batch size", "epochs", "batch size"]


def test_over_epsilon_a_bar_spans_the_certified_interval_of_each_run(summary_of):
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
    assert len(axes.get_legend().get_texts()) == len(SIGMAS)
    for x, y, problem in (("sigma", "test_auc", "no 'sigma'"), ("sampler", "audit", "no number")):
        with pytest.raises(ValueError, match=problem):
            View(table, x, Headline(y))
