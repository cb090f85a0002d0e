"""Views of runs are what a slow computation finds, and say what their epsilons hold for."""

import dataclasses
import math
import statistics

import numpy as np
import pytest
import scipy.stats

from dpsgd.core.cost import WARM_START
from dpsgd.core.guarantee import IF_INDEPENDENT
from experiments.results import listings
from experiments.results.draw import draw
from experiments.results.points import Headline, text
from experiments.results.table import Table
from experiments.results.views import View, differ
from experiments.sweeps.summary import NOT_COVERED

NAN = float("nan")
NOISE = {
    "x": "noise_multiplier",
    "sampler": ("shuffle", "poisson"),
    "noise_multiplier": (2.0, 0.5),
    "non_private": True,
}
PRIVACY = {"x": "target_epsilon", "sampler": ("shuffle", "poisson"), "target_epsilon": (1.0, 8.0)}
TUNED = {**PRIVACY, "learning_rate": (0.01, 0.1), "tune": "learning_rate"}
TERMS = "delta 1.01e-05, zero-out adjacency, unit: one user"


def auc(run, metric):
    """Falls with the noise, is a little higher for Poisson, and spreads over repetitions."""
    del metric
    noise = run.spec.options().get("noise_multiplier") or 0.0
    poisson = run.spec.sampler.name == "poisson"
    return 0.8 - 0.1 * noise + 0.01 * poisson + 0.002 * run.spec.init_seed


def error(run, metric):
    """Is lower for Poisson and on validation rows, and higher for the faster rate."""
    poisson = run.spec.sampler.name == "poisson"
    fast = run.spec.optimizer.learning_rate == 0.1
    return 700 - 300 * poisson + 50 * fast + 0.2 * run.spec.init_seed + (metric == "test_error")


def slow_points(rows, x, metric, judge, tune, sign):
    """Points of runs of two samplers, by loops: {(sampler, x): (mean, error, ..., epsilon)}."""
    cells = {}
    for row in rows:
        place = None if x == "noise_multiplier" and row[x] == 0 else row[x]
        tuned = tuple(row[name] for name in tune)
        cells.setdefault((row["sampler"], place), {}).setdefault(tuned, []).append(row)

    def mean_of(runs, name):
        measured = [run[name] for run in runs if run[name] is not None]
        defined = [value for value in measured if value == value]
        mean = sum(defined) / len(defined) if defined else None
        sd = statistics.stdev(defined) if len(defined) > 1 else None
        error = None if sd is None else sd / math.sqrt(len(defined))
        return mean, error, len(defined), len(measured) - len(defined)

    def merit(runs):
        mean, _, _, undefined = mean_of(runs, judge)
        return -undefined, -math.inf if mean is None else sign * mean

    def interval(runs):
        """The interval of each single run's epsilon, none if one has no guarantee."""
        uppers = [run["epsilon_upper"] for run in runs]
        if None in uppers:
            return None, None
        return min(run["epsilon_lower"] for run in runs), max(uppers)

    chosen = {place: max(candidates.values(), key=merit) for place, candidates in cells.items()}
    return {place: (*mean_of(runs, metric), *interval(runs)) for place, runs in chosen.items()}


NUMBERS = ("value", "standard_error", "runs", "undefined", "epsilon_lower", "epsilon_upper")


