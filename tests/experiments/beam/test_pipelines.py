"""Pipelines make the same store, on one machine's runners, and die in one line."""

import pytest

pytest.importorskip("apache_beam", reason="Beam is not installed: see docs/how-to/beam.md")

from dpsgd.engine.batch_files import draw_here
from experiments import cli
from experiments.beam import pipelines
from experiments.beam.draws import drawn_by
from experiments.beam.pipelines import PipelineError, Runner
from experiments.beam.prepare import FaultyFiles, prepare
from experiments.tasks.clicks.encoding import Format
from samplers import Poisson
from tests.experiments.beam import test_draws as drawing
from tests.experiments.beam.conftest import FORMATS, TABLE, contents

RETRYING = "BundleBasedDirectRunner"
"""Runs what raised again, up to four times."""


@pytest.fixture(scope="module")
def local(raw_files, tmp_path_factory):
    out = tmp_path_factory.mktemp("local") / "store"
    FORMATS["criteo-display"].prepare(raw_files["criteo-display"], out)
    return out


@pytest.mark.parametrize("runner", [Runner(), Runner(RETRYING)], ids=lambda runner: runner.name)
@pytest.mark.parametrize("name", FORMATS)
def test_a_pipeline_makes_the_store_of_one_process(raw_files, tmp_path, name, runner):
    FORMATS[name].prepare(raw_files[name], tmp_path / "a")
    out = tmp_path / "b"
    prepare(raw_files[name], out, FORMATS[name], runner.write_store, range_bytes=30_000)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_what_a_runner_repeats_is_neither_lost_nor_doubled(raw_files, local, tmp_path, monkeypatch):
    attempts = []
    parse = Format.columns_of

    def dying(self, *arguments):
        attempts.append(self)
        if len(attempts) in (1, 2, 5):
            raise RuntimeError("the worker died in the midst of its range")
        return parse(self, *arguments)

    monkeypatch.setattr(Format, "columns_of", dying)
    runner, files = Runner(RETRYING), raw_files["criteo-display"]
    prepare(
        files, tmp_path / "s", FORMATS["criteo-display"], runner.write_store, range_bytes=30_000
    )
    assert len(attempts) > 8
    assert contents(tmp_path / "s") == contents(local)


def test_a_failing_worker_ends_the_command_in_one_line(raw_files, tmp_path, monkeypatch):
    def raising(self, *_):
        raise RuntimeError("no way")

    monkeypatch.setattr(Format, "columns_of", raising)
    with pytest.raises(PipelineError, match=r"the pipeline on DirectRunner failed: .*no way"):
        prepare(
            raw_files["criteo-display"],
            tmp_path / "s",
            FORMATS["criteo-display"],
            Runner().write_store,
        )
    assert not list(tmp_path.iterdir())


def test_bad_lines_come_out_of_a_pipeline_by_name(tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_text("x\ny\n")
    with pytest.raises(FaultyFiles, match=r"bad.txt, line 1"):
        prepare([bad], tmp_path / "s", FORMATS["criteo-display"], Runner().write_store)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--runner", "NoRunner"], "Unexpected pipeline runner: NoRunner"),
        (["--beam-options", "no_option=1"], "--beam-options: Beam has no option no_option=1"),
        (["--beam-options", "--x"], "expected NAME=VALUE"),
    ],
)
def test_options_that_beam_does_not_know_are_one_line(raw_files, tmp_path, capsys, words, line):
    (file, *_) = raw_files["criteo-display"]
    asked = ["prepare", "criteo-display", str(file), str(tmp_path / "s"), "--beam"]
    if words[-1] == "--x":
        with pytest.raises(ValueError, match=line):
            Runner(options=("--x",))._options()
        return
    assert cli.main([*asked, *words]) == 2
    assert line in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_command_makes_the_same_store(table_files, raw_files, local, tmp_path, capsys):
    files = [str(file) for file in raw_files["criteo-display"]]
    assert cli.main(["prepare", "criteo-display", *files, str(tmp_path / "a"), "--beam"]) == 0
    assert contents(tmp_path / "a") == contents(local)
    TABLE.prepare(table_files, tmp_path / "b")
    words = ["--label", "y", "--categories", "c", "--numbers", "x", "--beam"]
    tables = [str(file) for file in table_files]
    assert cli.main(["prepare", "csv", *tables, str(tmp_path / "c"), *words]) == 0
    assert contents(tmp_path / "b") == contents(tmp_path / "c")
    assert "left out: z" in capsys.readouterr().out


@pytest.mark.parametrize("runner", [Runner(), Runner(RETRYING)], ids=lambda runner: runner.name)
def test_a_pipeline_draws_the_batches_of_one_process(tmp_path, runner):
    sampler = Poisson(drawing.ROWS, 9_000, 2, max_batch_size=9_050)
    draw = drawing.draw_of(sampler, first_step=2)
    local = drawing.drawn(tmp_path / "local", draw, draw_here)
    by_pipeline = drawn_by(runner.write_batches, drawing.columns)
    assert drawing.drawn(tmp_path / "many", draw, by_pipeline) == local


def test_pipelines_are_quiet_afterwards_as_before():
    import logging

    before = logging.getLogger().level
    Runner()._run(lambda pipeline: pipelines._reshuffled(pipeline, "numbers", [1, 2]))
    assert logging.getLogger().level == before
