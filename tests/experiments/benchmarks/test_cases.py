"""Benchmarks are cases of one type, which one command measures into one record."""

import importlib
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from accounting import PoissonProfile
from experiments.benchmarks import __main__ as command
from experiments.benchmarks import accounting, record
from experiments.benchmarks.case import Estimate, cases, figure
from experiments.benchmarks.record import Record, read, table
from experiments.benchmarks.timing import alone, in_turns

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("bar", "value", "holds"),
    [
        ({"at_least": 8.0}, 8.0, True),
        ({"at_least": 8.0}, 7.9, False),
        ({"at_most": 1.5}, 1.5, True),
        ({"at_most": 1.5}, 1.6, False),
        ({"at_most": 1.5}, None, False),
        ({"at_most": 1.5}, math.nan, False),
        ({}, math.inf, False),
        ({}, 1.0, None),
        ({"at_most": None}, 1.0, None),
    ],
)
def test_a_figure_is_held_to_its_bar(bar, value, holds):
    row = figure("a", value, "s", **bar)
    assert row.holds is (None if value is None else holds)
    assert row.value == (value if value is not None and math.isfinite(value) else None)
    assert ("NO" in table([row])) == (row.holds is False)


def test_an_estimate_is_a_number_with_a_standard_error():
    values = [1.0, 2.0, 4.0]
    mean, median = Estimate.mean(values), Estimate.median(values)
    assert (mean, median) == (statistics.fmean(values), 2.0)
    assert mean.error == pytest.approx(statistics.stdev(values) / math.sqrt(3))
    assert median.error == pytest.approx(math.sqrt(math.pi / 2) * mean.error)
    assert Estimate.mean([1.0]).error is None
    assert figure("a", mean).error == mean.error
    assert figure("a", 2 * mean).error is None


def measured(size=3, *, rounds=2, store=None):
    """A function that is measured."""
    yield figure(f"size {size}", rounds, "s", at_most=2)
    if store == "breaks":
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile trying to allocate")
    yield figure("none", math.nan)


def plain(bits, *, rounds=2):
    """Another, of several cases."""
    yield figure(f"{bits} bits", rounds, "s", at_most=2)


def test_a_function_has_a_case_for_each_combination():
    found = cases(plain, "bits", over={"bits": (8, 16)}, quick={"rounds": 1}, seconds=3)
    assert [(case.name, case.setting, case.quick) for case in found] == [
        ("bits, bits 8", {"bits": 8}, {"rounds": 1}),
        ("bits, bits 16", {"bits": 16}, None),
    ]
    assert found[0].options == {"rounds": 2}
    (one,) = cases(measured, asked=True)
    assert one.setting == {"size": 3}
    assert one.options == {"rounds": 2, "store": None}


def measure(file, found, given=None, **asked):
    """The record of these cases, measured one after another."""
    told = Record(file, "area", **{k: asked.pop(k) for k in ("minutes",) if k in asked})
    for case in found:
        told.run(case, "command", given or {}, **asked)
    return told


def test_a_record_has_everything_that_measures_a_figure_again(tmp_path):
    file = tmp_path / "folder" / "record.json"
    assert measure(file, cases(plain, over={"bits": (8,)})).status() == 0
    content = read(file)
    (entry,) = content["cases"]
    assert entry["setting"] == {"bits": 8, "rounds": 2}
    assert content["environments"][entry["environment"]]["packages"]["jax"]
    assert entry["rows"] == [
        {"name": "8 bits", "value": 2.0, "unit": "s", "bar": "<= 2", "holds": True, "error": None}
    ]
    assert f"{json.dumps(entry['rows'][0])}\n" in file.read_text()


def test_what_is_measured_again_takes_the_place_of_what_was_in_the_same_setting(tmp_path):
    file = tmp_path / "record.json"
    for bits, rounds in (((8, 16), 2), ((8,), 2), ((8,), 1)):
        measure(file, cases(plain, over={"bits": bits}), {"rounds": rounds})
    found = [tuple(entry["setting"].values()) for entry in read(file)["cases"]]
    assert found == [(16, 2), (8, 2), (8, 1)]
    assert len(read(file)["environments"]) == 1
    file.write_text("[1]")
    with pytest.raises(ValueError, match="not a record"):
        measure(file, [])


