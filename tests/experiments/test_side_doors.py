"""Private data reach what is published through the noised sums alone: there is no side door."""

import json

import jax
import numpy as np
import pytest

from dpsgd import RootKey
from dpsgd.runs.directory import DIAGNOSTICS
from dpsgd.training.blocks import plan_blocks
from dpsgd.training.loop import compiled_block
from experiments import train as training
from experiments.cli import config, main
from experiments.tasks.clicks.criteo import display
from experiments.tasks.clicks.synthetic import rows as synthetic
from samplers import BatchSource

CHANGED = 17  # a training row
NEIGHBOUR = "\t".join(["{label}", *["987654321"] * 13, *["feedbeef"] * 26])


@pytest.fixture(scope="module")
def neighbours(tmp_path_factory):
    """Two stores that differ in one row: its label, all its numbers, and tokens never seen."""
    folder = tmp_path_factory.mktemp("neighbours")
    synthetic.write_raw(folder / "a.txt", 200, seed=0)
    lines = (folder / "a.txt").read_text().splitlines(keepends=True)
    assert "feedbeef" not in "".join(lines)
    lines[CHANGED] = NEIGHBOUR.format(label=1 - int(lines[CHANGED][0])) + "\n"
    (folder / "b.txt").write_text("".join(lines))
    return [display.prepare(folder / f"{name}.txt", folder / name) for name in "ab"]


def test_a_new_row_moves_no_other_row_into_another_bucket(neighbours):
    a, b = (store.load("train") for store in neighbours)
    for name in a:
        assert a[name].shape == b[name].shape
        same = np.arange(len(a[name])) != CHANGED
        np.testing.assert_array_equal(a[name][same], b[name][same])
    assert any(not np.array_equal(a[name][CHANGED], b[name][CHANGED]) for name in a)
    one, other = neighbours
    for public in ("schema", "splits", "num_rows", "hash_seed"):
        assert getattr(one, public) == getattr(other, public)


def test_a_new_row_changes_no_shape_and_no_compiled_program(neighbours, tmp_path):
    programs, shapes = [], []
    for store in neighbours:
        asked = config.TrainConfig(
            data=store.path, sampler=config.Poisson(batch_size=16), out=tmp_path,
            noise_multiplier=1.0, embedding_dim=2, max_buckets=8, hidden=(4,),
        )  # fmt: skip
        job = training.Job.of(asked, store, lambda n, asked=asked: training.mechanism_for(asked, n))
        state = job.algorithm.init(job.params)
        _, plan = next(
            plan_blocks(BatchSource(job.mechanism.sampler, 0), first_step=0, block_steps=4)
        )
        key, scales = RootKey.from_entropy().noise_key(0), job.mechanism.scales()
        arguments = state, job.columns, plan, key, scales
        program = compiled_block(job.algorithm, job.mechanism.sampler, arguments).lower(*arguments)
        programs.append(program.as_text())
        shapes.append(jax.tree.map(np.shape, state))
    assert programs[0] == programs[1]
    assert shapes[0] == shapes[1]


@pytest.fixture(scope="module")
def runs(neighbours, tmp_path_factory):
    """One run on each of the two stores, with the same noise and the same batches."""
    runs = []
    for store in neighbours:
        runs.append(tmp_path_factory.mktemp("run") / "run")
        assert main([
            "train", str(store.path), "--out", str(runs[-1]), "--noise-multiplier", "1",
            "--embedding-dim", "2", "--max-buckets", "8", "--hidden", "4", "--insecure-seed", "5",
            "sampler:poisson", "--batch-size", "16", "--epochs", "2",
        ]) == 0  # fmt: skip
    return runs


def read(run, name):
    return json.loads((run / name).read_text())


def test_the_changed_row_took_part(runs):
    a, b = (np.load(run / "params.npz") for run in runs)
    assert any(not np.array_equal(a[name], b[name]) for name in a.files)
    a, b = ((run / DIAGNOSTICS).read_text() for run in runs)
    assert a != b


def test_the_same_files_of_the_same_size_are_written(runs):
    names = [{path.name for path in run.rglob("*")} for run in runs]
    assert names[0] == names[1]
    for name in ("params.npz", "ledger.jsonl", "guarantee.json", "environment.json"):
        sizes = {(run / name).stat().st_size for run in runs}
        assert len(sizes) == 1, name


def test_the_model_differs_in_its_numbers_alone(runs):
    a, b = (np.load(run / "params.npz") for run in runs)
    assert a.files == b.files
    assert [(a[n].shape, a[n].dtype) for n in a.files] == [
        (b[n].shape, b[n].dtype) for n in b.files
    ]


@pytest.mark.parametrize("name", ["guarantee.json", "environment.json", "audit.json"])
def test_guarantee_and_environment_do_not_depend_on_the_data(runs, name):
    assert read(runs[0], name) == read(runs[1], name)


def test_the_configuration_names_the_data_and_tells_nothing_of_them(runs):
    a, b = (read(run, "config.json") for run in runs)
    assert {name for name in a if a[name] != b[name]} == {"data", "out"}


def test_the_ledger_depends_on_the_data_by_a_blinded_digest_alone(runs, neighbours):
    ledgers = []
    for run, store in zip(runs, neighbours, strict=True):
        text = (run / "ledger.jsonl").read_text()
        assert store.digest not in text
        lines = [json.loads(line) for line in text.splitlines()]
        for line in lines:
            del line["hash"]
        assert lines[0]["fingerprint"].pop("data") == RootKey.from_insecure_seed(5).blind(
            store.digest
        )
        ledgers.append(lines)
    assert ledgers[0] == ledgers[1]


def test_the_report_depends_on_the_data_by_the_model_alone(runs):
    a, b = (read(run, "report.json") for run in runs)
    assert a.keys() == b.keys()
    clock = {"training_seconds", "examples_per_second"}
    of_the_model = {name for name in a if name.startswith(("validation_", "test_"))}
    different = {name for name in a if a[name] != b[name]}
    assert different <= clock | of_the_model | {"ledger_head", "params_sha256"}
    for split in ("validation", "test"):
        assert f"{split}_num_examples" not in different


def test_a_blinded_digest_tells_equal_from_different_to_the_holder_of_the_root_alone():
    root, other = RootKey.from_entropy(), RootKey.from_entropy()
    assert root.blind("data") == root.blind("data")
    assert root.blind("data") != root.blind("other data")
    assert root.blind("data") != other.blind("data")
