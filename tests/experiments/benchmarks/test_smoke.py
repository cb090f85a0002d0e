"""Benchmarks keep one contract, and their exit status says whether every bar holds."""

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from accounting import PoissonProfile
from experiments import benchmarks
from experiments.benchmarks import (
    accounting,
    accounting_hard,
    correlated,
    gpu_program,
    ingest,
    noise,
    samplers,
    step,
    tables,
    train,
    useful,
)
from experiments.benchmarks.rows import Row, merged, report
from experiments.benchmarks.timing import in_turns


def test_rows_are_written_with_the_five_agreed_keys(tmp_path):
    file = tmp_path / "rows.json"
    assert report([Row.at_least("a", 9.0, "x", 8.0), Row("b", 1.0, "s")], file) == 0
    first, second = json.loads(file.read_text())
    assert first == {"name": "a", "value": 9.0, "unit": "x", "bar": ">= 8", "holds": True}
    assert second == {"name": "b", "value": 1.0, "unit": "s", "bar": "", "holds": None}


def test_a_part_that_is_measured_again_takes_the_place_of_its_rows(tmp_path):
    file = tmp_path / "rows.json"
    report(merged([Row("a", 1.0, "s"), Row("b", 1.0, "s")], file), file)
    report(merged([Row("b", 2.0, "s"), Row("c", 2.0, "s")], file), file)
    found = {row["name"]: row["value"] for row in json.loads(file.read_text())}
    assert found == {"a": 1.0, "b": 2.0, "c": 2.0}


@pytest.mark.parametrize(
    ("row", "holds"),
    [
        (Row.at_least("a", 8.0, "x", 8.0), True),
        (Row.at_least("a", 7.9, "x", 8.0), False),
        (Row.at_most("a", 1.5, "s", 1.5), True),
        (Row.at_most("a", 1.6, "s", 1.5), False),
        (Row.at_most("a", None, "s", 1.5), None),
    ],
)
def test_a_missed_bar_fails_and_an_unmeasured_one_does_not(row, holds, capsys):
    assert row.holds is holds
    assert report([row], None) == (1 if holds is False else 0)
    assert ("NO" in capsys.readouterr().out) == (holds is False)


NAMES = sorted(
    file.stem
    for file in Path(benchmarks.__path__[0]).glob("*.py")
    if "\ndef main(" in file.read_text()
)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_says_what_it_can_be_asked_for(name, capsys):
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"experiments.benchmarks.{name}").main(["--help"])
    assert stop.value.code == 0
    assert f"usage: bench {name} " in capsys.readouterr().out


@pytest.mark.long
def test_accounting_benchmark_measures_ours_without_the_peer(tmp_path, capsys):
    file = tmp_path / "rows.json"
    accounting.main(["--repetitions", "1", "--json", str(file)])
    rows = {row["name"]: row for row in json.loads(file.read_text())}
    assert rows["interval's width, sigma 0.5, T 36000"]["holds"]
    assert rows["interval's width, sigma 0.1, T 36000"]["holds"]
    assert "--peer-python" in capsys.readouterr().out
    assert sum(row["value"] is None for row in rows.values()) == 6


def test_a_hard_question_is_answered_in_its_own_process_and_a_crash_is_a_missed_bar():
    answer = accounting_hard.ask("P(1., .01, 10).epsilon(1e-5)")
    assert answer.value == PoissonProfile(1.0, 0.01, 10).epsilon(1e-5)
    assert 0 < answer.seconds < 10 < answer.megabytes
    assert accounting_hard.ask("1 / 0").failure == "ZeroDivisionError: division by zero"


@pytest.mark.long
def test_hard_questions_are_drawn_and_compared():
    for rows in (
        accounting_hard.random_points(3),
        accounting_hard.against_dp_accounting(1, lambda work: (work(), 1.0)),
    ):
        assert all(row.value is not None for row in rows)