def test_what_fails_or_does_not_fit_loses_nothing_of_the_rest(tmp_path, capsys):
    file = tmp_path / "record.json"
    found = [*cases(measured), *cases(plain, over={"bits": (8,)})]
    found += cases(plain, over={"bits": (9,)}, seconds=601)
    told = measure(file, found[:1], {"store": "breaks"}, minutes=10)
    assert told.status() == 1
    told.run(found[1], "command", {})
    told.run(found[2], "command", {})
    breaks, good, long = read(file)["cases"]
    assert breaks["status"] == "failed"
    assert breaks["why"].startswith("RuntimeError: RESOURCE_EXHAUSTED")
    assert "\n" not in breaks["why"]
    assert [row["name"] for row in breaks["rows"]] == ["size 3"]
    assert good["status"] == "done"
    assert long["status"] == "left out"
    assert "takes about 601" in long["why"]
    assert [row.value for row in told.rows()] == [2, None, 2, None]


def test_a_record_is_written_after_every_figure(tmp_path):
    file, seen = tmp_path / "record.json", []

    def slow():
        yield figure("a", 1.0)
        seen.extend(read(file)["cases"])  # what a stop here would leave
        yield figure("b", 1.0)

    measure(file, cases(slow))
    (unfinished,) = seen
    assert unfinished["status"] == "begun"
    assert [row["name"] for row in unfinished["rows"]] == ["a"]


