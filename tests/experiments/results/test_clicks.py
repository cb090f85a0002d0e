"""What a page says of click models is what their predictions of the rows came to."""

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
from tiny_task import Line

import dpsgd
from dpsgd import RunSpec
from dpsgd.models.model import read_model
from dpsgd.runs.result import FinishedRun
from experiments.results import clicks
from experiments.results.page import page as page_of
from experiments.results.page import predictions
from experiments.results.render import document
from experiments.tasks import TASKS
from experiments.tasks.clicks.metrics import FEWEST, binary_metrics
from experiments.tasks.clicks.model import Scores
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.clicks.task import Clicks
from samplers.settings import SETTINGS

pytestmark = pytest.mark.usefixtures("unoptimised")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A store of clicks, a private model, and the same without privacy."""
    folder = tmp_path_factory.mktemp("clicks")
    synthetic.write_store(folder / "store", 3000, 0)
    task = Clicks(folder / "store", embedding_dim=2, max_buckets=16, hidden=(4,))
    for name, noise in (
        ("private", {"noise_multiplier": 1.0}),
        ("plain", {"non_private": True}),
    ):
        sampler = SETTINGS["deterministic"](batch_size=400, epochs=2)
        config = RunSpec.of(sampler, learning_rate=3e-3, audit=False, **noise)
        dpsgd.run(task, config, folder / name, name="clicks")
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def rows_of(folder, by=None):
    return clicks.Rows(folder / "store", "test", by)


def fit_of(folder, name, by=None):
    return clicks.Fit.read(name, read_model(folder / name, kinds=TASKS), rows_of(folder, by))


def numbers(line):
    return [cell.strip().replace(",", "") for cell in line.strip("| \n").split("|")]


@pytest.mark.long
def test_the_page_shows_deciles_categories_and_cost_of_privacy(folder):
    page = page_of([folder / "private"], rows=rows_of(folder, "C9"), against=folder / "plain")
    text = page.markdown
    metrics = FinishedRun.read(folder / "private").record["metrics"]
    assert f"300 rows, {metrics['test_num_positives']} of label 1" in text
    fit = text[text.index("## How well") : text.index("## What is guaranteed")]
    row = next(line for line in fit.splitlines() if line.startswith("| private | 0."))
    for name in ("auc", "log_loss", "normalised_entropy", "predicted_over_observed"):
        assert f"{metrics[f'test_{name}']:.4f}" in row
    section = text.partition("### Predicted and observed positives: private")[2]
    deciles, categories = re.findall(r"(?:^\|.*\n?)+", section, re.M)[:2]
    for table, count in ((deciles, 10), (categories, None)):
        cells = [numbers(line) for line in table.splitlines()[2:]]
        assert count in (None, len(cells))
        assert sum(int(cell[1]) for cell in cells) == 300
        assert sum(int(cell[6]) for cell in cells) == metrics["test_num_positives"]
    assert "reliability.svg" in page.figures
    assert "No guarantee covers what is said of these rows" in text
    assert "**plain has no guarantee**" in text
    assert document(page).count("<figure>") == 2  # of one run there is no figure over epsilon
    assert "click" not in fit.replace(str(folder), "").lower()  # it may be a table of anything


@pytest.mark.long
def test_the_cost_is_a_metric_difference_with_standard_error(folder):
    private, plain = fit_of(folder, "private"), fit_of(folder, "plain")
    _, [[name, auc, loss, entropy, ratio]] = clicks.cost([private], plain)
    assert name == "private"
    one, other = private.metrics, plain.metrics
    assert float(auc) == pytest.approx(one.auc - other.auc, abs=6e-5)
    y, n = private.scores.labels, private.scores.labels.size
    per_row = [
        -np.where(y == 1, np.log(fit.probabilities), np.log1p(-fit.probabilities))
        for fit in (private, plain)
    ]
    difference, error = map(float, loss.split(" ± "))
    assert difference == pytest.approx((per_row[0] - per_row[1]).mean(), abs=6e-5)
    assert error == pytest.approx((per_row[0] - per_row[1]).std() / math.sqrt(n), abs=6e-5)
    found = one.normalised_entropy - other.normalised_entropy
    assert float(entropy) == pytest.approx(found, abs=6e-5)
    found = one.predicted_over_observed - other.predicted_over_observed
    assert float(ratio) == pytest.approx(found, abs=6e-5)


@pytest.mark.long
def test_a_baseline_with_other_settings_is_reported_as_such(folder, monkeypatch):
    private, plain = (FinishedRun.read(folder / name) for name in ("private", "plain"))
    assert clicks.differences(private, plain) == []
    sampler = dataclasses.replace(plain.spec.sampler, epochs=3)
    spec = plain.spec.but(sampler=sampler, learning_rate=0.1, average_decay=0.5)
    config = dataclasses.replace(plain.config, record={**plain.config.record, **spec.record()})
    other = dataclasses.replace(plain, config=config)
    found = ["epochs (2 and 3)", "learning rate (0.003 and 0.1)", "average decay (None and 0.5)"]
    assert clicks.differences(private, other) == found
    monkeypatch.setattr(clicks, "differences", lambda run, twin: found)
    text = page_of([folder / "private"], rows=rows_of(folder), against=folder / "plain").markdown
    assert (
        "private and plain differ not only in noise and clipping, but in epochs (2 and 3); " in text
    )


def fit(logits, labels, name="a model"):
    scores = Scores(np.array(logits, np.float32), np.array(labels), np.zeros(0, np.int32))
    return clicks.Fit(name, scores, binary_metrics(scores.logits, scores.labels))


def test_the_diagram_has_a_point_per_large_bin_and_counts_all():
    logits = np.repeat([-2.0, 0.0, 2.0], [100, 50, FEWEST - 1])
    labels = np.arange(logits.size) % 2
    upper, lower = clicks.draw([fit(logits, labels)]).axes
    (_, points) = upper.get_lines()[:2]
    expected = 1 / (1 + np.exp(-np.array([-2.0, 0.0])))
    assert points.get_xdata() == pytest.approx(expected)
    assert points.get_ydata() == pytest.approx(0.5)
    (steps,) = lower.patches
    assert steps.get_data().values.sum() == logits.size
    assert upper.get_xlim()[1] > 1 / (1 + math.exp(-2.0))  # all of them are seen


def test_a_diverged_model_is_named_and_not_drawn():
    bad = fit([np.nan, 0.0], [0, 1], "bad")
    figures = {}
    text = predictions([fit([1.0, 0.0], [0, 1])], bad, clicks.Rows(Path("rows.csv")), figures)
    assert "Diverged, so that nothing more is shown: bad." in text
    assert "undefined" in text
    assert not figures
    assert "svg" not in text
    assert clicks.cost([bad], bad)[1] == [["bad", *["undefined"] * 4]]


ASKED = ["report", "private", "--out", "page.html"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*ASKED, "--against", "plain"], "--against is about labelled rows"),
        (
            [*ASKED, "--data", "store", "--by", "C99"],
            "'C99' is no categorical column; these are: C1, ",
        ),
        ([*ASKED, "--data", "store", "--against", "private"], "private was trained with noise"),
        (
            ["report", "line", "--data", "store"],
            "--data is for models of clicks, and no run has one",
        ),
        (["evaluate", "private", "store", "--by", "C99"], "'C99' is no categorical column"),
        (["evaluate", "private", "store", "--against", "private"], "was trained with noise"),
        (["evaluate", "line", "store", "--deciles"], "line is not a model of clicks"),
    ],
    ids=lambda value: " ".join(value[-4:]) if isinstance(value, list) else "",
)
def test_what_cannot_be_shown_is_one_line_and_leaves_no_page(here, words, message, command):
    if not (here / "line").exists():
        sampler = SETTINGS["deterministic"](batch_size=40, epochs=1)
        config = RunSpec.of(sampler, non_private=True, audit=False)
        dpsgd.run(Line(), config, here / "line", name="tiny_task:Line")
    assert message in command.refuses(*words)
    assert not (here / "page.html").exists()


@pytest.mark.long
def test_the_command_prints_the_same_tables_below_the_metrics(here, command):
    alone = command("evaluate", "private", "store", "--split", "test")
    words = ["--split", "test", "--deciles", "--by", "C9", "--against", "plain"]
    printed = command("evaluate", "private", "store", *words)
    assert printed.startswith(alone)
    tables = printed[len(alone) :]
    assert "against plain, which has no guarantee" in tables
    for group in fit_of(here, "private", "C9").deciles():
        assert re.search(rf"^{group.name} +{group.rows} .* {group.observed} ", tables, re.M)
    assert "positives, by C9:" in tables
    assert "click" not in tables
    assert dict(line.split(": ") for line in alone.splitlines()).keys() == {
        field.name for field in dataclasses.fields(fit_of(here, "private").metrics)
    }
