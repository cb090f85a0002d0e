"""What the README shows is what happens."""

import contextlib
import functools
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from accounting import Bound
from dpsgd import Mechanism, Segment, cost, statistics
from dpsgd.audit.report import AuditReport
from dpsgd.runs.bundle import GUARANTEE, MODEL, Bundle
from dpsgd.runs.directory import RunDirectory
from experiments import cli
from experiments.benchmarks.case import Row
from experiments.benchmarks.record import read
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import ModelConfig
from experiments.tasks.clicks.task import DescribedClicks
from samplers import Deterministic, Shuffle

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [
    (ROOT / "docs/explanation/results" / name).read_text()
    for name in ("papers.md", "correlated.md")
]
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
EXAMPLES = [text for text in BLOCKS if not text.startswith("# my_task.py")]
[OWN_TASK] = [text for text in BLOCKS if text.startswith("# my_task.py")]


@pytest.fixture(scope="module", autouse=True)
def exported_model(tmp_path_factory):
    """A folder to run in, with what `dpsgd export` writes: here the model before any training."""
    home = tmp_path_factory.mktemp("home")
    sizes = ModelConfig(embedding_dim=2, max_buckets=16, hidden=(4,))
    task = DescribedClicks(sizes, DISPLAY_ADS, 0)
    record = {"name": "clicks", "settings": {}, "description": task.describe()}
    mechanism = Mechanism(Deterministic(100, 10, 1), noise_multiplier=1.0, l2_clip_norm=1.0)
    with RunDirectory.create(home / "model") as bundle:
        bundle.write_params(task.init(0))
        bundle.write_json(GUARANTEE, cost([Segment(mechanism)], 1e-3).record())
        bundle.write_json(MODEL, Bundle.manifest(bundle.path, record))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        yield


@functools.cache
def run(number, audited=False):
    """(the names that an example defines, what it prints)."""
    namespace: dict = {}
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        pytest.MonkeyPatch.context() as patch,
    ):
        if not audited:
            for name in ("runs.audit.audit_program", "runs.audit.audit_queries"):
                patch.setattr(f"dpsgd.{name}", lambda *of, **how: AuditReport(()))
            patch.setattr(statistics, "audit_program", lambda *of, **how: AuditReport(()))
        exec(compile(EXAMPLES[number], "README.md", "exec"), namespace)
    return namespace, printed.getvalue()


@pytest.mark.short("0", "3", "4", "5")
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_every_python_example_runs_and_prints_a_guarantee(number):
    _, printed = run(number)
    assert re.search(r"\[\d+\.\d+, \d+\.\d+\]", printed)


@pytest.mark.long
@pytest.mark.parametrize("number", [i for i, text in enumerate(EXAMPLES) if " = train(" in text])
def test_every_example_that_trains_passes_its_audit(number):
    run(number, audited=True)


def test_the_example_of_an_exported_model_predicts_a_probability_for_each_row():
    (number,) = (i for i, text in enumerate(EXAMPLES) if "load_exported" in text)
    namespace, printed = run(number)
    predicted = namespace["model"].predict(namespace["rows"])
    assert predicted.shape == (2,)
    assert all(0 < probability < 1 for probability in predicted)
    assert str(predicted) in printed


def test_the_library_example_reaches_a_certified_two_and_learns():
    namespace, _ = run(0)
    guarantee = namespace["guarantee"]
    assert 1.99 < guarantee.epsilon.upper <= 2.0
    kernel = namespace["params"]["kernel"][...]
    assert kernel[0, 0] > 0.2 > -0.2 > kernel[1, 0]


DRIVER = """
import os, sys
from dpsgd.runs import job
from dpsgd.runs.ledger import Ledger
from experiments import cli
from experiments.benchmarks.case import Row
from experiments.benchmarks.record import read

job.BLOCK_STEPS = 8

def die_in_the_fourth_declaration():
    declare, times = Ledger.declare, iter(range(3))
    def declare_or_die(ledger, steps):
        if next(times, None) is None:
            os.kill(os.getpid(), 9)
        declare(ledger, steps)
    Ledger.declare = declare_or_die

train, resume = sys.argv[1:]
train += " --insecure-seed 1 --checkpoint-seconds 0 --no-audit"
child = os.fork()
if not child:
    die_in_the_fourth_declaration()
    os._exit(cli.main(train.split()))
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == -9, status
for line in (resume, train.replace("--out run", "--out undisturbed")):
    assert cli.main(line.split()) == 0
"""


