"""A run that reads batches which were drawn ahead is the run that draws its own, bit for bit."""

import shutil

import pytest
from tiny_task import assert_same, config_of, line, run_and_stop, short_blocks

from dpsgd import resume, run
from dpsgd.engine import batch_files
from dpsgd.engine.feed import Layout
from dpsgd.runs.attempts import STOP
from dpsgd.runs.history import LedgerError, read
from dpsgd.runs.ledger import Ledger
from dpsgd.runs.run import Run

HOST = {"data_on": "host", "insecure_seed": 3}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that drew its own batches."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with short_blocks():
        run(line, config_of(**HOST), out, name="tiny_task:line")
    return out


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """Several files: of three steps each."""
    monkeypatch.setattr(batch_files, "FILE_BYTES", 3 * 16 * 16)


def refuse_rows(self, data):
    raise AssertionError("a row was read at random")


def test_a_run_on_drawn_batches_is_exact_and_destroys_them(whole, tmp_path, monkeypatch):
    out, folder = tmp_path / "run", tmp_path / "deep" / "batches"
    Run.create(line, config_of(**HOST), out, name="tiny_task:line")
    assert Run.open(out).draw(folder) == 10
    assert not (folder / "seed").exists()
    assert read(out / "ledger.jsonl").attempts[0].steps == range(0, 0)  # nothing is declared
    monkeypatch.setattr(Layout, "hold", refuse_rows)
    resume(out)
    assert_same(out, whole)
    assert not folder.exists()
    assert not {"secret.json", "batches.json", "checkpoints"} & {f.name for f in out.iterdir()}


@pytest.mark.short("at the stop")
@pytest.mark.parametrize("when", ["before the run", "at the stop"])
def test_a_run_that_was_stopped_reads_on_at_the_right_step(whole, tmp_path, monkeypatch, when):
    out, folder = tmp_path / "run", tmp_path / "batches"
    if when == "before the run":
        Run.create(line, config_of(**HOST), out, name="tiny_task:line")
        Run.open(out).draw(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tiny_task.run", lambda task, config, out, **how: resume(out))
            run_and_stop(line, config_of(**HOST), out)
        assert folder.exists()
    else:
        run_and_stop(line, config_of(**HOST), out)
        assert Run.open(out).draw(folder) == 5  # of the 14 steps that are left
    monkeypatch.setattr(Layout, "hold", refuse_rows)
    resume(out)
    assert_same(out, whole)
    assert not folder.exists()


@pytest.mark.short("stopped")
@pytest.mark.parametrize("begun", [True, False], ids=["begun", "stopped"])
def test_batches_belong_to_the_attempt_that_drew_them(tmp_path, monkeypatch, begun):
    out, folder = tmp_path / "run", tmp_path / "batches"
    if begun:
        Run.create(line, config_of(data_on="host"), out, name="tiny_task:line")
    else:
        run_and_stop(line, config_of(data_on="host"), out)
    Run.open(out).draw(folder)
    stop = (out / STOP).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Layout, "hold", refuse_rows)
        assert resume(shutil.copytree(out, tmp_path / "copy"))["attempts"] == 1
    Run.open(out).draw(folder)  # again, as a run that ends destroys them
    (out / STOP).unlink()  # as a process that is killed would have
    with Ledger.open(out / "ledger.jsonl") as ledger:
        first = ledger.history.attempts[0].steps.stop
        ledger.declare(range(first, first + 8))
    (out / STOP).write_bytes(stop)
    remedy = r"draw them again.*or remove .*/batches and .*batches\.json"
    with pytest.raises(ValueError, match=f"another attempt.*{remedy}"):
        resume(out)
    Run.open(out).draw(folder)
    assert resume(out)["attempts"] == 2  # the second one had taken no step
    assert not folder.exists()


def test_drawing_that_dies_leaves_no_secret_and_is_done_again(whole, tmp_path):
    out = run_and_stop(line, config_of(**HOST), tmp_path / "run")
    folder = tmp_path / "batches"

    def dying(path, of, seed, data):
        batch_files.save_seed(path, seed)
        (path / ".00000000.batches.0123").write_bytes(b"half")
        raise RuntimeError("the worker died")

    with pytest.raises(RuntimeError):
        Run.open(out).draw(folder, write=dying)
    assert not folder.exists()

    def killed(path, of, seed, data):
        batch_files.save_seed(path, seed)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_files, "forget", lambda *_: None)  # as a process that is gone does not
        with pytest.raises(KeyboardInterrupt):
            Run.open(out).draw(folder, write=killed)
    assert (folder / "seed").exists()
    Run.open(out).draw(folder)
    resume(out)
    assert_same(out, whole)
    assert not folder.exists()


def test_what_lies_at_the_folder_is_left_as_it_is(tmp_path):
    out = run_and_stop(line, config_of(**HOST), tmp_path / "run")
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("seed", "1.batches", "batches.json"):
        (folder / name).write_text("mine")
    with pytest.raises(FileExistsError, match="left as it is"):
        Run.open(out).draw(folder)
    resume(out)
    assert {file.read_text() for file in folder.iterdir()} == {"mine"}


def test_batches_are_drawn_for_unfinished_runs_on_host_rows_only(whole, tmp_path):
    out = tmp_path / "run"
    Run.create(line, config_of(), out)
    with pytest.raises(ValueError, match="begin the run with data_on='host'"):
        Run.open(out).draw(tmp_path / "batches")
    assert not (tmp_path / "batches").exists()
    assert Run.open(whole).draw(tmp_path / "batches") is None


def test_a_resumed_run_destroys_leftover_batches(tmp_path):
    out, folder = tmp_path / "run", tmp_path / "batches"
    Run.create(line, config_of(**HOST), out, name="tiny_task:line")
    Run.open(out).draw(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpsgd.runs.directory.RunDirectory.forget", lambda self: None)
        resume(out)
    with Ledger.open(out / "ledger.jsonl"), pytest.raises(LedgerError, match="another process"):
        resume(out)  # which may be writing there
    assert folder.exists()
    resume(out)
    assert not folder.exists()
    assert not (out / STOP).exists()
    with Ledger.open(out / "ledger.jsonl"):
        resume(out)  # nothing is left to write