@pytest.mark.short("*useful*")
@pytest.mark.parametrize(
    ("benchmark", "measured"),
    [
        pytest.param(
            noise,
            ["noise, 1.04858M coordinates", "secure noise, 1.04858M coordinates (scaled)"],
            marks=pytest.mark.long,
        ),
        (useful, ["noise multiplier, advantage 0.1, T 100, E 1"]),
        pytest.param(
            train,
            ["dpsgd train / bare loop, small, 0.228M parameters, batch 1024"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            step,
            ["DP / non-private step, 1M, batch 256", "noise alone, 1M, batch 256"],
            marks=pytest.mark.long,
        ),
        pytest.param(
            correlated,
            [
                "error, optimised / banded square root, T 36000, b 16",
                "simulated / certified delta, E 1, gradients constant, first group",
                "refused: shuffling that is redrawn",
                "step of SGD, b 16 / b 1, 1M parameters, batch 256",
            ],
            marks=pytest.mark.long,
        ),
        pytest.param(
            samplers, ["draw of an epoch, Poisson, n 1M, batch 1024"], marks=pytest.mark.long
        ),
        pytest.param(
            ingest,
            [f"rows of raw text prepared, criteo-{name}" for name in ("display", "search")],
            marks=pytest.mark.long,
        ),
    ],
)
def test_quick_benchmarks_measure_positive_figures(benchmark, measured, tmp_path):
    file = tmp_path / "rows.json"
    benchmark.main(["--quick", "--json", str(file)])
    rows = {row["name"]: row["value"] for row in json.loads(file.read_text())}
    assert all(rows[name] > 0 for name in measured)
    # A share is a difference of two measured times.
    measured_alone = [name for name in rows if not name.startswith(("Opacus", "share"))]
    assert all(rows[name] > 0 for name in measured_alone)


@pytest.mark.long
def test_lazy_tables_are_measured_in_small(tmp_path):
    file, parts = tmp_path / "rows.json", ("law", "steps", "sizes", "crossover", "lazydp", "epoch")
    assert tables.main(["--quick", "--parts", *parts, "--json", str(file)]) == 0
    assert all(row["value"] is not None for row in json.loads(file.read_text()))


@pytest.mark.long
def test_a_few_sound_audits_pass_and_are_quick():
    """In a process of its own: checking the types of every call takes as long as the audit."""
    command = [sys.executable, "-m", "experiments.benchmarks.audit", "--quick"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_work_takes_turns_there_and_back_after_a_round_that_is_not_counted():
    order = []
    series = in_turns({name: lambda name=name: order.append(name) for name in "abc"}, 2)
    assert "".join(order) == "cba" + "abc" + "cba"
    assert {name: len(spent) for name, spent in series.items()} == {"a": 2, "b": 2, "c": 2}


GPU_PROGRAM = """
%fused_scatter (p: f32[9,2], q: s32[3]) -> f32[9,2] {
  ROOT %scatter.1 = f32[9,2]{1,0} scatter(%p, %q, %r), to_apply=%add
}

ENTRY %main.1 (a.1: f32[9,2], b.1: s32[3]) -> (f32[9,2], s32[]) {
  %a.1 = f32[9,2]{1,0} parameter(0), metadata={op_name="a"}
  %b.1 = s32[3]{0} parameter(1)
  %pair = (f32[9,2]{1,0}, s32[]) fusion(%a.1, %b.1), kind=kLoop, calls=%fused_other
  %first = f32[9,2]{1,0} get-tuple-element(%pair), index=0
  %rows = f32[9,2]{1,0} fusion(%first, %b.1), kind=kInput, calls=%fused_scatter
  %second = s32[] get-tuple-element(%pair), index=1
  ROOT %tuple.1 = (f32[9,2]{1,0}, s32[]) tuple(%rows, %second)
}
"""


def test_kernels_of_a_gpu_program_are_its_fusions_with_the_shapes_they_read_and_write():
    pair, rows = gpu_program.kernels(GPU_PROGRAM)
    assert (pair.name, pair.written, pair.body) == ("pair", ["f32[9,2]", "s32[]"], "")
    assert (rows.written, rows.read) == (["f32[9,2]"], ["f32[9,2]", "s32[3]"])
    assert " scatter(" in rows.body


def test_without_the_plugin_the_gpu_program_says_what_is_missing(capsys):
    if importlib.util.find_spec("jax_plugins") is not None:
        pytest.skip("jax_plugins is installed")
    assert gpu_program.main([]) == 2
    assert "CUDA plugin" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_what_runs_over_several_devices_must_be_holds_in_small(tmp_path):
    file = tmp_path / "scale.json"
    words = ["-m", "experiments.benchmarks.scale", "--quick", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, *words], cwd=Path(__file__).parents[3], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())
    assert all(row["holds"] is not False for row in rows)
    assert sum(row["holds"] is True for row in rows) > 15
