"""What a sweep shows is what its runs reported, and it says what it does not cover."""

import dataclasses
import statistics

import numpy as np
import pytest

from dpsgd.core.cost import WARM_START
from experiments.results import listings
from experiments.results.draw import draw
from experiments.results.metrics import Headline
from experiments.results.views import Estimate, View
from experiments.sweeps.summary import NOT_COVERED

NAN = float("nan")
NOISE = {
    "x": "noise_multiplier",
    "sampler": ("shuffle", "poisson"),
    "noise_multiplier": (2.0, 0.5),
    "non_private": True,
}


def auc(run, metric):
    """Falls with the noise, is a little higher for Poisson, and spreads over repetitions."""
    del metric
    noise = run.spec.options().get("noise_multiplier") or 0.0
    poisson = run.spec.sampler.name == "poisson"
    return 0.8 - 0.1 * noise + 0.01 * poisson + 0.002 * run.spec.init_seed


def at(view, line, x):
    return next(point for point in view.points if (point.line, point.x) == (line, x))


def test_means_and_standard_deviations_are_those_of_the_repetitions(summary_of):
    summary = summary_of(auc, NOISE, repetitions=3)
    (panel,) = summary.views
    assert panel.xs == [0.5, 2.0, None]
    assert list(panel.lines) == ["shuffle", "poisson"]
    result = at(panel, "poisson", 2.0)
    values = [0.61, 0.612, 0.614]
    assert result["test_auc"].mean == pytest.approx(statistics.fmean(values))
    assert result["test_auc"].sd == pytest.approx(statistics.stdev(values))
    assert len(result.rows) == 3


def test_every_number_of_the_figure_stands_in_the_table(summary_of):
    summary = summary_of(auc, NOISE)
    page = summary.markdown()
    for point in summary.views[0].points:
        assert str(point["test_auc"]) in page
    assert all(statement in page for statement in NOT_COVERED)
    assert "[1.00, 1.25]" in page


def test_tuned_axes_are_chosen_together_by_validation_rows_and_said_to_be(summary_of):
    def better_on_the_test_rows(run, metric):
        other = run.spec.optimizer.learning_rate == 0.1 or run.spec.l2_clip_norm == 4.0
        return 0.7 + 0.1 * (other == (metric == "test_auc"))

    axes = {"learning_rate": (0.01, 0.1), "l2_clip_norm": (1.0, 4.0)}
    grid = {**NOISE, **axes, "tune": (*axes,)}
    summary = summary_of(better_on_the_test_rows, grid)
    shown = [result for line in summary.views[0].lines.values() for result in line]
    assert len(shown) == 2 * 3
    assert {tuple(point.rows[0][name] for name in axes) for point in shown if point.private} == {
        (0.01, 1.0)
    }
    assert len({*summary.cells.values()}) == 2 * (2 * 4 + 2)  # what was not chosen is not hidden
    said = "the learning rate and the l2 clip norm shown are"
    assert any(said in statement for statement in summary.statements)
    _, rows = summary.views[0].tables()["learning rate, C, best on the validation rows"]
    assert {cell for row in rows for cell in row[1:]} == {"0.01, 1", "0.01, none"}


def test_runs_without_clipping_have_no_place_among_the_clipping_norms(summary_of):
    norms = {**NOISE, "noise_multiplier": 1.0, "l2_clip_norm": (1.0, 2.0)}
    (panel,) = summary_of(auc, {**norms, "x": "l2_clip_norm"}).views
    assert panel.xs == [1.0, 2.0, None]
    (panel,) = summary_of(auc, {**norms, "tune": "l2_clip_norm"}).views
    _, rows = panel.tables()["C, best on the validation rows"]
    assert rows[-1] == ["no privacy", "none", "none"]


PRIVACY = {"x": "target_epsilon", "sampler": ("shuffle", "poisson"), "target_epsilon": (1.0, 8.0)}


