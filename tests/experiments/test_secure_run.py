"""`dpsgd train --secure-noise` from store to report: stopped, resumed, and honest about it."""

import functools
import json
import os
import shutil
import signal

import pytest

from dpsgd.runs.stop import STOPPED
from experiments import train as training
from experiments.cli import main


def arguments(store, out, *more):
    return [
        "train", str(store), "--out", str(out), "--embedding-dim", "2", "--max-buckets", "8",
        "--hidden", "4", *more, "sampler:balls-and-bins", "--batch-size", "16", "--epochs", "2",
    ]  # fmt: skip


SECURE = ("--noise-multiplier", "1", "--secure-noise", "--insecure-seed", "3")


@pytest.fixture(autouse=True, scope="module")
def short_blocks():
    with pytest.MonkeyPatch.context() as patch:
        blocks = functools.partial(training.train_blocks, block_steps=8)
        patch.setattr(training, "train_blocks", blocks)
        yield


@pytest.fixture(scope="module")
def stopped(store, tmp_path_factory):
    """A run that got SIGTERM in its second block."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    blocks = training.train_blocks

    def signalling(*arguments, **options):
        for count, block in enumerate(blocks(*arguments, **options)):
            if count == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield block

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "train_blocks", signalling)
        assert main(arguments(store, out, *SECURE)) == STOPPED
    return out


def test_a_stopped_secure_run_goes_on_to_the_bits_of_an_undisturbed_one(store, stopped, tmp_path):
    cut = shutil.copytree(stopped, tmp_path / "cut")
    assert main(["resume", str(cut)]) == 0
    assert main(arguments(store, tmp_path / "whole", *SECURE)) == 0
    for name in ("params.npz", "ledger.jsonl", "guarantee.json"):
        assert (cut / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_a_secure_run_says_what_its_guarantee_covers(store, tmp_path):
    records = {}
    for kind in (["--secure-noise"], []):
        out = tmp_path / f"run{len(records)}"
        assert main(arguments(store, out, "--target-epsilon", "3", "--no-audit", *kind)) == 0
        records[bool(kind)] = json.loads((out / "report.json").read_text())
        report = (out / "report.md").read_text()
        assert ("| sums and noise | exact, cryptographic |" in report) == bool(kind)
        assert ("floating point" in report) != bool(kind)
        assert json.loads((out / "ledger.jsonl").open().readline())["noise"]["name"] == (
            "secure" if kind else "independent"
        )
    assert records[True]["guarantee"] == records[False]["guarantee"]
    assert records[True]["secure_noise"]
    assert len(records[True]["not_covered"]) == len(records[False]["not_covered"]) - 1


def test_a_run_does_not_change_its_kind_of_noise_on_the_way(stopped, tmp_path, capsys):
    run = shutil.copytree(stopped, tmp_path / "run")
    config = run / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"secure_noise": true', '"secure_noise": false'))
    ledger = (run / "ledger.jsonl").read_bytes()
    assert main(["resume", str(run)]) == 2
    said = capsys.readouterr().err
    assert "begun with secure noise and goes on only so" in said
    assert said.count("\n") == 1
    assert (run / "ledger.jsonl").read_bytes() == ledger


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--non-private"], "--non-private has none"),
        (["--noise-multiplier", "1e-9"], "too small for a batch of 49 in the secure mode"),
    ],
)
def test_what_cannot_be_secure_is_refused_before_the_run_directory_is_made(
    store, tmp_path, capsys, asked, message
):
    assert main(arguments(store, tmp_path / "run", "--secure-noise", *asked)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