@pytest.mark.parametrize("better", ["higher", "lower"])
@pytest.mark.parametrize("tune", [(), ("learning_rate",), ("learning_rate", "l2_clip_norm")])
@pytest.mark.parametrize("x", ["noise_multiplier", "batch_size"])
def test_points_are_those_of_a_slow_computation(summary_of, x, tune, better):
    rng = np.random.default_rng(0)
    settings = {"learning_rate": (0.01, 0.1), "l2_clip_norm": (1.0, 4.0), "batch_size": (8, 64)}
    settings = {name: settings[name] for name in (*tune, *(["batch_size"] if x != tune else []))}
    sigmas = (2.0, 0.5) if x == "noise_multiplier" else 1.0
    grid = {
        **NOISE,
        **settings,
        "noise_multiplier": sigmas,
        "x": x,
        "non_private": x != "batch_size",
    }
    rows = summary_of(auc, grid, repetitions=4).table.rows
    values = rng.choice([0.1, 0.2, 0.3, 0.4, NAN, None], (len(rows), 2), p=[0.2] * 4 + [0.1] * 2)
    for row, (test, validation) in zip(rows, values.tolist(), strict=True):
        row |= {"test_auc": test, "validation_auc": validation}
        lower, width = rng.uniform(1.0, 2.0, 2).tolist()
        known = row["noise_multiplier"] and rng.random() > 0.05
        row["epsilon_lower"] = lower if known else None
        row["epsilon_upper"] = lower + width if known else None
    table = Table.of_rows(rows, ["test_auc", "validation_auc"])
    view = View(table, x, Headline("test_auc", better), by=("sampler",), tune=tune)
    sign = 1 if better == "higher" else -1
    expected = slow_points(rows, x, "test_auc", "validation_auc", tune, sign)
    found = {(p["curve"], p["x"]): tuple(p[name] for name in NUMBERS) for p in view.points}
    assert found.keys() == expected.keys()
    for place, point in expected.items():
        assert found[place] == pytest.approx(point, abs=1e-12), place
    cells = view.tables()[view.headline.label][1]
    assert len(cells) == len({place for _, place in expected})
    assert all(text(point) in str(cells) for point in view.points)


def test_every_number_of_the_figure_is_on_the_page(summary_of):
    summary = summary_of(auc, NOISE)
    page = summary.markdown()
    assert summary.views[0].xs == [0.5, 2.0, None]
    assert all(text(point) in page for point in summary.views[0].points)
    assert all(statement in page for statement in NOT_COVERED)
    assert "[1.00, 1.25]" in page
    assert "- not covered by a guarantee: the weather\n" in page
    assert "the weather" not in summary_of(auc, NOISE, insecure_seeds=(1, 2)).markdown()


def test_tuned_axes_are_named_with_the_rows_that_chose_them(summary_of):
    axes = {"learning_rate": (0.01, 0.1), "l2_clip_norm": (1.0, 4.0)}
    summary = summary_of(auc, {**NOISE, **axes, "tune": (*axes,)})
    assert len({*summary.cells.values()}) == 2 * (2 * 4 + 2)  # what was not chosen is not hidden
    said = "the learning rate and the l2 clip norm shown are"
    assert any(said in statement for statement in summary.statements)
    _, rows = summary.views[0].tables()["learning rate, C, best on the validation rows"]
    assert {cell for row in rows for cell in row[1:]} == {"0.01, 1", "0.01, none"}
    summary = summary_of(error, TUNED, metrics=("test_error",), task=LINE)
    too_good = "the best on the test rows themselves, so the metrics shown are too good"
    assert any(too_good in line for line in summary.statements)


def test_runs_without_clipping_are_apart_from_clipping_norms(summary_of):
    norms = {**NOISE, "noise_multiplier": 1.0, "l2_clip_norm": (1.0, 2.0)}
    (panel,) = summary_of(auc, {**norms, "x": "l2_clip_norm"}).views
    assert panel.xs == [1.0, 2.0, None]
    (panel,) = summary_of(auc, {**norms, "tune": "l2_clip_norm"}).views
    _, rows = panel.tables()["C, best on the validation rows"]
    assert rows[-1] == ["no privacy", "none", "none"]


@pytest.mark.parametrize(("gap", "told_apart"), [(0.1, True), (1e-4, False)])
def test_the_verdict_names_the_best_sampler_and_its_ties(summary_of, gap, told_apart):
    def scored(run, metric):
        return 0.7 + gap * (run.spec.sampler.name == "poisson") + 0.002 * run.spec.init_seed

    panel = summary_of(scored, PRIVACY).views[0]
    first, second = panel.verdicts()
    assert first.startswith("at epsilon 1: poisson")
    assert second.startswith("at epsilon 8: poisson")
    assert ("shuffle" in first) is not told_apart
    header, rows = panel.tables()["noise multiplier σ"]
    assert (header, rows[0]) == (["ε", "shuffle", "poisson"], ["1", "2", "2"])
    assert summary_of(scored, PRIVACY, repetitions=1).views[0].verdicts() == []