@pytest.mark.parametrize(("gap", "told_apart"), [(0.1, True), (1e-4, False)])
def test_the_verdict_names_the_best_sampler_and_those_that_cannot_be_told_from_it(
    summary_of, gap, told_apart
):
    def scored(run, metric):
        return 0.7 + gap * (run.spec.sampler.name == "poisson") + 0.002 * run.spec.init_seed

    panel = summary_of(scored, PRIVACY).views[0]
    first, second = panel.verdicts()
    assert first.startswith("at epsilon 1: poisson")
    assert second.startswith("at epsilon 8: poisson")
    assert ("shuffle" in first) is not told_apart
    header, rows = panel.tables()["noise multiplier σ"]
    assert (header, rows[0]) == (["ε", "shuffle", "poisson"], ["1", "2", "2"])


def test_a_run_that_costs_more_than_it_was_to_cost_is_said_to_and_nothing_is_told_at_its_epsilon(
    summary_of,
):
    summary = summary_of(auc, PRIVACY, excess=0.5)
    (panel,) = summary.views
    assert all("(which a run exceeds: see the table)" in line for line in panel.verdicts())
    page = summary.markdown()
    for cell in summary.cells.values():
        assert f"a run of {cell} costs more than the target by which" in page
    assert "costs more" not in summary_of(auc, PRIVACY).markdown()


def test_titles_are_shown_as_they_are_on_one_line(summary_of):
    title = "a <b>\n# c"
    summary = summary_of(auc, {**NOISE, "title": title})
    summary = dataclasses.replace(summary, sweep=dataclasses.replace(summary.sweep, title=title))
    lines = summary.markdown().splitlines()
    assert lines[0] == "# a \\<b> # c"
    assert "## a \\<b> # c" in lines


def test_where_an_epsilon_stands_it_is_said_what_the_guarantees_of_the_runs_leave_out(summary_of):
    assert "- the weather\n" in summary_of(auc, NOISE).markdown()
    assert "the weather" not in summary_of(auc, NOISE, insecure_seeds=(1, 2)).markdown()


TERMS = "delta 1.01e-05, zero-out adjacency, unit: one user"


@pytest.mark.parametrize("grid", [NOISE, PRIVACY], ids=lambda grid: grid["x"])
@pytest.mark.parametrize("intervals", [True, False])
def test_epsilons_are_shown_with_the_delta_adjacency_and_unit_of_the_reports(
    summary_of, grid, intervals
):
    summary = summary_of(auc, grid)
    shown = summary.views[0].tables(intervals=intervals)
    (title,) = [title for title in shown if "epsilon" in title]
    assert title.endswith(f"of a single run ({TERMS})")
    assert TERMS in summary.markdown()


def test_with_written_seeds_no_epsilon_is_shown_as_one_that_holds(summary_of):
    summary = summary_of(auc, PRIVACY, insecure_seeds=(1, 2))
    (panel,) = summary.views
    assert not any("epsilon" in title for title in panel.tables())
    verdicts = panel.verdicts()
    assert verdicts
    assert all("(reproducible noise: no guarantee): poisson" in verdict for verdict in verdicts)
    page = summary.markdown()
    assert "delta" not in page
    assert page.splitlines()[2] == "**reproducible noise: no guarantee**"


def test_lines_are_named_by_what_tells_them_apart(summary_of):
    grid = {
        "x": "batch_size",
        "sampler": "poisson",
        "batch_size": (64, 256),
        "target_epsilon": (1.0, 3.0),
        "non_private": True,
    }
    lines = summary_of(auc, grid).views[0].lines
    assert list(lines) == ["ε 1", "ε 3", "no clipping, no noise"]
    assert all([point.x for point in line] == [64, 256] for line in lines.values())


def diverged_at(*places):
    """`auc`, but undefined for the runs at these (noise multiplier, repetition)."""

    def made_up(run, metric):
        place = run.spec.options().get("noise_multiplier"), run.out.name[-1]
        return NAN if place in places else auc(run, metric)

    return made_up


