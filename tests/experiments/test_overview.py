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
import tyro

from experiments import cli
from experiments.command_line import train_command
from experiments.config import BallsAndBins, Deterministic, Poisson, Shuffle, TrainConfig
from experiments.criteo import synthetic
from experiments.html import document
from experiments.overview import Page, overview
from experiments.report import plain
from experiments.run_directory import DIAGNOSTICS
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
    read = tyro.cli(
        cli.Command,
        args=words[1:],
        config=(tyro.conf.CascadeSubcommandArgs, tyro.conf.OmitArgPrefixes),
    )
    assert read == config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overview")
    synthetic.write_store(folder / "store", 2000, 0)
    common = ["--batch-size", "100", "--epochs", "1"]
    for name, words in {
        "private": ["sampler:balls-and-bins", "--noise-multiplier", "1.0"],
        "shuffled": ["sampler:shuffle", "--noise-multiplier", "1.0"],
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
    record |= {"delta": 1e-9, "noise_multiplier": 99.0, "l2_clip_norm": None, "not_covered": []}
    (boasting / "report.json").write_text(json.dumps(record))
    assert overview([boasting]).markdown == whole
    assert resume(boasting)["guarantee"] in whole


@pytest.mark.parametrize(
    ("file", "field"),
    [("report.json", "test_auc"), ("report.json", "num_steps"), ("environment.json", "packages")],
)
def test_a_damaged_run_is_named_with_its_field(runs, tmp_path, capsys, file, field):
    damaged = tmp_path / "damaged"
    shutil.copytree(runs[0], damaged)
    record = json.loads((damaged / file).read_text())
    del record[field]
    (damaged / file).write_text(json.dumps(record))
    assert cli.main(["report", str(damaged), "--out", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert file in said
    assert field in said
    assert said.count("\n") == 1


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