def test_cases_that_take_longer_than_foreseen_leave_less_room_for_the_next(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(record.time, "monotonic", lambda: now[0])

    def slow(*, rounds=1):
        now[0] += 30
        yield figure("a", rounds)

    told = measure(None, [*cases(slow, seconds=10), *cases(slow, seconds=11)], minutes=1)
    assert [entry["status"] for entry in told.entries] == ["done", "left out"]


@pytest.mark.parametrize(
    ("needs", "given", "status"),
    [
        (("--store",), {}, "left out"),
        (("--store",), {"store": "here"}, "done"),
        (("no_such_package",), {}, "left out"),
        (("no_such_package or jax",), {}, "done"),
        (("1e9 GB",), {}, "left out"),
    ],
)
def test_a_case_is_left_out_without_what_it_needs(needs, given, status):
    told = measure(None, cases(measured, needs=needs), given)
    assert told.entries[0]["status"] == status
    assert told.status() == (2 if status == "left out" else 1)


def test_in_small_only_bars_of_right_and_wrong_are_held():
    for exact, holds in ((False, None), (True, False)):
        found = cases(plain, over={"bits": (8,)}, quick={"rounds": 3}, exact=exact)
        assert [row.holds for row in measure(None, found, quick=True).rows()] == [holds]


@pytest.mark.parametrize("area", command.AREAS)
def test_an_area_lists_its_cases_which_take_what_their_functions_do(area, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main([area, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: bench {area} " in shown
    found = importlib.import_module(f"experiments.benchmarks.{area}").CASES
    names = [case.name for case in found]
    assert len({*names}) == len(names)
    for case in found:
        assert case.name in shown
        assert {**(case.quick or {})}.keys() <= {**case.setting, **case.options}.keys()


FOLDERS = [ROOT / name for name in ("accounting", "experiments", "docs")]
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))]
EVERY = (ROOT / "experiments/records").glob("*.json")
RECORDS = [file for file in EVERY if "cases" in json.loads(file.read_text())]  # of benchmarks
COMMANDS = [
    re.findall(r"scripts/bench ((?:(?!scripts/)[^`#])*)", page.read_text()) for page in PAGES
]


@pytest.mark.parametrize(
    "words", sorted({" ".join(line.split()) for found in COMMANDS for line in found})
)
def test_every_command_that_is_named_somewhere_measures_cases(words):
    area, *asked = shlex.split(words)
    if area == "AREA":
        return
    module = importlib.import_module(f"experiments.benchmarks.{area}")
    options = command.parser_of(area, module).parse_args(asked)
    assert command.chosen(module.CASES, options.names, options.quick)


def test_a_record_names_the_command_of_its_case():
    for file in RECORDS:
        for entry in read(file)["cases"]:
            module = importlib.import_module(f"experiments.benchmarks.{entry['area']}")
            _, area, *asked = shlex.split(entry["command"])
            names = command.parser_of(area, module).parse_args(asked).names
            (case,) = command.chosen(module.CASES, names, quick=False)
            assert case.name == entry["name"]
            assert entry["setting"].keys() == {**case.setting, **case.options}.keys()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["no-such-area"], "invalid choice"),
        (["noise", "-k", "no such case"], "no case"),
        (["noise", "--rounds", "0"], "at least 1"),
        (["noise", "--rounds", "many"], "--rounds"),
        (["ingest", "-k", "rehearsal", "--rounds", "2"], "none of the chosen cases"),
        (["noise", "--minutes", "0"], "greater than 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, why, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(words)
    assert stop.value.code == 2
    assert why in capsys.readouterr().err


def test_a_case_is_named_by_a_part_and_its_command_measures_it_again(tmp_path):
    file = tmp_path / "record.json"
    asked = ["accounting", "-k", "T*100", "--quick", "--json", str(file)]
    with pytest.raises(SystemExit):
        command.main(asked)
    asked[2] = "bins 100"
    assert command.main(asked) == 0
    (entry,) = read(file)["cases"]
    assert entry["rows"][0]["name"] == "noise multiplier, advantage 0.1, T 100, E 1"
    assert entry["rows"][0]["value"] > 0
    assert entry["command"] == 'scripts/bench accounting -k "advantage, bins 100, epochs 1" --quick'
    assert command.main(["gpu_program"]) == 2


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "area",
    [name for name in command.AREAS if name not in ("gpu", "gpu_program", "size")],
)
def test_an_area_is_measured_in_small_and_what_must_hold_does(area, tmp_path):
    """In a process of its own, which has its own devices, and whose calls are not type-checked."""
    file = tmp_path / "record.json"
    words = ["-m", "experiments.benchmarks", area, "--quick", "--json", str(file)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    cases = read(file)["cases"]
    left_out = [case["name"] for case in cases if "needs" in case.get("why", "")]
    measured = [case for case in cases if case["name"] not in left_out]
    assert {case["status"] for case in measured} == {"done"}, done.stdout + done.stderr
    rows = [row for case in measured for row in case["rows"]]
    # How long it takes here says nothing, and a share is a difference of two measured times.
    assert not [row for row in rows if row["holds"] is False and row["unit"] != "s"], done.stdout
    assert all(row["value"] is not None for row in rows)
    assert len(rows) >= len(measured)


@pytest.fixture
def spawned(monkeypatch):
    """Questions in processes that leave nothing behind while this one goes on."""
    monkeypatch.setattr(accounting, "START", "spawn")


@pytest.mark.usefixtures("spawned")
def test_a_hard_question_is_answered_in_its_own_process_and_a_crash_is_a_missed_bar():
    answer = accounting.ask("P(1., .01, 10).epsilon(1e-5)")
    assert answer.value == PoissonProfile(1.0, 0.01, 10).epsilon(1e-5)
    assert 0 < answer.cpu_seconds < 10 < 1e3 * answer.gigabytes
    assert accounting.ask("1 / 0").failure == "ZeroDivisionError: division by zero"
    with pytest.raises(RuntimeError, match="math domain error"):
        alone(math.sqrt, -1)


@pytest.mark.long
@pytest.mark.usefixtures("spawned")
def test_hard_questions_are_drawn_and_compared():
    drawn = accounting.hard("random points", points=3)
    for row in (*drawn, *accounting.hard("truths"), *accounting.against_dp_accounting(points=1)):
        assert row.value is not None
        assert row.holds is not False or row.unit == "s"


def test_work_takes_turns_there_and_back_after_a_round_that_is_not_counted():
    order = []
    series = in_turns({name: lambda name=name: order.append(name) for name in "abc"}, 2)
    assert "".join(order) == "cba" + "abc" + "cba"
    assert {name: len(spent) for name, spent in series.items()} == {"a": 2, "b": 2, "c": 2}
