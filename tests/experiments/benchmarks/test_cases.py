"""Benchmarks are one table of cases, which one command measures and records."""

import functools
import inspect
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.benchmarks import __main__ as command
from experiments.benchmarks import case
from experiments.benchmarks.case import Case, LeftOut, alone, figure, in_turns
from experiments.benchmarks.cases import CASES

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("bar", "value", "holds"),
    [
        (">= 8", 8.0, True),
        (">= 8", 7.9, False),
        ("<= 1.5", 1.5, True),
        ("<= 1.5", 1.6, False),
        ("<= 1.5", None, None),
        ("<= 1.5", math.nan, False),
        ("", math.inf, False),
        ("", 1.0, None),
    ],
)
def test_a_figure_is_held_to_its_bar(bar, value, holds):
    row = figure("a", value, "s", bar)
    assert row.holds is holds
    assert row.value == (value if value is not None and math.isfinite(value) else None)
    assert ("MISSED" in str(row)) == bool(row.holds is False and bar)


def test_repeated_measurements_give_median_and_standard_error():
    values = [1.0, 2.0, 4.0]
    row = figure("a", values)
    assert row.value == 2.0
    error = math.sqrt(math.pi / 2) * statistics.stdev(values) / math.sqrt(3)
    assert row.error == pytest.approx(error)
    assert figure("a", [1.0]).error is figure("a", 1.0).error is None


def measured(size=3, rounds=2):
    """A function that is measured."""
    yield figure(f"size {size}", rounds, "s", "<= 2")
    yield figure(f"errors of {size}", rounds, "", "<= 2")
    if size == 0:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile trying to allocate")
    if size < 0:
        raise LeftOut("needs a size")


@pytest.fixture(autouse=True)
def own_function(monkeypatch):
    monkeypatch.setattr(case, "measured", measured, raising=False)


@functools.cache
def measure(size, minutes=math.inf, seconds=1.0, rounds=2, **options):
    """The record of one case."""
    one = Case("area", "name", "case.measured", {"size": size, "rounds": rounds}, {}, seconds)
    return command.measured(one, until=time.monotonic() + 60 * minutes, **options)


def test_a_record_has_everything_that_measures_a_figure_again():
    record = measure(8)
    assert command.exit_status([record]) == 0
    assert record["setting"] == {"size": 8, "rounds": 2}
    assert record["command"] == "scripts/bench area -k name"
    assert record["rows"][0] == {
        "name": "size 8", "value": 2.0, "unit": "s", "bar": "<= 2", "holds": True, "error": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "status", "why"),
    [
        ((0, 8), 1, "RuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate"),
        ((-1,), 2, "needs a size"),
        ((-1, 8), 0, "needs a size"),
    ],
)
def test_a_case_that_fails_or_lacks_something_ends_alone(sizes, status, why):
    entries = [measure(size) for size in sizes]
    assert command.exit_status(entries) == status
    assert entries[0]["why"] == why
    assert [len(entry["rows"]) for entry in entries] == [2] * len(sizes)
    assert [entry["status"] for entry in entries][1:] == ["done"] * (len(sizes) - 1)


def test_a_case_that_takes_more_than_the_time_left_is_left_out():
    entry = measure(8, minutes=1, seconds=61.0)
    assert (entry["status"], entry["why"]) == ("left out", "60 s are left, and it takes about 61")


def test_bars_of_speed_are_left_out_in_small():
    entry = measure(8, rounds=3, quick=True)
    assert [row["holds"] for row in entry["rows"]] == [None, False]


@pytest.mark.parametrize("area", command.AREAS)
def test_every_area_lists_cases_with_settings_of_their_functions(area, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main([area, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    found = command.cases_of(area)
    assert len({each.name for each in found}) == len(found)
    for each in found:
        assert each.name in shown
        known = inspect.signature(each.function()).parameters.keys()
        assert {**each.setting, **(each.quick or {})}.keys() <= known, each.name


FOLDERS = [ROOT / name for name in ("accounting", "experiments", "docs")]
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))]
COMMANDS = [
    re.findall(r"scripts/bench ((?:(?!scripts/)[^`#])*)", page.read_text()) for page in PAGES
]


@pytest.mark.parametrize(
    "words", sorted({" ".join(line.split()) for found in COMMANDS for line in found})
)
def test_every_command_in_a_page_measures_cases(words):
    area, *asked = shlex.split(words)
    if area == "AREA":
        return
    options = command.parser_of(area).parse_args(asked)
    assert command.chosen(command.cases_of(area), options.names, options.quick)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["no-such-area"], "invalid choice"),
        (["noise", "-k", "no such case"], "no case"),
        (["noise", "--rounds", "2"], "unrecognized"),
        (["noise", "--minutes", "0"], "greater than 0"),
    ],
)
def test_invalid_commands_are_refused(words, why, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(words)
    assert stop.value.code == 2
    assert why in capsys.readouterr().err


@pytest.mark.long
def test_the_recorded_command_measures_a_case_again(tmp_path):
    file = tmp_path / "folder" / "record.json"
    asked = ["accounting", "-k", "bins 100", "--quick", "--json", str(file)]
    assert command.main(asked) == 0
    (entry,) = map(json.loads, file.read_text().splitlines())
    assert entry["rows"][0]["name"] == "noise multiplier, advantage 0.1, T 100, E 1"
    assert entry["rows"][0]["value"] > 0
    assert entry["command"] == "scripts/bench accounting -k 'advantage, bins 100, epochs 1' --quick"
    assert entry["environment"]["packages"]["jax"]
    assert command.main(["gpu_program"]) == 2


NOT_NEEDED = ("matplotlib", "dp_accounting", "tensorflow_datasets")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("area", sorted({each.area for each in CASES} - {"gpu_program", "size"}))
def test_every_area_is_measured_in_small(area, tmp_path):
    """In a process of its own; the GPU's without what it need not have."""
    file = tmp_path / "record.json"
    words = [area, "--quick", "--json", str(file)]
    hidden = NOT_NEEDED if area == "gpu" else ()
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden!r}))\n"
        f"from experiments.benchmarks.__main__ import main; sys.exit(main({words!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    left_out = [each for each in entries if each.get("why", "").startswith("needs ")]
    done_cases = [each for each in entries if each not in left_out]
    assert {each["status"] for each in done_cases} == {"done"}, done.stdout + done.stderr
    rows = [row for each in done_cases for row in each["rows"]]
    assert not [row for row in rows if row["holds"] is False], done.stdout
    assert all(row["value"] is not None for row in rows)
    assert len(rows) >= len(done_cases)


def test_a_function_alone_returns_its_resources_or_raises():
    answer = alone(math.sqrt, 4)
    assert answer.value == 2
    assert 0 < answer.cpu_seconds < 30 < 1e3 * answer.gigabytes
    with pytest.raises(ValueError, match="math domain error"):
        alone(math.sqrt, -1)


def test_work_takes_turns_after_a_round_that_does_not_count():
    order = []
    series = in_turns({name: lambda name=name: order.append(name) for name in "abc"}, 2)
    assert "".join(order) == "cba" + "abc" + "cba"
    assert {name: len(spent) for name, spent in series.items()} == {"a": 2, "b": 2, "c": 2}
