"""A model that was trained is read back, exported, and asked: whatever its task is."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from readable_task import Readable, readable
from tiny_task import Line

import dpsgd
from dpsgd import RunSpec, load_exported, run
from dpsgd.models import model as models
from dpsgd.models.model import export, read_model
from dpsgd.runs.history import read
from dpsgd.runs.terms import segment_records
from samplers import Deterministic

NAME = "readable_task:Readable"
KINDS = {"readable": NAME}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a run, the model that was exported of it, and rows in a file."""
    home = tmp_path_factory.mktemp("home")
    config = RunSpec.of(Deterministic(160, 16, 1), noise_multiplier=1.0, audit=False)
    run(Readable(data="/secret/place", held_out=Path("/secret/rows")), config, home / "run")
    export(home / "run", home / "model")
    np.savez(home / "rows.npz", **readable.generated(50))
    return home


@pytest.fixture(params=["run", "model"])
def model(home, request):
    return read_model(home / request.param, kinds=KINDS)


def test_a_model_says_of_rows_what_its_parameters_say(home, model):
    rows = readable.generated(50)
    with np.load(home / "run" / "params.npz") as saved:
        (w,) = saved.values()
    expected = rows["x"] @ w
    np.testing.assert_allclose(model.predict({"x": rows["x"]}), expected, rtol=1e-6)
    blocks = [*model.predictions(f"{home}/rows.npz")]
    assert [len(block) for block in blocks] == [20, 20, 10]
    np.testing.assert_allclose(np.concatenate(blocks), expected, rtol=1e-6)
    error = np.square(expected - rows["y"]).mean()
    assert model.evaluate(f"{home}/rows.npz") == {"error": pytest.approx(error, rel=1e-5)}


def test_a_model_has_its_guarantee_and_public_task_description(home, model):
    audit = json.loads((home / "run" / "report.json").read_text())["audit"]
    assert audit.startswith("not made: ")
    stated = json.loads((home / "run" / "guarantee.json").read_text())
    segments = segment_records(read(home / "run" / "ledger.jsonl").parts)
    assert model.guarantee == {**stated, "audit": audit, "segments": segments}
    assert model.description == readable.describe()
    assert model.num_params == 3
    shown = repr(model)
    assert "epsilon in [" in shown
    assert "\n" not in shown
    assert "array" not in shown


def test_a_run_of_somebody_else_executes_no_module_that_it_names(home, monkeypatch):
    monkeypatch.delitem(sys.modules, "readable_task")
    with pytest.raises(ValueError, match="run: the module of its task 'readable_task:Readable' is"):
        read_model(home / "run", kinds={}, execute=False)
    assert "readable_task" not in sys.modules
    assert read_model(home / "run", kinds=KINDS, execute=False).num_params == 3


def test_an_export_holds_no_path(home):
    files = {path.name: path.read_bytes() for path in (home / "model").iterdir()}
    assert sorted(files) == ["guarantee.json", "model.json", "params.npz"]
    assert (home / "run" / "config.json").read_text().count("/secret") == 2
    assert b"secret" not in b"".join(files.values())


@pytest.mark.parametrize("method", ["predict", "predictions", "evaluate"])
def test_a_method_that_a_task_lacks_is_named(home, method):
    lacking = read_model(home / "run", task=Line())
    with pytest.raises(ValueError, match=r"run: its task, a Line, has no method \w+ \(see"):
        getattr(lacking, method)(home / "rows.npz")


def test_files_that_no_task_trains_on_are_no_training_rows(home, monkeypatch):
    run = read_model(home / "run", kinds=KINDS)
    for error in (KeyError("label"), OSError("is a folder"), TypeError("no rows")):
        monkeypatch.setattr(
            Readable, "columns", lambda self, error=error: (_ for _ in ()).throw(error)
        )
        assert not models.trained_on(run, home / "rows.npz", kinds=KINDS)


def test_runs_know_their_training_rows_and_exports_do_not(home, tmp_path):
    run, exported = (read_model(home / name, kinds=KINDS) for name in ("run", "model"))
    assert models.trained_on(run, Path("anywhere"), kinds=KINDS)  # its rows lie nowhere
    assert not models.trained_on(exported, Path("anywhere"), kinds=KINDS)
    other = dataclasses.replace(run, record={**run.record, "settings": {"seed": 1, "data": ""}})
    assert not models.trained_on(other, Path("anywhere"), kinds=KINDS)
    from_run = RunSpec.of(
        Deterministic(160, 16, 1), noise_multiplier=1.0, audit=False, init_from=str(home / "run")
    )
    dpsgd.run(Readable(seed=1), from_run, tmp_path / "next")
    later = read_model(tmp_path / "next", kinds=KINDS)
    for record in (later.record, run.record):
        rows = dataclasses.replace(later, record=record)
        assert models.trained_on(rows, Path("anywhere"), kinds=KINDS)


def test_a_model_loads_with_a_passed_or_an_installed_task(home, monkeypatch):
    for task in (Readable, readable, Readable()):
        assert load_exported(home / "model", task).task == readable
    with pytest.raises(ValueError, match=f"of the task '{NAME}', which no installed package has"):
        load_exported(home / "model")
    monkeypatch.setattr(models, "installed_tasks", lambda: KINDS)
    assert load_exported(str(home / "model")).task == readable
    with pytest.raises(FileNotFoundError, match=r"is not an exported model: it has no model\.json"):
        load_exported(home / "run")


def test_a_task_that_two_packages_have_is_refused_by_naming_both(tmp_path, monkeypatch):
    for number, value in enumerate(["one:Task", "two:Task"]):
        metadata = tmp_path / f"other{number}-1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: other{number}\nVersion: 1\n"
        )
        (metadata / "entry_points.txt").write_text(f"[dpsgd.tasks]\nsame = {value}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"a task same: keep one of (one|two):Task, (one|two)"):
        models.installed_tasks()


def test_a_file_names_installed_tasks_and_imports_no_module(home, tmp_path, monkeypatch):
    bundle = shutil.copytree(home / "model", tmp_path / "bundle")
    monkeypatch.syspath_prepend(bundle)
    (bundle / "planted.py").write_text("raise SystemExit('imported')")
    manifest = json.loads((bundle / "model.json").read_text())
    for name in ("planted", "planted:read", "os:system", "...", None):
        forged = models.Bundle.manifest(bundle, {**manifest["task"], "name": name})
        (bundle / "model.json").write_text(json.dumps(forged))
        with pytest.raises(ValueError, match=r"which no installed package has \(readable\)"):
            read_model(bundle, kinds=KINDS)


def test_a_model_is_read_with_numpy_alone_until_it_is_asked():
    program = (
        "import sys, dpsgd.models.model\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('experiments', 'jax')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_traceable_tasks_have_parameters_read_without_init(home):
    class Huge(Readable):
        def init(self, seed):
            import jax.numpy as jnp

            return {"w": jnp.zeros(10**15, jnp.float32)}

    with pytest.raises(ValueError, match=r"params\.npz: .* the model needs float32"):
        read_model(home / "model", task=Huge())
    assert read_model(home / "model", task=readable).num_params == 3
