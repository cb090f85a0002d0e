"""The page about finished runs: self-contained, complete, and nothing private in it."""

import html
import json
import re
import shlex
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import dpsgd
from dpsgd import RunSpec
from dpsgd.runs.directory import DATA, DIAGNOSTICS
from dpsgd.runs.history import read
from dpsgd.runs.report import escape
from experiments import cli
from experiments.cli.command_line import train_command
from experiments.results.page import MEANING
from experiments.results.page import page as page_of
from experiments.results.render import Page, document
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.clicks.task import Clicks
from samplers.settings import SETTINGS

CONFIGS = {
    "deterministic": ({}, {"non_private": True}, {}),
    "shuffle": ({"order": "fixed"}, {"target_epsilon": 0.1}, {"data": "a store"}),
    "poisson": (
        {"batch_size": 64, "max_batch_size": 90, "overflow": "accumulate"},
        {"noise_multiplier": 0.7, "microbatch_size": 32},
        {"hidden": [32, 16]},
    ),
    "balls-and-bins": (
        {"epochs": 1},
        {"target_epsilon": 3.0, "microbatch_size": 5, "audit": False},
        {},
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_printed_command_is_the_configuration(name):
    sampler, config, settings = CONFIGS[name]
    config = RunSpec.of(SETTINGS[name](**sampler), **config)
    none = {"hidden": None, "max_buckets": None}
    settings = {"data": "store", "model": "small", **none, **settings}
    words = shlex.split(
        train_command({"name": "clicks", "settings": settings}, config, Path("run"))
    )
    assert words[:2] == ["dpsgd", "train"]
    assert "--task" not in words
    assert "--max-buckets" not in words
    _, read, _ = cli.parse(words[1:])
    assert read.spec == config
    assert read.out == Path("run")
    hidden = settings["hidden"] and tuple(settings["hidden"])
    assert read.settings | {"data": Path(settings["data"]), "model": "small", "hidden": hidden} == (
        read.settings
    )


def test_the_printed_command_names_a_task_made_already_alone():
    config = RunSpec.of(SETTINGS["poisson"](), noise_multiplier=1.0)
    settings = {"rows": 160, "width": 5, "seed": 0}
    for name, given in (("tiny_task:Line", "--width 5"), ("tiny_task:line", "1.0 --out")):
        command = train_command({"name": name, "settings": settings}, config, Path("run"))
        assert given in command
        _, read, _ = cli.parse(shlex.split(command)[1:])
        assert read.task == name
    unknown = "# run: no command repeats this run; "
    printed = train_command({"name": None, "settings": {}}, config, Path("run"))
    assert printed.startswith(f"{unknown}a program")
    seeded = RunSpec.of(SETTINGS["poisson"](), noise_multiplier=1.0, init_seed=5)
    printed = train_command({"name": "clicks", "settings": {"data": "s"}}, seeded, Path("run"))
    assert printed == f"{unknown}only Python and sweep files set init_seed"


@pytest.fixture(scope="module")
def clicked(tmp_path_factory):
    """A run of clicks, beside its store."""
    folder = tmp_path_factory.mktemp("clicks")
    synthetic.write_store(folder / "store", 200, 0)
    task = Clicks(folder / "store", model="linear", max_buckets=16)
    sampler = SETTINGS["deterministic"](batch_size=40, epochs=2)
    config = RunSpec.of(sampler, noise_multiplier=1.0, audit=False)
    dpsgd.run(task, config, folder / "clicked", name="clicks")
    return folder / "clicked"


@pytest.fixture(scope="module")
def page(runs):
    """The page about these runs."""
    return page_of(runs)


@pytest.fixture(scope="module")
def plain_page(runs):
    """The page about the run without privacy."""
    return page_of(runs[2:])


@pytest.fixture(scope="module")
def private_page(runs):
    """The page about the run with a tight guarantee."""
    return page_of(runs[:1])


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


def test_the_page_needs_nothing_but_itself(page):
    links = Links(document(page))
    assert not links.open
    assert len(links.found) == 2
    assert all(link.startswith("data:image/svg+xml;base64,") for link in links.found)


def test_the_page_shows_guarantee_interval_and_command_per_run(runs, page, plain_page):
    text = page.markdown
    assert text.count("zero-out adjacency, unit: one example") == 3
    assert "NO GUARANTEE: no noise was added" in text
    assert MEANING in text
    (weak,) = re.findall(
        "^- [Nn]oise will probably drown the signal .*$", text, re.MULTILINE
    )  # said once of all
    assert weak.endswith("(private, shuffled)")
    without = plain_page.markdown  # there is no guarantee to explain
    assert MEANING not in without
    assert "What is not covered" not in without
    for run in runs:
        assert re.search(rf"^dpsgd train .* --out {run.name}\b", text, re.MULTILINE)
    for words in ("What is not covered", "hyper-parameters", "jax 0."):
        assert words in text


@pytest.mark.long
def test_runs_are_compared_task_by_task(runs, clicked):
    page = page_of([*runs[1:], clicked])
    headers = re.findall(r"^\| run \| sampler \|.*$", page.markdown, re.MULTILINE)
    assert ["test error" in line for line in headers] == [True, False]
    assert ["test AUC" in line for line in headers] == [False, True]
    assert "| test log loss | test normalised entropy | test pred/obs |" in page.markdown
    assert "### Task: tiny\\_task:Line" in page.markdown
    assert "### Task:" not in page_of(runs[2:]).markdown
    assert set(page.figures) == {"curves.svg"}
    assert "Not alike" not in page.markdown  # of tasks that differ by nature


def test_the_first_table_states_terms_and_labels_each_cell(runs, page):
    glance = page.markdown.partition("## At a glance\n\n")[2]
    table, caption, *_ = glance.split("\n\n")
    header, _, *rows = table.splitlines()
    names = ["run", "sampler", "σ", "ε [lower, upper]", "δ", "test error", "seconds"]
    assert header == f"| {' | '.join(names)} |"
    assert [bool(re.search(r"\| (\[\d|none \|)", row)) for row in rows] == [True] * 3
    assert "zero-out adjacency, unit: one example" in caption
    labels = re.findall(r'<td [^>]*data-label="([^"]*)"', document(page))
    assert labels[: len(names)] == names


@pytest.mark.short("shuffled and plain")
@pytest.mark.parametrize(
    ("numbers", "drawn"),
    [([0], False), ([2], False), ([0, 2], False), ([0, 1], True), ([0, 1, 2], True)],
    ids=["private", "plain", "shuffled and plain", "two epsilons", "two epsilons and plain"],
)
def test_a_figure_with_two_epsilons_explains_them_in_its_caption(runs, numbers, drawn):
    page = page_of([runs[number] for number in numbers])
    assert ("quality.svg" in page.figures) == drawn
    (caption,) = re.findall(r"!\[(.*)\]\(quality.svg\)", page.markdown) or [""]
    assert ("without privacy" in caption) == (drawn and 2 in numbers)


@pytest.mark.long
def test_another_metric_can_be_put_first(clicked):
    page = page_of([clicked], headline="validation_log_loss", better="lower")
    assert "| ε [lower, upper] | δ | validation log loss |" in page.markdown
    with pytest.raises(ValueError, match="unknown metric 'auc'; choose of validation_auc, "):
        page_of([clicked], headline="auc")


def test_the_page_never_reads_the_diagnostics(runs, private_page, tmp_path):
    without = shutil.ignore_patterns(DIAGNOSTICS)
    copy = shutil.copytree(runs[0], tmp_path / runs[0].name, ignore=without)
    assert page_of([copy]) == private_page


def test_text_from_runs_cannot_become_markup():
    page = Page("t", "# t\n\n<script>alert(1)</script> [x](javascript:alert(1))\n")
    assert "<script>" not in document(page)
    assert "href" not in document(page)


def test_the_name_of_a_run_is_shown_as_it_is(runs, tmp_path):
    names = ["![x](y.png)", "a|b", "<b>", "[x](javascript:y)", "*_`"]
    for name in names:
        (tmp_path / name).symlink_to(runs[2])
    shown = html.unescape(document(page_of([tmp_path / name for name in names])))
    for name in names:
        assert f'<td data-label="run">{name}</td>' in shown
        assert f"<strong>{name}</strong>: NO GUARANTEE" in shown


def test_a_guarantee_comes_from_the_ledger_and_not_the_report(runs, private_page, tmp_path):
    whole = private_page.markdown
    boasting = shutil.copytree(runs[0], tmp_path / runs[0].name)
    record = json.loads((boasting / "report.json").read_text())
    record |= {"guarantee": "epsilon in [0, 0.01]", "epsilon_lower": 0.0, "epsilon_upper": 0.01}
    record |= {"sampler": "shuffle", "num_steps": 1, "num_examples": 1}
    record |= {"audit": "passed", "params_sha256": "ab" * 32}
    record |= {"delta": 1e-9, "noise_multiplier": 99.0, "l2_clip_norm": None, "not_covered": []}
    (boasting / "report.json").write_text(json.dumps(record))
    assert page_of([boasting]).markdown == whole
    assert dpsgd.resume(boasting)["guarantee"] in whole


def cut_ledger(run):
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / "ledger.jsonl").write_text("".join(lines[:-1]))


def cut_ledger_and_report(run):
    cut_ledger(run)
    edit_report(run, ledger_head=read(run / "ledger.jsonl").head)


def unfinished(run):
    cut_ledger(run)
    (run / "report.json").unlink()


def edit_report(run, **fields):
    record = json.loads((run / "report.json").read_text()) | fields
    (run / "report.json").write_text(json.dumps(record))


def reconfigured(run):
    text = (run / "config.json").read_text()
    (run / "config.json").write_text(text.replace('"epochs": 1', '"epochs": 2'))


def another_model(run):
    with np.load(run / "params.npz") as params:
        doubled = {name: 2 * leaf for name, leaf in params.items()}
    np.savez(run / "params.npz", **doubled)


def edited(**fields):
    return lambda run: edit_report(run, **fields)


READERS = {"evaluate", "export"}
WHOLE = {*READERS, "report", "resume"}
EVERY = {*WHOLE, "ledger", "score"}
TAMPERED = {
    "a line less": (cut_ledger, EVERY, "rolled back or replaced"),
    "a line less, and the report tells": (
        cut_ledger_and_report, EVERY, "does not record the released model"),
    "a line less, and no report": (
        unfinished, {"ledger", "resume"}, "does not record the released model"),
    "an unfinished run": (unfinished, EVERY - {"ledger", "resume"}, "dpsgd: "),
    "another configuration": (reconfigured, WHOLE, "config.json is not the configuration that"),
    "another model": (
        another_model, READERS, "params.npz is not the model that"),
}  # fmt: skip
DAMAGED = {
    "metrics": ({"test_auc": "0.5"}, {"test_auc": 1e308}, [0.5]),
    "num_params": (10**400,),
    "training_seconds": (-1,),
    "stage_seconds": ({"train": -1.0}, {"| a |": 1.0}),
}
TAMPERED |= {
    f"{field} {str(value)[:20]}": (
        edited(**{field: value}), {"report", "resume"}, f": {field}"
    )
    for field, values in DAMAGED.items()
    for value in values
}  # fmt: skip


@pytest.mark.short("*another*", "resume-*", "score-*", "export-*")
@pytest.mark.parametrize(
    ("asked", "tampered"),
    [(asked, name) for name, (_, of, _) in TAMPERED.items() for asked in sorted(of)],
)
def test_a_damaged_finished_run_is_refused_in_one_line(runs, tmp_path, command, asked, tampered):
    change, _, problem = TAMPERED[tampered]
    run = shutil.copytree(runs[0], tmp_path / "run")
    change(run)
    store, out = tmp_path / "store", tmp_path / "page.html"
    more = {"report": ["--out", out], "evaluate": [store], "export": [out]}
    more |= {"score": [store, "--out", out]}
    said = command.refuses(asked, run, *more.get(asked, []))
    assert problem in said
    assert len(said) < 500
    assert not out.exists()


def test_a_page_is_written_beside_its_run_and_nothing_into_it(runs, tmp_path, command):
    run = shutil.copytree(runs[2], tmp_path / "run")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    words = "report", *runs[:2], run, "--out", tmp_path / "run.html", "--title", "A & B"
    assert "name another --markdown" in command.refuses(*words, "--markdown", run)
    command(*words, "--markdown", tmp_path / "page")
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.html", "page"}
    assert "<title>A &amp; B</title>" in (tmp_path / "run.html").read_text()
    written = {path.name for path in (tmp_path / "page").iterdir()}
    assert written == {"report.md", "quality.svg", "curves.svg"}


def test_the_page_warns_about_runs_on_different_stores(runs, page, tmp_path):
    assert "different data" not in page.markdown
    plain = runs[2]
    other = shutil.copytree(plain, tmp_path / "other")
    (other / DATA).write_text('{"data": "another"}')
    assert "These runs were trained on different data" in page_of([plain, other]).markdown


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "dpsgd report needs RUNS"),
        (["nowhere"], "nowhere is not the directory of a run"),
        (["nowhere", "--out", "page.pdf"], "must end in .html"),
    ],
)
def test_a_report_of_nothing_is_refused_in_one_line(words, problem, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert problem in command.refuses("report", *words)


@pytest.mark.long
def test_runs_of_one_name_are_told_apart(runs, tmp_path):
    again = tmp_path / runs[0].name
    again.symlink_to(runs[0])
    text = page_of([runs[0], again]).markdown
    assert escape(str(again)) in text
