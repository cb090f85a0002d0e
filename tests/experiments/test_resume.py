"""A run that stops goes on as if it had not, is counted exactly, and tells nobody its secrets."""

import functools
import json
import math
import os
import re
import resource
import shutil
import signal
import stat
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from accounting import epsilon
from dpsgd import RootKey
from dpsgd.runs.directory import DATA, DIAGNOSTICS, RunDirectory
from dpsgd.runs.ledger import Ledger, read
from dpsgd.runs.records import build
from dpsgd.runs.stop import STOPPED, stop_requests
from experiments import fingerprint, recorded
from experiments import train as training
from experiments.cli import config, main
from experiments.reports.overview import overview
from experiments.tasks.clicks.metrics import BinaryMetrics
from experiments.tasks.clicks.sizes import ModelConfig
from experiments.tasks.clicks.store import Store
from experiments.tasks.clicks.synthetic import rows as synthetic

BLOCK = 8


@pytest.fixture(autouse=True, scope="module")
def short_blocks():
    with pytest.MonkeyPatch.context() as patch:
        blocks = functools.partial(training.train_blocks, block_steps=BLOCK)
        patch.setattr(training, "train_blocks", blocks)
        yield


def arguments(store, out, *more):
    return [
        "train", str(store), "--out", str(out), "--noise-multiplier", "1", "--embedding-dim", "2",
        "--max-buckets", "8", "--hidden", "4", *more,
        "sampler:balls-and-bins", "--batch-size", "16", "--epochs", "3",
    ]  # fmt: skip


class Signalling:
    """Blocks of training, with the second of which the process gets SIGTERM."""

    def __init__(self, blocks):
        self.blocks = blocks

    def __call__(self, *args, **options):
        for count, block in enumerate(self.blocks(*args, **options)):
            if count == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            yield block