def test_means_leave_out_the_runs_that_diverged_and_say_so(summary_of):
    summary = summary_of(diverged_at((2.0, "0"), (0.5, "0"), (0.5, "1")), NOISE)
    (panel,) = summary.views
    lost = at(panel, "poisson", 2.0)["test_auc"]
    assert (lost.mean, lost.sd, lost.count, lost.undefined) == (pytest.approx(0.612), None, 1, 1)
    assert str(lost) == "0.6120 (1 of 2 diverged)"
    none = at(panel, "poisson", 0.5)["test_auc"]
    assert (none.mean, none.count, str(none)) == (None, 0, "undefined")
    page = summary.markdown()
    assert "| 0.5 | undefined | undefined |" in page
    assert "0.6120 (1 of 2 diverged)" in page
    (line,) = [line for line in summary.statements if "diverged" in line]
    assert line.count("-r0") == 4
    assert line.endswith("diverged: means are of the others")
    assert all(np.isfinite(axes.get_ylim()).all() for axes in draw(summary.views).axes)


def test_a_setting_that_diverged_is_chosen_only_where_each_did(summary_of):
    def lucky(run, metric):
        if run.spec.optimizer.learning_rate == 0.1:
            return NAN if run.out.name.endswith("r0") else 0.9
        return 0.7

    def unlucky(run, metric):
        return lucky(run, metric) if run.spec.optimizer.learning_rate == 0.1 else NAN

    grid = {**NOISE, "learning_rate": (0.01, 0.1), "tune": "learning_rate"}
    for scores, chosen in ((lucky, 0.01), (unlucky, 0.1)):
        panel = summary_of(scores, grid).views[0]
        assert {point.rows[0]["learning_rate"] for point in panel.points} == {chosen}


def test_what_diverged_is_not_among_the_best(summary_of):
    def scored(run, metric):
        return NAN if run.spec.sampler.name == "poisson" else auc(run, metric)

    grid = {"x": "target_epsilon", "sampler": ("shuffle", "poisson"), "target_epsilon": (1.0,)}
    (panel,) = summary_of(scored, grid).views
    (verdict,) = panel.verdicts()
    assert "shuffle (" in verdict
    assert "poisson" not in verdict


@pytest.mark.parametrize(("repetitions", "tested"), [(1, False), (2, True)])
def test_single_runs_are_not_tested_against_each_other(summary_of, repetitions, tested):
    def alike(run, metric):
        return 0.7 + 0.001 * run.spec.init_seed

    summary = summary_of(alike, PRIVACY, repetitions=repetitions)
    verdicts = summary.views[0].verdicts()
    assert bool(verdicts) == tested
    assert all("Welch" in verdict for verdict in verdicts)
    assert ("standard deviation" in summary.markdown()) == tested


LINE = {"headline": "test_error", "better": "lower"}
TUNED = {**PRIVACY, "learning_rate": (0.01, 0.1), "tune": "learning_rate"}


def error(run, metric):
    """Is lower for Poisson and on the rows that are tested, and higher for the faster rate."""
    poisson = run.spec.sampler.name == "poisson"
    fast = run.spec.optimizer.learning_rate == 0.1
    return 700 - 300 * poisson + 50 * fast + 0.2 * run.spec.init_seed + (metric == "test_error")


def test_of_a_metric_whose_lower_values_are_better_the_lowest_is_best(summary_of):
    metrics = ("validation_error", "test_error")
    (panel,) = summary_of(error, TUNED, metrics=metrics, task=LINE).views
    assert {point.rows[0]["learning_rate"] for point in panel.points} == {0.01}
    assert all(": poisson (401.1 ± 0.1414)" in line for line in panel.verdicts())
    assert "test error" in panel.tables()
    assert draw(summary_of(error, PRIVACY, task=LINE, metrics=metrics).views).axes[
        0
    ].get_ylabel() == ("test error (mean ± s.d. of 2 runs)")


def test_what_is_tuned_by_the_rows_that_it_is_shown_on_is_said_to_be_too_good(summary_of):
    summary = summary_of(error, TUNED, metrics=("test_error",), task=LINE)
    assert any(
        "the best on the test rows themselves, so that what is shown is too good" in line
        for line in summary.statements
    )
    assert "earning rate, best on the test rows" in summary.markdown()


def test_whose_rows_are_covered_is_said_of_runs_from_an_earlier_model(summary_of):
    clicks = {"headline": "test_auc", "better": "higher"}
    assert WARM_START not in summary_of(auc, NOISE, task=clicks).statements
    assert WARM_START in summary_of(auc, NOISE, task={**clicks, "notes": [WARM_START]}).statements


