"""The page about finished runs: self-contained, complete, and nothing private in it."""

import dataclasses
import html
import json
import re
import shlex
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dpsgd.runs.directory import DATA, DIAGNOSTICS
from experiments import cli
from experiments.cli.command_line import train_command
from experiments.cli.config import BallsAndBins, Deterministic, Poisson, Shuffle, TrainConfig
from experiments.reports.html import document
from experiments.reports.overview import MEANING, Page, overview
from experiments.reports.run import plain
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.train import resume

CONFIGS = [
    TrainConfig(Path("store"), Deterministic(), Path("run"), non_private=True),
    TrainConfig(Path("a store"), Shuffle(order="fixed"), Path("run"), target_epsilon=0.1),
    TrainConfig(
        Path("store"),
        Poisson(batch_size=64, max_batch_size=90, overflow="accumulate"),
        Path("run"),
        noise_multiplier=0.7,
        hidden=(32, 16),
        microbatch_size=32,
    ),
    TrainConfig(
        Path("store"), BallsAndBins(epochs=1), Path("run"), target_epsilon=3.0, init_seed=5
    ),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.sampler.name)
def test_the_printed_command_is_the_configuration(config):
    words = shlex.split(train_command(config))
    assert words[0] == "dpsgd"
    _, read = cli.parse(words[1:])
    assert vars(read) == vars(config)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overview")
    synthetic.write_store(folder / "store", 2000, 0)
    common = ["--batch-size", "100", "--epochs", "1"]
    for name, words in {
        "private": ["sampler:balls-and-bins", "--noise-multiplier", "1.0"],
        "shuffled": ["sampler:shuffle", "--noise-multiplier", "1.0", "--no-audit"],
        "plain": ["sampler:deterministic", "--non-private"],
    }.items():
        command = ["train", str(folder / "store"), words[0], *common, *words[1:]]
        assert cli.main([*command, "--out", str(folder / name)]) == 0
    return [folder / name for name in ("private", "shuffled", "plain")]


