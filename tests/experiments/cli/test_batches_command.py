"""`dpsgd batches`: a run that is begun, drawn ahead and resumed ends in the bits of a run."""

from importlib.util import find_spec

import pytest

LACKS_BEAM = pytest.mark.skipif(
    find_spec("apache_beam") is None, reason="Beam is not installed: see docs/how-to/beam.md"
)
HOW = "sampler:poisson --batch-size 16 --epochs 1 --noise-multiplier 1 --l2-clip-norm 1"
OTHERS = "--learning-rate 0.001 --data-on host --insecure-seed 1 --no-audit --max-buckets 16"


@pytest.mark.long
@pytest.mark.parametrize("by", [[], pytest.param(["--beam"], marks=LACKS_BEAM)], ids=str)
def test_begin_batches_resume_is_train(store, tmp_path, command, by):
    train = ["train", store, *HOW.split(), *OTHERS.split(), "--hidden", "2", "--embedding-dim", "1"]
    command(*train, "--out", tmp_path / "whole")
    begun = command(*train, "--out", tmp_path / "run", "--begin")
    assert f"created; to train it: dpsgd resume {tmp_path / 'run'}" in begun
    drawn = command("batches", tmp_path / "run", tmp_path / "batches", *by)
    assert f"1 file in {tmp_path / 'batches'}" in drawn
    command("resume", tmp_path / "run")
    for name in ("params.npz", "ledger.jsonl", "guarantee.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "batches").exists()
    over = command("batches", tmp_path / "run", tmp_path / "batches")
    assert "the run is finished and needs no batches: dpsgd report" in over
    assert not (tmp_path / "batches").exists()


def test_what_cannot_be_drawn_is_one_line(tmp_path, command):
    words = "batches", tmp_path / "none", tmp_path / "b"
    assert "is not a run directory" in command.refuses(*words)
    alone = "--runner and --beam-options are for a pipeline: add --beam"
    assert alone in command.refuses(*words, "--runner", "X")


def test_notes_about_a_run_stay_in_the_output(tmp_path, command, monkeypatch):
    class Finished:
        def draw(self, path, write):
            return None

    def open_run(path, task, *, placement, progress):
        progress("note: the run is finished, and no data are read")
        return Finished()

    monkeypatch.setattr("experiments.cli.commands.runs.task_of", lambda run, data: None)
    monkeypatch.setattr("dpsgd.Run.open", open_run)
    shown = command("batches", tmp_path / "run", tmp_path / "batches")
    assert "note: the run is finished, and no data are read" in shown.splitlines()