@pytest.mark.long
def test_the_own_task_of_the_readme_is_trained_by_its_command(tmp_path, monkeypatch):
    (tmp_path / "my_task.py").write_text(OWN_TASK)
    [train] = re.findall(r"^dpsgd (train --task my_task:task .*)$", README, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main([*train.split(), "--no-audit"]) == 0
    monkeypatch.delitem(sys.modules, "my_task")
    metrics = json.loads((tmp_path / "run" / "report.json").read_text())["metrics"]
    assert metrics["test_accuracy"] > 0.6


@pytest.mark.long
def test_the_own_task_of_the_readme_killed_and_resumed_ends_bit_for_bit_the_same(tmp_path):
    (tmp_path / "my_task.py").write_text(OWN_TASK)
    [train] = re.findall(r"^dpsgd (train --task my_task:task .*)$", README, re.MULTILINE)
    [resume] = {line.split(" #")[0] for line in re.findall(r"^dpsgd (resume .*)$", README, re.M)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRIVER, train, resume.strip()],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("params.npz", "ledger.jsonl", "guarantee.json"):
        found = (tmp_path / "run" / name).read_bytes()
        assert found == (tmp_path / "undisturbed" / name).read_bytes(), name
    metrics = json.loads((tmp_path / "run" / "report.json").read_text())["metrics"]
    assert metrics["test_accuracy"] > 0.6


def recorded(area):
    """The rows of an area's record by name, the first case with a name first; all bars hold."""
    entries = read(ROOT / f"experiments/records/{area}.json")["cases"]
    rows = [Row(**row) for entry in entries for row in entry["rows"]]
    assert all(row.holds is not False for row in rows)
    return {row.name: row for row in reversed(rows)}


def shown(row):
    """A mean as tables have it."""
    return f"{row.value:.4f} ± {row.error:.4f}"


def results_of(sweep, **where):
    """The recorded grid points of a sweep that have these values."""
    record = json.loads((ROOT / "experiments/records/sweeps.json").read_text())
    [found] = [s["results"] for s in record["sweeps"] if s["command"].split()[2] == sweep]
    return [point for point in found if all(point.get(k) == v for k, v in where.items())]


def auc_of(point):
    mean, sd = point["test_auc"]
    return f"{mean:.4f} ± {sd:.4f}"


def table_rows(first_cell):
    """(label, {column: cell}) of each row of the table that begins with `first_cell`."""
    [page] = [text for text in (README, *PAGES) if f"\n| {first_cell}" in text]
    lines = page[page.index(f"\n| {first_cell}") + 1 :].split("\n\n")[0].splitlines()
    header, _, *rows = ([cell.strip("* ") for cell in line.split("|")[1:-1]] for line in lines)
    return [(label, dict(zip(header[1:], cells, strict=True))) for label, *cells in rows]


def test_the_table_of_samplers_is_what_was_recorded():
    rows = table_rows("| deterministic | shuffle | Poisson | balls-and-bins |")
    assert len(rows) == 11
    for label, cells in rows:
        for column, cell in cells.items():
            words = label.split()
            if label == "no clipping, no noise":
                points = results_of("equal-noise-1024", noise_multiplier=0.0)
            elif words[0] == "sigma":
                points = results_of("equal-noise-1024", noise_multiplier=float(words[1]))
            else:
                asked = float(words[words.index("epsilon") + 1])
                points = results_of("equal-privacy", target_epsilon=asked)
            [point] = [p for p in points if p["sampler"].split()[0] == column.lower()]
            recorded = {
                "noise": f"{point['noise_multiplier']:.3f}",
                "certified": f"{Bound(point['epsilon_lower'], point['epsilon_upper']):.3f}"
                if "epsilon_lower" in point
                else "",
            }
            assert cell == recorded.get(words[0], auc_of(point)), (label, column)


def test_what_is_said_of_shuffling_is_what_is_certified():
    for target, pages in ((3.0, PAGES[:1]), (1.0, (README, PAGES[0]))):
        [point] = results_of("equal-privacy", target_epsilon=target, sampler="shuffle")
        interval = f"{Bound(point['epsilon_lower'], point['epsilon_upper']):.3f}"
        for page in pages:
            said = [line for line in page.splitlines() if not line.startswith("|")]
            assert interval in " ".join(" ".join(said).split())
    least, enough = re.search(
        r"noise that\s+epsilon 1 takes lies between ([\d.]+) and ([\d.]+)", PAGES[0]
    ).groups()
    assert enough == f"{point['noise_multiplier']:.2f}"
    sampler = Shuffle(88_000, point["batch_size"], point["epochs"])
    assert sampler.privacy(float(least)).epsilon(point["delta"]).lower > 1


def test_the_table_of_epochs_is_what_was_recorded():
    rows = table_rows("batch 1,024, learning rate 0.01")
    assert len(rows) == 2
    for label, cells in rows:
        asked = {"target_epsilon": float(label.split()[1]), "batch_size": 1024}
        for column, cell in cells.items():
            epochs = int(column.split()[0])
            points = results_of("fixed-guarantee", **asked, learning_rate=1e-2, epochs=epochs)
            assert cell in [auc_of(point) for point in points], (label, column)


def test_the_table_of_click_models_is_what_was_recorded():
    found = recorded("useful")
    rows = table_rows("| test AUC | log loss | predicted / observed | command |")
    assert [label for label, _ in rows] == ["no privacy", "epsilon 8", "epsilon 3", "epsilon 1"]
    for label, cells in rows:
        for figure, column in (("AUC", "test AUC"), ("log loss", "log loss")):
            assert cells[column] == shown(found[f"{figure}, {label}, test rows"])
        level = found[f"predicted / observed, {label}, test rows"].value
        assert cells["predicted / observed"] == f"{level:.3f}"


def test_the_table_of_models_with_lazy_tables_is_what_was_recorded():
    measured = recorded("tables")
    rows = table_rows("10 epochs, batch 1,024 |")
    assert [label for label, _ in rows] == ["lazy tables", "Adam alone"]
    for epsilon in ("epsilon 8", "epsilon 3", "epsilon 1"):
        at = f"{epsilon}, batch 1024, 10 epochs"
        for by, cells in rows:
            assert cells[epsilon] == shown(measured[f"AUC, test rows, {by}, {at}"])
        apart = f"AUC, lazy tables minus Adam alone, test rows, {at}, less 2 standard errors"
        assert measured[apart].holds is True


def test_the_tables_of_correlated_noise_are_what_was_recorded():
    from experiments.benchmarks.models import adam_default, few_steps

    measured = recorded("correlated")
    value = {name: row.value for name, row in measured.items()}
    sums = table_rows("bands | sigma, epsilon 1 |")
    assert [label for label, _ in sums] == ["1", "16", "64", "256", "1,024"]
    for label, cells in sums:
        bands = int(label.replace(",", ""))
        for column, cell in cells.items():
            figure, epsilon = column.split(", epsilon ")
            name = "noise multiplier" if figure == "sigma" else "error / that of b 1, optimised"
            [found] = [
                x
                for row, x in value.items()
                if row.startswith(f"{name}, T ") and row.endswith(f"b {bands}, epsilon {epsilon}")
            ]
            assert cell == f"{found:.3f}", (label, column)
    models = table_rows("88 steps an epoch, 10 epochs |")
    assert len(models) == 7
    for label, cells in models:
        for epsilon in (8.0, 3.0, 1.0):
            setting = few_steps(epsilon).get(label)
            what = f"88 steps an epoch, {label}: {setting}"
            if setting is None:
                assert label.startswith("Adam's default")
                what = f"Adam's default: {adam_default(epsilon)}"
            name = f"AUC, test rows, {what}"
            assert cells[f"epsilon {epsilon:g}"] == shown(measured[name]), (label, epsilon)
            best = f"AUC, test rows, the best of SGD with independent noise: epsilon {epsilon:g},"
            [independent] = [x for row, x in value.items() if row.startswith(best)]
            named = {"SGD with 22 bands": value[name], "SGD with independent noise": independent}
            if label in named or setting is None:
                assert f"{named.get(label, value[name]):.4f}" in README, (label, epsilon)
