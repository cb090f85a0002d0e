"""Stores of runs: what is checked of them, and on which one a stopped run goes on."""

import os
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


def other_store(folder, rows=200, **options):
    synthetic.write_store(folder / "other", rows, seed=1, **options)
    return folder / "other"


def test_a_store_that_differs_from_the_run_is_refused(store, tmp_path):
    begun = Clicks(store).describe()
    Clicks(store).check(begun)
    with pytest.raises(ValueError, match="was prepared with hash seed 1, not 0"):
        Clicks(other_store(tmp_path, hash_seed=1)).check(begun)


def test_rows_that_were_changed_or_have_no_metrics_are_refused(store, tmp_path):
    moved = shutil.copytree(store, tmp_path / "moved")
    content = bytearray((moved / "train.label").read_bytes())
    content[-1] ^= 1
    (moved / "train.label").write_bytes(content)
    with pytest.raises(ValueError, match=r"train.label was changed: its checksum"):
        Clicks(moved).check()
    log = synthetic.LOGS["criteo-display"]
    blocks = [{**rows, "label": 0 * rows["label"]} for rows in Store.open(store).blocks("train")]
    log.format.write(tmp_path / "store", blocks, {})
    with pytest.raises(ValueError, match="the validation rows do not include both classes"):
        Clicks(tmp_path / "store").check()


def test_a_stopped_run_resumes_with_its_own_store_at_any_path(store, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(job, "BLOCK_STEPS", 8)  # a short run has several blocks
    sizes, out = {"embedding_dim": 2, "max_buckets": 8, "hidden": (4,)}, tmp_path / "run"
    words = [
        "train", store, "--out", out, "--noise-multiplier", "1", "--embedding-dim", "2",
        "--max-buckets", "8", "--hidden", "4", "--no-audit", "--insecure-seed", "3",
        "sampler:deterministic", "--batch-size", "16", "--epochs", "3",
    ]  # fmt: skip
    usual = job.train_blocks

    def signalling(*args, **options):
        for count, block in enumerate(usual(*args, **options)):
            if count == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield block

    with monkeypatch.context() as patch:
        patch.setattr(job, "train_blocks", signalling)
        assert main([str(word) for word in words]) == STOPPED
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    other = other_store(tmp_path)
    assert main(["resume", str(out), "--data", str(other)]) == 2
    assert "of the task differs from the start of the run" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    digest = Store.open(store).digest
    assert RunDirectory(out).data() == digest
    assert digest not in (out / "ledger.jsonl").read_text() + (out / "config.json").read_text()
    moved = Clicks(shutil.copytree(store, tmp_path / "moved"), **sizes)
    assert moved.model is None  # the run chose it
    assert resume(out, moved)["attempts"] == 1