def point_of(values):
    mean, n = statistics.fmean(values), len(values)
    error = statistics.stdev(values) / math.sqrt(n) if n > 1 else None
    return {"value": mean, "standard_error": error, "runs": n}


@pytest.mark.long
def test_means_are_distinguished_by_welchs_test():
    rng, wrong = np.random.default_rng(0), 0
    for first, second in (0.7 + 0.002 * rng.normal(size=(2000, 2, 3))).tolist():
        expected = scipy.stats.ttest_ind(first, second, equal_var=False).pvalue < 0.05
        assert differ(point_of(first), point_of(second)) == expected
        wrong += expected
    assert 40 < wrong < 150  # the test errs a little less often than it may
    assert not differ(point_of([0.5]), point_of([0.6, 0.6]))
    assert differ(point_of([0.5, 0.5]), point_of([0.6, 0.6]))
    assert not differ(point_of([0.5, 0.5]), point_of([0.5, 0.5]))


@pytest.mark.parametrize("other", [{"average_tail": 0.5}, {"data": 1}, {"init_from": "a"}])
def test_runs_with_and_without_an_option_have_two_means(summary_of, other):
    table = summary_of(auc, {**NOISE, "sampler": "shuffle", "noise_multiplier": 1.0}).table
    changed = [row | other | {"run": f"{row['run']}, too"} for row in table.rows]
    table = Table.of_rows([*table.rows, *changed], table.metrics)
    counts = [point["runs"] for point in View(table, "epochs", Headline("test_auc")).points]
    assert counts == [2] * 4  # with noise and without, each with the option and without


@pytest.mark.parametrize("tune", [(), ("optimizer",)])
def test_settings_of_a_part_do_not_split_the_curve_over_parts(summary_of, tune):
    table = summary_of(auc, {**NOISE, "sampler": "shuffle", "noise_multiplier": 1.0}).table
    parts = {"optimizer": "adam", "momentum": None}, {"optimizer": "sgd", "momentum": 0.0}
    rows = [row | part for row in table.rows for part in parts]
    table = Table.of_rows(rows, table.metrics)
    view = View(table, "epochs" if tune else "optimizer", Headline("test_auc", "higher"), tune=tune)
    assert len(view.curves) == 2  # with noise and without


def test_optimistic_noise_gets_no_verdict(summary_of):
    both = {**PRIVACY, "target_epsilon": 1.0}, {**PRIVACY, "optimistic": True, "title": "t"}
    (verdict,) = summary_of(auc, *({"title": "t", **grid} for grid in both)).views[0].verdicts()
    assert verdict.startswith("at epsilon 1: ")


def test_a_run_above_its_target_is_named_at_its_epsilon(summary_of):
    summary = summary_of(auc, PRIVACY, excess=0.5)
    (panel,) = summary.views
    assert all("(exceeded by a run, see the table)" in line for line in panel.verdicts())
    page = summary.markdown()
    for cell in summary.cells.values():
        assert f"a run of {cell} costs more than the target by which" in page
    assert "costs more" not in summary_of(auc, PRIVACY).markdown()


def test_private_runs_without_a_setting_are_not_without_privacy(summary_of):
    table = summary_of(auc, {**NOISE, "noise_multiplier": 2.0}).table
    view = View(table, "target_epsilon", Headline("test_auc"))
    assert [row[0] for row in view.tables()["test AUC"][1]] == ["not set"]
    assert draw([view]).axes[0].get_xticklabels()[0].get_text() == "not set"
    assert sorted(view.curves) == ["poisson", "poisson, σ 2", "shuffle", "shuffle, σ 2"]
    plain = summary_of(auc, NOISE).views[0]
    assert [row[0] for row in plain.tables()["test AUC"][1]] == ["0.5", "2", "no privacy"]


