"""A sampler of another module is asked for as the built-in ones are, in commands and files."""

import sys

import pytest

from experiments.sweeps import engine
from experiments.sweeps.config import Sweep, plan

PROGRAM = """
from dataclasses import dataclass

from samplers import Poisson


@dataclass(frozen=True)
class Renamed(Poisson):
    '''Poisson batches by another name.'''


NOTHING = 0
"""
SIZES = "--num-examples 400 --batch-size 40"
COMMANDS = {
    "epsilon": f"epsilon sampler:NAME {SIZES} --noise-multiplier 2",
    "calibrate": f"calibrate sampler:NAME {SIZES} --target-epsilon 2",
    "compare": f"compare {SIZES} --noise-multiplier 2 --sampler NAME",
    "compare at equal privacy": f"compare {SIZES} --target-epsilon 2 --sampler NAME",
    "audit": f"audit sampler:poisson {SIZES} --noise-multiplier 2 --claim NAME",
}
SWEEPS = ['"NAME"', '{ name = "NAME", overflow = "accumulate" }']
FILE = """
title = "own"
repetitions = 1
[[grid]]
x = "noise_multiplier"
sampler = [SAMPLER, "shuffle"]
noise_multiplier = [1.0]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "own_parts.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("own_parts", None)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if "audit" in name else ()) for name in COMMANDS],
)
def test_a_command_answers_alike_for_an_own_sampler(name, command, monkeypatch):
    monkeypatch.setattr("experiments.figures.comparison.each", map)
    asked, own = COMMANDS[name].replace("NAME", "poisson"), "own_parts:Renamed"
    answers = [
        command(*words.split()).replace(own, "poisson").split()
        for words in (asked, COMMANDS[name].replace("NAME", own))
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("sampler", SWEEPS)
def test_a_sweep_runs_an_own_sampler(sampler, tmp_path):
    text = FILE.replace("SAMPLER", sampler.replace("NAME", "own_parts:Renamed"))
    runs = plan(Sweep.parse(text.encode(), "own.toml", execute=True), tmp_path, "own.toml")
    assert [run.spec.sampler.name for run in runs] == ["own_parts:Renamed", "shuffle"]


PROBLEMS = {
    "own_parts:Missing": "has no sampler 'Missing'",
    "own_parts:NOTHING": "has no sampler 'NOTHING'",
    "no_such_module:Any": "cannot be imported",
    "poison": "did you mean poisson?",
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("asked", COMMANDS)
def test_a_name_without_a_sampler_is_refused_in_one_line(name, asked, command):
    line = command.refuses(*COMMANDS[asked].replace("NAME", name).split())
    assert name in line
    assert PROBLEMS[name] in line


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_sweep_names_the_place_of_an_unknown_sampler(name):
    text = FILE.replace("SAMPLER", f'"{name}"')
    with pytest.raises(ValueError, match=r"own.toml, grid 1, sampler\[0\]: unknown sampler") as why:
        Sweep.parse(text.encode(), "own.toml", execute=True)
    assert PROBLEMS[name] in str(why.value)


SUMMARIES = ["report FOLDER --out r.html", "results FOLDER --plot a.png"]


@pytest.mark.parametrize("words", SUMMARIES)
@pytest.mark.parametrize("sampler", SWEEPS)
def test_a_read_sweep_never_executes_the_code_that_it_names(words, sampler, tmp_path, command):
    folder = tmp_path / "sweep"
    (folder / engine.RUNS).mkdir(parents=True)
    sampler = sampler.replace("NAME", "own_parts:Renamed")
    (folder / engine.ASKED).write_text(FILE.replace("SAMPLER", sampler))
    path, imported = list(sys.path), set(sys.modules)
    with pytest.raises(ValueError, match=r"sampler\[0\]: .* not imported: if you trust") as why:
        engine.read(folder)
    assert "\n" not in str(why.value)
    assert (sys.path, "own_parts" in sys.modules) == (path, False)
    assert "--trust MODULE" in command.refuses(*words.replace("FOLDER", "sweep").split())
    assert {name for name in sys.modules if name.startswith("own")} <= imported


READERS = ["ledger", "results", "report"]


@pytest.mark.parametrize("reader", READERS)
def test_a_ledger_executes_code_only_where_it_is_trusted(reader, command):
    said = command.refuses(reader, "no-such-run", "--trust", "no_such_module")
    assert "--trust no_such_module cannot be imported" in said
    assert "own_parts" not in sys.modules
    command.refuses(reader, "no-such-run")
    assert "own_parts" not in sys.modules
    command.refuses(reader, "no-such-run", "--trust", "own_parts")
    assert "own_parts" in sys.modules


def test_a_trusted_ledger_is_priced_by_its_own_sampler(tmp_path, command):
    words = "sampler:own_parts:Renamed --batch-size 100 --epochs 1 --noise-multiplier 1 --begin"
    command("prepare", "synthetic", "store", "--num-rows", "800")
    command("train", "store", *words.split(), "--no-audit", "--out", "run")
    sys.modules.pop("own_parts")
    assert "--trust MODULE" in command.refuses("ledger", "run")
    assert "epsilon <= " in command("ledger", "run", "--trust", "own_parts")