def train_and_stop(store, out, *more):
    """Trains until SIGTERM after the second block, 16 of 30 steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "train_blocks", Signalling(training.train_blocks))
        return main(arguments(store, out, *more))


@pytest.fixture(scope="module")
def stopped_once(store, tmp_path_factory):
    out = tmp_path_factory.mktemp("stopped") / "run"
    assert train_and_stop(store, out) == STOPPED
    return out


@pytest.fixture
def stopped(stopped_once, tmp_path):
    """A run of its own that was stopped at step 16 of 30."""
    return shutil.copytree(stopped_once, tmp_path / "run")


@pytest.fixture(scope="module")
def finished(stopped_once, tmp_path_factory):
    run = shutil.copytree(stopped_once, tmp_path_factory.mktemp("finished") / "run")
    assert main(["resume", str(run)]) == 0
    return run


# --- Stopping and going on -----------------------------------------------------------------------


@contextmanager
def option(name, value):
    usual = jax.config.values[name]
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, usual)


@pytest.mark.parametrize(
    "option",
    [
        jax.enable_x64(True),
        jax.default_matmul_precision("highest"),
        jax.threefry_partitionable(False),
        jax.default_prng_impl("rbg"),
        option("jax_random_seed_offset", 1),
        option("jax_disable_most_optimizations", True),
        option("jax_optimization_level", "O1"),
        option("jax_exec_time_optimization_effort", -1.0),
    ],
)
def test_an_option_that_changes_numbers_changes_the_fingerprint(option):
    before = fingerprint.jax_options()
    with option:
        assert fingerprint.jax_options() != before
    assert fingerprint.jax_options() == before


def test_a_stopped_run_goes_on_to_the_bits_of_an_undisturbed_one(store, tmp_path, capsys):
    seed = ["--insecure-seed", "3"]
    assert main(arguments(store, tmp_path / "whole", *seed)) == 0
    assert train_and_stop(store, tmp_path / "cut", *seed) == STOPPED
    assert "stopped at step 16 of 30" in capsys.readouterr().err
    assert main(["resume", str(tmp_path / "cut")]) == 0
    for name in ("params.npz", "ledger.jsonl", "guarantee.json", DIAGNOSTICS):
        cut, whole = ((tmp_path / run / name).read_bytes() for run in ("cut", "whole"))
        assert cut == whole, name


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.default_int_handler])
def test_the_signals_mean_again_what_they_meant(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with stop_requests() as stop:
            assert not stop()
            signal.raise_signal(signal.SIGINT)
            assert stop()
            assert signal.getsignal(signal.SIGINT) is handler  # a second one is not held up
        assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with stop_requests() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_that_stopped_keeps_what_it_needs_and_says_what_it_cost(stopped, capsys):
    assert {path.name for path in stopped.iterdir()} == {
        "audit.json", "config.json", "environment.json", "guarantee.json", "ledger.jsonl",
        "root.key", "checkpoints", DATA, DIAGNOSTICS,
    }  # fmt: skip
    assert main(["ledger", str(stopped)]) == 0
    said = capsys.readouterr().out
    assert "generation 0: 16 steps from 0 declared of 30" in said
    sampler = read(stopped / "ledger.jsonl").generations[0].terms.mechanism.sampler
    upper = epsilon(sampler.with_epochs(2).privacy(1.0), 1 / 160).format_upper(".4f")
    assert f"epsilon in [0.0000, {upper}]" in said
    whole = epsilon(sampler.privacy(1.0), 1 / 160)
    assert (
        f"by looking at the model costs what the whole run costs (epsilon in {whole:.4f})" in said
    )


def lose_checkpoints(run):
    shutil.rmtree(run / "checkpoints")


def tear_last_line(run):
    with open(run / "ledger.jsonl", "ab") as file:
        file.write(b'{"steps": [16, 2')


def leave_half_a_checkpoint(run):
    (run / "checkpoints" / ".000000000024.npz.unfinished").write_bytes(b"PK")


@pytest.mark.parametrize("damage", [lose_checkpoints, tear_last_line, leave_half_a_checkpoint])
def test_what_a_crash_may_leave_is_mended_without_a_trace(stopped, finished, damage):
    damage(stopped)
    assert main(["ledger", str(stopped)]) == 0
    assert main(["resume", str(stopped)]) == 0
    for name in ("params.npz", "ledger.jsonl", "guarantee.json", DIAGNOSTICS):
        assert (stopped / name).read_bytes() == (finished / name).read_bytes(), name
    assert {path.name for path in stopped.iterdir()} == {path.name for path in finished.iterdir()}


def test_a_finished_run_costs_what_was_promised_and_is_tidied_up(finished, capsys):
    promised = json.loads((finished / "guarantee.json").read_text())
    report = json.loads((finished / "report.json").read_text())
    assert {name: report[name] for name in promised} == promised
    assert main(["ledger", str(finished)]) == 0
    assert capsys.readouterr().out.strip().endswith(promised["guarantee"])
    assert report["generations"] == 1
    assert not (finished / "root.key").exists()
    assert not (finished / "checkpoints").exists()
    assert main(["resume", str(finished)]) == 0


def test_changed_code_begins_a_generation_and_is_counted_in_addition(stopped, monkeypatch):
    monkeypatch.setattr(fingerprint, "code_digest", lambda: "other code")
    assert main(["resume", str(stopped)]) == 0
    first, second = read(stopped / "ledger.jsonl").generations
    assert (first.steps, second.steps) == (range(16), range(16, 30))
    sampler = first.terms.mechanism.sampler
    upper = epsilon(sampler.privacy_of(1.0, [first.steps, second.steps]), 1 / 160).upper
    report = json.loads((stopped / "report.json").read_text())
    assert report["epsilon_upper"] == upper
    assert upper > epsilon(sampler.privacy(1.0), 1 / 160).upper  # the second epoch counts twice
    assert report["generations"] == 2
    page = overview([stopped]).markdown
    assert "Not alike in all runs above, from beginning to end: code." in page
    assert page.count(report["guarantee"]) == 1


def test_diagnostics_have_each_step_once(finished, tmp_path):
    lines = (finished / DIAGNOSTICS).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(30))
    run = RunDirectory(shutil.copytree(finished, tmp_path / "run"))
    for step in (25, 9, 0):
        run.cut_diagnostics(step)
        kept = (run.path / DIAGNOSTICS).read_text().splitlines()
        assert kept == lines[:step]
    (run.path / DIAGNOSTICS).write_text("\n".join(lines[:3]) + '\n{"step": 3, "lo')
    run.cut_diagnostics(4)
    assert (run.path / DIAGNOSTICS).read_text().splitlines() == lines[:3]


def test_a_full_disk_loses_nothing(store, tmp_path, capsys):
    whole, out = tmp_path / "whole", tmp_path / "run"
    seed = ["--insecure-seed", "3"]
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Room for configuration and ledger, but not for a checkpoint.
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, usual[1]))
    try:
        status = main(arguments(store, out, *seed, "--checkpoint-seconds", "0"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert status == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"dpsgd: the disk is full; nothing is lost: .* resume .* goes on\n", said)
    assert main(["resume", str(out)]) == 0
    assert main(arguments(store, whole, *seed, "--checkpoint-seconds", "0")) == 0
    for name in ("params.npz", "ledger.jsonl", DIAGNOSTICS):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


# --- Refusals ------------------------------------------------------------------------------------


def refused(capsys, command, run):
    assert main([command, str(run)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def edit(path):
    path.write_text(path.read_text().replace('"noise_multiplier": 1.0', '"noise_multiplier": 9.0'))


def roll_back(path, lines=-1):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))


def swap_lines(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[::-1]))


def of_another_run(path):
    history = read(path)
    (generation,) = history.generations
    path.unlink()
    with Ledger.create(path, replace(generation.terms, fingerprint={"data": "other"})) as ledger:
        ledger.declare(generation.steps)


@pytest.mark.parametrize("command", ["resume", "ledger"])
@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (edit, "line 1: its hash does not fit"),
        (roll_back, "rolled back or replaced"),
        (functools.partial(roll_back, lines=1), "rolled back or replaced"),
        (swap_lines, "line 1: its hash does not fit"),
        (of_another_run, "rolled back or replaced"),
        (os.remove, "is missing: without it"),
        (lambda path: path.write_text(""), "is empty"),
    ],
    ids=[
        "edited",
        "last line deleted",
        "rolled back",
        "lines swapped",
        "of another run",
        "deleted",
        "emptied",
    ],
)
def test_a_ledger_that_cannot_be_believed_is_refused(stopped, capsys, command, damage, why):
    damage(stopped / "ledger.jsonl")
    assert why in refused(capsys, command, stopped)


def test_a_rolled_back_ledger_of_a_finished_run_is_refused(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    roll_back(run / "ledger.jsonl")
    assert "rolled back" in refused(capsys, "ledger", run)
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_a_second_process_is_refused(stopped, capsys):
    with Ledger.open(stopped / "ledger.jsonl"):
        assert "another process is training" in refused(capsys, "resume", stopped)
        assert main(["ledger", str(stopped)]) == 0


def test_a_missing_secret_or_run_is_refused(stopped, tmp_path, capsys):
    (stopped / "root.key").unlink()
    assert "no root key" in refused(capsys, "resume", stopped)
    assert "is not the directory of a run" in refused(capsys, "resume", tmp_path / "nothing")


def test_data_that_were_changed_under_the_same_manifest_are_refused(store, stopped, capsys):
    moved = shutil.copytree(store, stopped.parent / "moved")
    shard = next(moved.glob("*label.npy"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(content)
    assert main(["resume", str(stopped), "--data", str(moved)]) == 2
    assert "is damaged: its checksum" in capsys.readouterr().err


def other_store(folder, rows=200, **options):
    return synthetic.write_store(folder / "other", rows, seed=1, **options).store


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"rows": 300}, "has 240 training examples, and .* was begun on 160"),
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


def test_a_record_from_before_schemas_said_more_is_that_of_the_same_columns(store, stopped):
    config = json.loads((stopped / "config.json").read_text())
    for later in ("label", "transform", "missing"):
        del config["schema"][later]
    (stopped / "config.json").write_text(json.dumps(config))
    assert main(["resume", str(stopped)]) == 0


def test_a_run_says_every_store_that_it_was_trained_on(store, stopped, tmp_path):
    other = other_store(tmp_path)
    assert main(["resume", str(stopped), "--data", str(other.path)]) == 0
    assert RunDirectory(stopped).data() == [training.Store.open(store).digest, other.digest]
    (stopped / DATA).unlink()
    assert RunDirectory(stopped).data() == [None]


def test_rows_of_one_class_are_refused_before_training(store, tmp_path, capsys):
    log = synthetic.LOGS["criteo-display"]
    blocks = [{**rows, "label": 0 * rows["label"]} for rows in Store.open(store).blocks("train")]
    log.format.write(tmp_path / "store", blocks, hash_seed=0, source=dict)
    assert main(arguments(tmp_path / "store", tmp_path / "run")) == 2
    assert "the validation rows are not of both classes" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_training_that_diverged_is_resumed_to_its_end_and_said_to(stopped, monkeypatch, capsys):
    diverged = BinaryMetrics(math.nan, math.nan, math.nan, math.nan, 1, 1)
    monkeypatch.setattr(training, "evaluate", lambda *_: diverged)
    assert main(["resume", str(stopped)]) == 0
    assert "note: the training diverged: " in capsys.readouterr().out
    assert RunDirectory(stopped).finished


@pytest.mark.parametrize("damage", ["{", '{"data": "x"}', "[]"])
def test_a_damaged_configuration_is_refused(stopped, capsys, damage):
    (stopped / "config.json").write_text(damage)
    assert "config.json" in refused(capsys, "resume", stopped)


# --- Secrets -------------------------------------------------------------------------------------


def secrets(root):
    """The root secret and everything derived from it, in the forms in which it could leak."""
    noise = root.noise_key(0)
    seed = root.sampling_seed(0)
    raw = [root._secret, noise.tobytes(), seed.to_bytes(32, "little"), seed.to_bytes(32, "big")]
    text = [root._secret.hex(), str(seed), *(str(word) for word in noise.tolist())]
    return [*raw, *(item.encode() for item in text)]


def test_without_its_one_file_a_run_directory_holds_no_secret(stopped):
    key = stopped / "root.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    root = RootKey.load(key)
    for path in stopped.rglob("*"):
        if path.is_file() and path != key:
            content = path.read_bytes()
            assert not any(secret in content for secret in secrets(root)), path


def test_an_export_holds_parameters_model_and_guarantee_and_nothing_else(
    stopped, finished, tmp_path
):
    out = tmp_path / "out"
    assert main(["export", str(finished), str(out)]) == 0
    assert {path.name for path in out.rglob("*")} == {"params.npz", "model.json", "guarantee.json"}
    with np.load(out / "params.npz") as bundle, np.load(finished / "params.npz") as run:
        assert set(bundle.files) == set(run.files)
        for name in run.files:
            np.testing.assert_array_equal(bundle[name], run[name])
    model = json.loads((out / "model.json").read_text())
    assert set(model) == {"format", "version", "kind", "model", "sha256"}
    assert set(model["sha256"]) == {"model.json", "params.npz", "guarantee.json"}
    assert set(model["model"]) == {"model_sizes", "schema", "hash_seed"}
    assert build(ModelConfig, model["model"]["model_sizes"], "model.json").embedding_dim == 2
    guarantee = json.loads((out / "guarantee.json").read_text())
    assert guarantee == json.loads((finished / "guarantee.json").read_text())
    root = RootKey.load(stopped / "root.key")  # the same run's
    for path in out.iterdir():
        assert not any(secret in path.read_bytes() for secret in secrets(root))
    for word in (b"root", b"step", b"fingerprint", b"opt_state", b"loss", b"digest", b"ledger"):
        assert word not in (out / "model.json").read_bytes() + (out / "params.npz").read_bytes()


def test_an_unfinished_run_is_not_exported(stopped, tmp_path, capsys):
    assert main(["export", str(stopped), str(tmp_path / "out")]) == 2
    assert "goes on with it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "kind", [config.Deterministic, config.Shuffle, config.Poisson, config.BallsAndBins]
)
def test_a_configuration_comes_back_from_its_record(store, tmp_path, kind):
    asked = config.TrainConfig(
        data=store, sampler=kind(batch_size=7), out=tmp_path, noise_multiplier=2.0, hidden=(3, 4)
    )
    record = json.loads(json.dumps(recorded.describe(asked, Store.open(store))))
    assert recorded.config_from(record, out=tmp_path, data=None) == asked
    assert jnp.float32(record["noise_multiplier"]) == 2