class Links(HTMLParser):
    """Everything a page would fetch."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_but_itself(runs):
    links = Links(document(overview(runs)))
    assert not links.open
    assert len(links.found) == 2
    assert all(link.startswith("data:image/svg+xml;base64,") for link in links.found)


def test_every_run_has_its_guarantee_interval_and_command_on_the_page(runs):
    text = overview(runs).markdown
    assert text.count("zero-out adjacency, unit: one example") == 2
    assert "NO GUARANTEE: no noise was added" in text
    assert MEANING in text
    assert MEANING not in overview(runs[2:]).markdown  # there is none to explain
    for run in runs:
        assert re.search(rf"^dpsgd train .* --out {run.name}\b", text, re.MULTILINE)
    for said in ("What is not covered", "hyper-parameters", "examples/s", "jax 0."):
        assert said in text


def test_the_page_never_reads_the_diagnostics(runs):
    before = overview(runs)
    kept = {run: (run / DIAGNOSTICS).read_bytes() for run in runs}
    for run in runs:
        (run / DIAGNOSTICS).unlink()
    try:
        assert overview(runs) == before
    finally:
        for run, content in kept.items():
            (run / DIAGNOSTICS).write_bytes(content)


def test_the_command_writes_the_page_its_markdown_and_its_figures(runs, tmp_path):
    out = tmp_path / "page.html"
    assert cli.main(["report", *map(str, runs), "--out", str(out), "--title", "A & B"]) == 0
    assert "<title>A &amp; B</title>" in out.read_text()
    assert {path.name for path in (tmp_path / "page").iterdir()} == {
        "report.md",
        "quality.svg",
        "curves.svg",
    }


def test_text_from_runs_cannot_become_markup():
    page = Page("t", "# t\n\n<script>alert(1)</script> [x](javascript:alert(1))\n")
    assert "<script>" not in document(page)
    assert "href" not in document(page)


@pytest.mark.parametrize("name", ["![x](y.png)", "a|b", "<b>", "[x](javascript:y)", "*_`"])
def test_the_name_of_a_run_is_shown_as_it_is(runs, tmp_path, name):
    renamed = tmp_path / name
    renamed.symlink_to(runs[0])
    page = overview([renamed])
    shown = html.unescape(document(page))
    assert f"<td>{name}</td>" in shown
    assert f"<h3>{name}</h3>" in shown


def test_a_guarantee_is_what_the_ledger_gives_and_not_what_the_report_says(runs, tmp_path):
    whole = overview([runs[0]]).markdown
    boasting = shutil.copytree(runs[0], tmp_path / runs[0].name)
    record = json.loads((boasting / "report.json").read_text())
    record |= {"guarantee": "epsilon in [0, 0.01]", "epsilon_lower": 0.0, "epsilon_upper": 0.01}
    record |= {"sampler": "poisson", "num_steps": 1, "num_examples": 1}
    record |= {"delta": 1e-9, "noise_multiplier": 99.0, "l2_clip_norm": None, "not_covered": []}
    (boasting / "report.json").write_text(json.dumps(record))
    assert overview([boasting]).markdown == whole
    assert resume(boasting)["guarantee"] in whole


@pytest.mark.parametrize("command", ["report", "resume"])
@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("test_auc", None, "test_auc is undefined, and others are not"),
        ("test_auc", "0.5", "str is not an instance of float"),
        ("test_auc", 1e308, "must lie in [0, 1], got 1e+308"),
        ("validation_auc", -0.5, "must lie in [0, 1], got -0.5"),
        ("num_params", 10**400, "must lie in"),
        ("training_seconds", -1, "must lie in"),
        ("audit", ..., "is missing"),
    ],
)
def test_a_figure_that_cannot_be_is_refused_by_its_name(
    runs, tmp_path, capsys, command, field, value, problem
):
    damaged = tmp_path / "damaged"
    shutil.copytree(runs[0], damaged)
    record = json.loads((damaged / "report.json").read_text())
    record[field] = value
    kept = {name: value for name, value in record.items() if value is not ...}
    (damaged / "report.json").write_text(json.dumps(kept))
    more = ["--out", str(tmp_path / "page.html")] if command == "report" else []
    assert cli.main([command, str(damaged), *more]) == 2
    said = capsys.readouterr().err
    assert "report.json is damaged" in said
    assert field in said
    assert problem in said
    assert said.count("\n") == 1
    assert len(said) < 400


@pytest.mark.parametrize("command", ["report", "resume", "evaluate", "export"])
def test_a_configuration_that_the_run_was_not_trained_by_is_refused(
    runs, tmp_path, capsys, command
):
    changed = shutil.copytree(runs[0], tmp_path / "run")
    text = (changed / "config.json").read_text()
    (changed / "config.json").write_text(text.replace("balls-and-bins", "poisson"))
    store, out = str(runs[0].parent / "store"), str(tmp_path / "page.html")
    more = {"report": ["--out", out], "resume": [], "evaluate": [store], "export": [out]}
    assert cli.main([command, str(changed), *more[command]]) == 2
    said = capsys.readouterr().err
    assert "config.json is not what the run was trained by" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_the_model_of_another_run_is_not_taken_for_this_one(runs, tmp_path, capsys, command):
    changed = shutil.copytree(runs[0], tmp_path / "run")
    shutil.copy(runs[1] / "params.npz", changed)
    store, out = str(runs[0].parent / "store"), tmp_path / "out"
    assert cli.main([command, str(changed), str(out) if command == "export" else store]) == 2
    assert "params.npz is not the model that the run's report is about" in capsys.readouterr().err
    assert not out.exists()


def test_a_page_is_not_written_into_the_folder_of_a_run(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(runs[2], tmp_path / "report")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    assert cli.main(["report", "report"]) == 2
    assert "name another --out" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    assert not (tmp_path / "report.html").exists()


def test_figures_of_runs_on_different_stores_are_said_not_to_compare(runs, tmp_path):
    plain = runs[2]
    other = shutil.copytree(plain, tmp_path / "other")
    assert "same store" not in overview([plain, other]).markdown
    (other / DATA).write_text('{"data": ["another"]}')
    assert "Not all of them were trained on the same store" in overview([plain, other]).markdown


def test_what_trained_a_model_is_not_scored_as_new_rows(runs, tmp_path, capsys):
    store = runs[0].parent / "store"
    assert cli.main(["evaluate", str(runs[0]), str(store)]) == 0
    assert "among these rows are those that trained the model" in capsys.readouterr().err
    synthetic.write_store(tmp_path / "new", 200, 5)
    assert cli.main(["evaluate", str(runs[0]), str(tmp_path / "new")]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name at least one run"),
        (["nowhere"], "nowhere is not the directory of a run"),
        (["nowhere", "--out", "page.pdf"], "must end in .html"),
    ],
)
def test_a_report_of_nothing_is_refused_in_one_line(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        status = cli.main(["report", *words])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    captured = capsys.readouterr()
    assert said in captured.err + captured.out


def test_runs_of_one_name_are_told_apart(runs, tmp_path):
    again = tmp_path / runs[0].name
    again.symlink_to(runs[0])
    text = overview([runs[0], again]).markdown
    assert plain(str(again)) in text
    assert dataclasses.is_dataclass(overview([again]))