def test_titles_are_shown_as_they_are_on_one_line(summary_of):
    title = "a <b>\n# c"
    summary = summary_of(auc, {**NOISE, "title": title})
    summary = dataclasses.replace(summary, sweep=dataclasses.replace(summary.sweep, title=title))
    lines = summary.markdown().splitlines()
    assert lines[0] == "# a \\<b> # c"
    assert "## a \\<b> # c" in lines


@pytest.mark.parametrize("grid", [NOISE, PRIVACY], ids=lambda grid: grid["x"])
@pytest.mark.parametrize("intervals", [True, False])
def test_epsilons_have_their_delta_adjacency_and_unit(summary_of, grid, intervals):
    summary = summary_of(auc, grid)
    (title,) = [t for t in summary.views[0].tables(intervals=intervals) if "epsilon" in t]
    assert title.endswith(f"of a single run ({TERMS})")
    assert TERMS in summary.markdown()


def test_recorded_seeds_show_no_epsilon(summary_of):
    summary = summary_of(auc, PRIVACY, insecure_seeds=(1, 2))
    (panel,) = summary.views
    assert not any("epsilon" in title for title in panel.tables())
    verdicts = panel.verdicts()
    assert verdicts
    assert all("(reproducible noise: no guarantee): poisson" in verdict for verdict in verdicts)
    page = summary.markdown()
    assert "delta" not in page
    assert page.splitlines()[2] == "**reproducible noise: no guarantee**"


CURVES = {
    "privacy": ({"x": "batch_size", "sampler": "poisson", "batch_size": (64, 256),
                 "target_epsilon": (1.0, 3.0), "non_private": True}, {},
                ["ε 1", "ε 3", "no clipping, no noise"]),
    "sampler": (PRIVACY, {}, ["shuffle", "poisson"]),
    "settings": ({**PRIVACY, "sampler": ({"name": "shuffle", "order": "fixed"}, "shuffle")}, {},
                 ["shuffle order-fixed", "shuffle"]),
    "unit": (PRIVACY, {"unit": lambda run: "user" if run.spec.sampler.name == "poisson" else "row"},
             ["shuffle (unit: one row)", "poisson (unit: one user)"]),
}  # fmt: skip


@pytest.mark.parametrize(("grid", "how", "labels"), CURVES.values(), ids=CURVES)
def test_curves_are_named_by_what_distinguishes_them(summary_of, grid, how, labels):
    summary = summary_of(auc, grid, **how)
    assert list(summary.views[0].curves) == labels
    assert all(p["curve"] in labels for p in summary.views[0].points)
    shown = [label.get_text() for label in draw(summary.views).axes[0].get_legend().get_texts()]
    assert shown == labels


def test_diverged_runs_are_named_and_not_among_the_best(summary_of):
    def scored(run, metric):
        noise, repetition = run.spec.options().get("noise_multiplier"), run.spec.init_seed
        lost = (noise, repetition) in ((2.0, 0), (0.5, 0), (0.5, 1))
        return NAN if lost else auc(run, metric)

    summary = summary_of(scored, NOISE)
    page = summary.markdown()
    assert "| 0.5 | undefined | undefined |" in page
    assert "0.6120 (1 of 2 diverged)" in page
    (line,) = [line for line in summary.statements if "diverged" in line]
    assert line.count("-r0") == 4
    assert line.endswith("diverged: means leave them out")
    assert all(np.isfinite(axes.get_ylim()).all() for axes in draw(summary.views).axes)

    def poisson_lost(run, metric):
        return NAN if run.spec.sampler.name == "poisson" else auc(run, metric)

    (panel,) = summary_of(poisson_lost, {**PRIVACY, "target_epsilon": (1.0,)}).views
    (verdict,) = panel.verdicts()
    assert "shuffle (" in verdict
    assert "poisson" not in verdict


LINE = {"headline": "test_error", "better": "lower"}


