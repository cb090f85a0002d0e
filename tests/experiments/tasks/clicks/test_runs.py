"""Runs on clicks, from the command line: what is about their stores, and no other task's."""

import json
import os
import re
import shutil
import signal

import pytest

from dpsgd import resume
from dpsgd.runs import job
from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.stop import STOPPED
from experiments.cli import main
from experiments.tasks.clicks.store import Store
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.clicks.task import Clicks


def arguments(store, out, *more):
    return [
        "train", str(store), "--out", str(out), "--noise-multiplier", "1", "--embedding-dim", "2",
        "--max-buckets", "8", "--hidden", "4", "--no-audit", *more,
        "sampler:balls-and-bins", "--batch-size", "16", "--epochs", "3",
    ]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def short_blocks():
    """A short run has several blocks, and goes on in the program that it began in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "BLOCK_STEPS", 8)
        yield


@pytest.fixture(scope="module")
def stopped_once(store, tmp_path_factory):
    """A run that got SIGTERM in its second block."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    usual = job.train_blocks

    def signalling(*args, **options):
        for count, block in enumerate(usual(*args, **options)):
            if count == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "train_blocks", signalling)
        assert main(arguments(store, out, "--insecure-seed", "3")) == STOPPED
    return out


@pytest.fixture
def stopped(stopped_once, tmp_path):
    """A run of its own that was stopped at step 16 of 30."""
    return shutil.copytree(stopped_once, tmp_path / "run")


def test_given_again_without_the_model_that_its_run_chose_a_task_goes_on_in_the_same_attempt(
    store, stopped
):
    task = Clicks(store, embedding_dim=2, max_buckets=8, hidden=(4,))
    assert task.model is None
    assert resume(stopped, task)["attempts"] == 1


def test_the_digest_of_the_store_lies_in_its_own_file_alone(store, stopped):
    digest = Store.open(store).digest
    assert RunDirectory(stopped).data() == [digest]
    text = (stopped / "ledger.jsonl").read_text()
    assert digest not in text + (stopped / "config.json").read_text()


def test_data_that_were_changed_under_the_same_manifest_are_refused(store, stopped, capsys):
    moved = shutil.copytree(store, stopped.parent / "moved")
    shard = next(moved.glob("*.label"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(content)
    assert main(["resume", str(stopped), "--data", str(moved)]) == 2
    assert "is damaged: its checksum" in capsys.readouterr().err


def other_store(folder, rows=200, **options):
    return synthetic.write_store(folder / "other", rows, seed=1, **options).store


@pytest.mark.short("columns", "hash seed")
@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"rows": 300}, "the task describes itself otherwise"),
        ({"hash_seed": 1}, "was prepared with another hash seed than 0"),
        ({"log": synthetic.LOGS["criteo-search"]}, "holds rows of criteo-search, not of criteo-d"),
    ],
    ids=["rows", "hash seed", "columns"],
)
def test_data_that_do_not_fit_are_refused_before_anything_is_declared(
    stopped, tmp_path, capsys, made, why
):
    other = other_store(tmp_path, **made)
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    assert main(["resume", str(stopped), "--data", str(other.path)]) == 2
    assert re.search(why, capsys.readouterr().err)
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


def test_a_run_resumes_on_its_own_store_alone(store, stopped, tmp_path, capsys):
    other = other_store(tmp_path)
    assert main(["resume", str(stopped), "--data", str(other.path)]) == 2
    assert "the task describes itself otherwise" in capsys.readouterr().err
    moved = shutil.copytree(store, tmp_path / "moved")
    assert main(["resume", str(stopped), "--data", str(moved)]) == 0
    assert RunDirectory(stopped).data() == [Store.open(store).digest]
    assert json.loads((stopped / "report.json").read_text())["attempts"] == 1


def test_rows_of_one_class_are_refused_before_training(store, tmp_path, capsys):
    log = synthetic.LOGS["criteo-display"]
    blocks = [{**rows, "label": 0 * rows["label"]} for rows in Store.open(store).blocks("train")]
    log.format.write(tmp_path / "store", blocks, {})
    assert main(arguments(tmp_path / "store", tmp_path / "run")) == 2
    assert "the validation rows are not of both classes" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