def test_another_metric_of_the_task_can_be_put_first(summary_of):
    metrics = ("test_error", "test_gain")

    def scored(run, metric):
        return error(run, metric) if metric == "test_error" else 1 - error(run, metric)

    named = {"metrics": metrics, "task": LINE, "headline": "test_gain"}
    (panel,) = summary_of(scored, PRIVACY, **named, better="higher").views
    assert "test gain" in panel.tables()
    assert all(": poisson (" in line for line in panel.verdicts())
    # Which of its values are better is not what the task said of its own metric.
    (panel,) = summary_of(scored, PRIVACY, **named).views
    assert panel.verdicts() == []
    with pytest.raises(ValueError, match=r'headline = "test_gain", and better = '):
        _ = summary_of(scored, TUNED, **named).views
    with pytest.raises(ValueError, match="unknown metric 'gain'; choose of test_error, test_gain"):
        _ = summary_of(scored, PRIVACY, **{**named, "headline": "gain"}).views


def test_a_task_that_names_no_metric_shows_its_first_one(summary_of):
    task = {}
    summary = summary_of(error, PRIVACY, metrics=("test_error",), task=task)
    assert (summary.headline.name, summary.headline.better) == ("test_error", None)


def test_where_what_is_protected_differs_each_line_says_it(summary_of):
    def unit(run):
        return "user" if run.spec.sampler.name == "poisson" else "example"

    summary = summary_of(auc, PRIVACY, unit=unit)
    labels = ["shuffle (unit: one example)", "poisson (unit: one user)"]
    assert list(summary.views[0].lines) == labels
    assert all("poisson (unit: one user) (0." in v for v in summary.views[0].verdicts())
    shown = [text.get_text() for text in draw(summary.views).axes[0].get_legend().get_texts()]
    assert shown == labels
    assert list(summary_of(auc, PRIVACY).views[0].lines) == ["shuffle", "poisson"]


def test_one_run_shows_no_spread_and_is_told_from_none():
    assert str(Estimate.compute([0.5])) == "0.5000"
    assert not Estimate.compute([0.5]).differs(Estimate.compute([0.6]))
    assert not Estimate.compute([0.5]).differs(Estimate.compute([0.6, 0.6]))


def test_runs_that_are_all_alike_are_told_apart_by_any_difference():
    assert Estimate.compute([0.5, 0.5]).differs(Estimate.compute([0.6, 0.6]))
    assert not Estimate.compute([0.5, 0.5]).differs(Estimate.compute([0.5, 0.5]))


def test_equal_means_of_three_runs_are_told_apart_one_time_in_twenty_at_most():
    rng = np.random.default_rng(0)
    pairs = 0.7 + 0.002 * rng.normal(size=(2000, 2, 3))
    wrong = sum(Estimate.compute(list(a)).differs(Estimate.compute(list(b))) for a, b in pairs)
    # Welch's test errs a little less often than it may; 150 are 5 standard deviations too many.
    assert 40 < wrong < 150


@pytest.mark.parametrize("epsilon", [1.00004, 1.2345678, 0.123449, 10.0])
def test_no_bound_is_shown_tighter_than_it_is(summary_of, epsilon):
    table = summary_of(auc, {**PRIVACY, "target_epsilon": (epsilon, 20.0)}).views[0].table
    view = View(table, "epsilon_upper", Headline("test_auc"))
    (_, rows), (axes, *_) = view.tables()["test AUC"], draw([view]).get_axes()
    shown = [float(rows[0][0]), float(axes.get_xticklabels()[0].get_text())]
    for name, sign in (("epsilon_upper", 1), ("epsilon_lower", -1)):
        column = next(row for row in table.rows if row["epsilon_upper"] == epsilon)
        found = [float(listings.measured(column, name))]
        found += shown if sign == 1 else []
        assert all(0 <= sign * (one - column[name]) < 1e-2 * column[name] for one in found)
    several = View(table, "sampler", Headline("epsilon_upper"), by=("target_epsilon",))
    assert float(several.tables()["epsilon upper"][1][0][1]) >= epsilon