def test_lower_values_of_a_metric_can_be_better(summary_of):
    metrics = ("validation_error", "test_error")
    (panel,) = summary_of(error, TUNED, metrics=metrics, task=LINE).views
    assert {point["tuned"]["learning_rate"] for point in panel.points} == {0.01}
    assert all(": poisson (401.1 ± 0.1)" in line for line in panel.verdicts())
    axes = draw(summary_of(error, PRIVACY, task=LINE, metrics=metrics).views).axes[0]
    assert axes.get_ylabel() == "test error (mean ± s.e. of 2 runs)"


def test_another_metric_of_the_task_can_be_put_first(summary_of):
    def scored(run, metric):
        return error(run, metric) if metric == "test_error" else 1 - error(run, metric)

    named = {"metrics": ("test_error", "test_gain"), "task": LINE, "headline": "test_gain"}
    asked = summary_of(scored, PRIVACY, **named, better="higher")
    assert asked.showing("test_error", None).headline == Headline("test_error", "lower")
    assert asked.showing(None, "lower").headline == Headline("test_gain", "lower")
    (panel,) = asked.views
    assert "test gain" in panel.tables()
    assert all(": poisson (" in line for line in panel.verdicts())
    # Which of its values are better is not what the task said of its own metric.
    (panel,) = summary_of(scored, PRIVACY, **named).views
    assert panel.verdicts() == []
    with pytest.raises(ValueError, match=r'headline = "test_gain", and better = '):
        _ = summary_of(scored, TUNED, **named).views
    with pytest.raises(ValueError, match="unknown metric 'gain'; choose of test_error, test_gain"):
        _ = summary_of(scored, PRIVACY, **{**named, "headline": "gain"}).views
    with pytest.raises(ValueError, match="not_covered holds lists; choose another x"):
        View(panel.table, "not_covered", panel.headline)
    summary = summary_of(error, PRIVACY, metrics=("test_error",), task={})
    assert (summary.headline.name, summary.headline.better) == ("test_error", None)


def test_runs_from_an_earlier_model_say_whose_rows_are_covered(summary_of):
    clicks = {"headline": "test_auc", "better": "higher"}
    assert WARM_START not in summary_of(auc, NOISE, task=clicks).statements
    warm = summary_of(auc, NOISE, task={**clicks, "notes": [WARM_START]})
    assert WARM_START in warm.statements
    (title,) = (title for title in warm.views[0].tables() if "epsilon" in title)
    for terms in (listings.caption(warm.table), title):
        assert terms.endswith("unit: one user, for rows that did not train the initial model)")


def test_epsilon_of_interrupted_runs_is_shown_with_its_condition(summary_of):
    guarantee = f"epsilon <= 1.00 {IF_INDEPENDENT}; otherwise <= 1.20, for at most 2 attempts"
    summary = summary_of(auc, NOISE, task={"headline": "test_auc", "guarantee": guarantee})
    (title,) = (title for title in summary.views[0].tables() if "epsilon" in title)
    for terms in (listings.caption(summary.table), title):
        assert terms.endswith(f"unit: one user, {IF_INDEPENDENT})")


@pytest.mark.parametrize("epsilon", [1.00004, 1.2345678, 0.123449, 10.0])
def test_no_bound_is_shown_tighter_than_it_is(summary_of, epsilon):
    table = summary_of(auc, {**PRIVACY, "target_epsilon": (epsilon, 20.0)}).views[0].table
    view = View(table, "epsilon_upper", Headline("test_auc"))
    (_, rows), (axes, *_) = view.tables()["test AUC"], draw([view]).get_axes()
    shown = [float(rows[0][0]), float(axes.get_xticklabels()[0].get_text())]
    for name, sign in (("epsilon_upper", 1), ("epsilon_lower", -1)):
        row = next(row for row in table.rows if row["epsilon_upper"] == epsilon)
        found = [float(listings.cell(name)(row)), *(shown if sign == 1 else [])]
        assert all(0 <= sign * (one - row[name]) < 1e-2 * row[name] for one in found)
    several = View(table, "sampler", Headline("epsilon_upper"), by=("target_epsilon",))
    assert float(several.tables()["epsilon upper"][1][0][1]) >= epsilon
