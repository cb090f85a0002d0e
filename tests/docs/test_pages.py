"""Every command and every program of a page works as it stands there."""

import contextlib
import doctest
import gzip
import importlib.util
import io
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest

from dpsgd.audit.report import AuditReport
from experiments import cli
from experiments.tasks.ratings import ratings

ROOT = Path(__file__).resolve().parents[2]
DOCS = [file for file in (ROOT / "docs").rglob("*") if "_build" not in file.parts]
PAGES = {
    file.relative_to(ROOT).as_posix(): file.read_text()
    for file in (
        *ROOT.glob("README.md"),
        *(ROOT / "experiments").rglob("*.md"),
        *(file for file in DOCS if file.suffix == ".md"),
    )
}
SHELL = ("", "sh")


def blocks(page):
    """(language, text) of each fenced block of a page, in order."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)


def commands(text):
    """The words of each `dpsgd` command of a shell."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("dpsgd ")]


def named(page):
    """{name: text} of the blocks whose first line says which file they are."""
    found = {re.match(r"# (\w[\w.-]*\.\w+)$", text, re.MULTILINE): text for _, text in blocks(page)}
    return {match[1]: text for match, text in found.items() if match}


SHOWN = [text for page in PAGES for language, text in blocks(page) if language in SHELL]
SHOWN += [
    "".join(cell["source"]).replace("dpsgd", "dpsgd")
    for file in DOCS
    if file.suffix == ".ipynb"
    for cell in json.loads(file.read_text())["cells"]
    if cell["cell_type"] == "code"
]
COMMANDS = {shlex.join(words): words for text in SHOWN for words in commands(text)}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_asks_for_what_can_be_asked(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if re.search(r" (--task \w+|--noise \w+|sampler:\w+):", command):
        monkeypatch.syspath_prepend(tmp_path)
        for page in PAGES:
            for name, text in named(page).items():
                (tmp_path / name).write_text(text)
                monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    cli.parse(COMMANDS[command])


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith("README.md")])
def test_a_readme_links_to_files_that_exist(page):
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", PAGES[page]):
        assert (ROOT / page).parent.joinpath(link).exists(), link


def test_the_readme_is_read_in_minutes():
    assert len(PAGES["README.md"].splitlines()) <= 150


def test_the_program_of_the_readme_prints_what_is_said(monkeypatch):
    monkeypatch.setattr("dpsgd.runs.job.audit_program", lambda *of, **how: AuditReport(()))
    [program] = [text for language, text in blocks("README.md") if language == "python"]
    [printed] = [text for language, text in blocks("README.md") if language == "text"]
    check_printed(executed(program, {}), printed)


# --- Whole pages ---------------------------------------------------------------------------------


RUN = [
    page
    for page in PAGES
    if page == "README.md" or Path(page).parent.as_posix() in ("docs/how-to", "docs/explanation")
    if page not in ("docs/how-to/devices.md", "docs/how-to/beam.md")  # of clusters
    if {"python", *SHELL} & {language for language, _ in blocks(page)}
]
ELSEWHERE = {"tfds", "large", "--black-box"}
"""Words of commands that take a data set or minutes that a test has not."""
TINY = ["--embedding-dim", "2", "--max-buckets", "16", "--hidden", "4", "--no-audit"]


def executed(program, namespace):
    """What a program prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, "page", "exec"), namespace)
    return printed.getvalue()


def answered(words):
    """What a command prints, with the smallest model."""
    own = "--task" in words or any(word in words for word in TINY)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.main([*words, *(TINY if words[0] == "train" and not own else ())]) == 0, words
    return printed.getvalue()


def check_printed(found, said):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(said, found, flags), found


def installed(program):
    """Whether what a program imports is there: other libraries may be missing."""
    names = re.findall(r"^(?:from|import) (\w+)", program, re.MULTILINE)
    return all(importlib.util.find_spec(name) for name in names)


def write_inputs(folder):
    """Writes the files that pages take for granted, with generated rows."""
    rng = np.random.default_rng(0)
    rows = [
        f"{rng.integers(2)},{'abc'[rng.integers(3)]},{rng.integers(9)},{rng.random():.3f},{i}"
        for i in range(700)
    ]
    text = "\n".join(["clicked,city,device,age,user_id", *rows, ""])
    for name in ("may.csv", "august.csv", "rows.csv"):
        (folder / name).write_text(text)
    pyarrow.parquet.write_table(pyarrow.csv.read_csv(folder / "may.csv"), folder / "july.parquet")
    (folder / "june.tsv.gz").write_bytes(gzip.compress(text.replace(",", "\t").encode()))
    table = ratings.synthetic(0, num_users=240, num_items=40)
    lines = zip(table.user, table.item + 1, table.rating.astype(int), table.time, strict=True)
    (folder / "u.data").write_text("".join("\t".join(map(str, line)) + "\n" for line in lines))
    images = rng.integers(0, 256, (600, 28, 28), np.uint8)
    np.savez(folder / "mnist.npz", x=images, y=rng.integers(0, 10, 600, np.uint8))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", RUN)
def test_a_page_runs_from_its_top_to_its_end(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_inputs(tmp_path)
    for name, text in named(page).items():
        Path(name).write_text(text)
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    namespace: dict = {"__name__": "page"}
    printed = ""
    for language, text in blocks(page):
        if language == "text":
            check_printed(printed, text)
        elif language == "python" and installed(text) and text not in named(page).values():
            printed = executed(text, namespace)
        elif language in SHELL:
            asked = [words for words in commands(text) if not ELSEWHERE & {*words}]
            printed = "".join(map(answered, asked))
