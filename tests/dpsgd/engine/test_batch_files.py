"""Batches that were written down are those that training would draw, and no others are taken."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from dpsgd.engine import batch_files
from dpsgd.engine.batch_files import BatchFiles, Draw, draw_here, write_manifest
from dpsgd.engine.blocks import plan_blocks, with_rows
from samplers import BallsAndBins, BatchSource, Deterministic, FullBatch, Poisson, Shuffle

SEED = 12345
DATA = {
    "x": np.arange(300, dtype=np.float32).reshape(100, 3),
    "y": [np.arange(100, dtype=np.uint8), np.zeros((100, 0), np.int32)],
}
SAMPLERS = [
    Deterministic(100, 8, 2),
    Shuffle(100, 8, 2),
    Poisson(100, 8, 3, max_batch_size=10),
    Poisson(100, 8, 2, max_batch_size=5, overflow="accumulate"),
    BallsAndBins(100, 8, 2, max_batch_size=12),
    FullBatch(100, 3),
]


def drawn(folder, sampler, first_step=0, seed=SEED, **changes):
    draw = Draw.plan(sampler, DATA, run="a run", attempt=7, first_step=first_step)
    draw = dataclasses.replace(draw, **{"steps_per_file": 3, **changes})
    folder.mkdir(0o700)
    write_manifest(folder, draw, seed, draw_here(folder, draw, seed, DATA), DATA)
    return draw


def assert_same(one, two):
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert jax.tree.map(lambda x: x.dtype, one) == jax.tree.map(lambda x: x.dtype, two)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
@pytest.mark.parametrize(
    ("first_step", "block_steps", "ends"), [(0, 4, 3), (2, 64, 7), (1, 1, None)]
)
def test_blocks_of_files_are_bit_for_bit_those_that_are_drawn(
    tmp_path, sampler, first_step, block_steps, ends
):
    draw = drawn(tmp_path / "batches", sampler)
    here = dataclasses.replace(draw, first_step=first_step)
    files = BatchFiles(tmp_path / "batches", here, SEED, DATA)
    source = BatchSource(sampler, SEED)
    read = list(files.blocks(first_step, block_steps, ends=ends))
    how = {"first_step": first_step, "block_steps": block_steps, "ends": ends}
    expected = list(plan_blocks(source, **how))
    assert [steps for steps, _, _ in read] == [steps for steps, _ in expected]
    for (_, rows, plan), (_, wanted) in zip(read, expected, strict=True):
        assert_same(plan._replace(places=None), wanted)
        assert_same(with_rows(rows, plan), with_rows(DATA, wanted))


def test_files_and_their_folder_are_their_owners_alone(tmp_path):
    drawn(tmp_path / "batches", SAMPLERS[2])
    for file in (tmp_path / "batches").iterdir():
        assert file.stat().st_mode & 0o777 == 0o600, file


OTHERS = {
    "another seed": (SEED + 1, {}),
    "another run": (SEED, {"run": "another"}),
    "another attempt": (SEED, {"attempt": 8}),
    "another sampler": (SEED, {"sampler": Poisson(100, 8, 3, max_batch_size=11)}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_batches_of_anything_else_are_refused(tmp_path, other):
    draw = drawn(tmp_path / "batches", SAMPLERS[2])
    seed, changes = OTHERS[other]
    with pytest.raises(ValueError, match="of another run, or of another attempt"):
        BatchFiles(tmp_path / "batches", dataclasses.replace(draw, **changes), seed, DATA)


def test_manifest_edited_for_another_attempt_breaks_its_seal(tmp_path):
    draw = drawn(tmp_path / "batches", SAMPLERS[2])
    manifest = tmp_path / "batches" / "batches.json"
    record = json.loads(manifest.read_text())
    record["draw"]["attempt"] = 8
    manifest.write_text(json.dumps(record))
    manifest.chmod(0o600)
    with pytest.raises(ValueError, match="of another run, or of another attempt"):
        BatchFiles(tmp_path / "batches", dataclasses.replace(draw, attempt=8), SEED, DATA)


@pytest.mark.parametrize("damage", ["changed", "cut", "missing", "swapped"])
def test_a_damaged_file_is_named_and_not_trained_on(tmp_path, damage):
    draw = drawn(tmp_path / "batches", SAMPLERS[2])
    file = tmp_path / "batches" / "00000001.batches"
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "swapped":
        file.write_bytes((tmp_path / "batches" / "00000002.batches").read_bytes())
    else:
        file.write_bytes(content[:-1] + (b"" if damage == "cut" else bytes([content[-1] ^ 1])))
    files = BatchFiles(tmp_path / "batches", draw, SEED, DATA)
    with pytest.raises(ValueError, match=r"00000001.batches is (missing|damaged): draw the batch"):
        list(files.blocks(0, 2))


def test_missing_or_late_batches_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no batches"):
        BatchFiles(tmp_path, Draw(SAMPLERS[0], "r", 0, 0, 3), SEED, DATA)
    draw = drawn(tmp_path / "batches", SAMPLERS[0], first_step=5)
    with pytest.raises(ValueError, match="begins with step 5, after step 4 at which"):
        BatchFiles(tmp_path / "batches", dataclasses.replace(draw, first_step=4), SEED, DATA)


def test_rows_of_other_columns_are_refused(tmp_path):
    draw = drawn(tmp_path / "batches", SAMPLERS[0])
    other = {"x": DATA["x"].astype(np.float64), "y": DATA["y"]}
    with pytest.raises(ValueError, match="holds rows of other shapes"):
        BatchFiles(tmp_path / "batches", draw, SEED, other)


def test_shards_are_refused():
    with pytest.raises(ValueError, match="num_shards=2"):
        Draw.plan(Poisson(100, 8, num_shards=2), DATA, run="r", attempt=0, first_step=0)


def test_batches_are_destroyed_though_their_manifest_is_damaged(tmp_path):
    drawn(tmp_path / "batches", SAMPLERS[0])
    (tmp_path / "batches" / "batches.json").write_text("{")
    batch_files.forget(tmp_path / "batches", "a run")
    assert not (tmp_path / "batches").exists()


def test_only_what_a_run_drew_is_destroyed(tmp_path):
    folder = tmp_path / "batches"
    drawn(folder, SAMPLERS[0])
    (folder / "notes.txt").write_text("mine")
    for name in (".seed.0a1b", ".00000000.batches.0a1b", ".batches.json.0a1b"):  # of one that died
        (folder / name).write_text("a secret")
    batch_files.forget(folder, "another run")
    assert len(list(folder.iterdir())) > 3
    batch_files.forget(folder, "a run")
    assert [file.name for file in folder.iterdir()] == ["notes.txt"]
    batch_files.forget(folder, "a run")
    (folder / "notes.txt").unlink()
    batch_files.forget(folder, "a run")
    assert not folder.exists()
    batch_files.forget(folder, "a run")
