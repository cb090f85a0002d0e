"""A checkpoint is whole and right, or it gives way to the one before."""

import errno
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import TrainState
from dpsgd.runs.checkpoint import KEPT, Checkpoint, Checkpoints


def state(step, *, size=3, dtype=jnp.float32):
    params = {
        "w": jnp.arange(size, dtype=dtype) + step,
        "b": [jnp.float32(step)],
        "half": jnp.arange(3, dtype=jnp.bfloat16) / 3,
    }
    return TrainState(jnp.int32(step), params, optax.adam(0.1).init(params))


LIKE = state(0)


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints")


def save(checkpoints, step, **kind):
    checkpoints.save(Checkpoint(state(step, **kind), f"head {step}", 1.5))


def files(checkpoints):
    return sorted(checkpoints.folder.iterdir())


def assert_is(checkpoint, step):
    assert checkpoint.ledger_head == f"head {step}"
    assert checkpoint.seconds == 1.5
    jax.tree.map(np.testing.assert_array_equal, checkpoint.state, state(step))
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(checkpoint.state)]
    assert dtypes == [leaf.dtype for leaf in jax.tree.leaves(LIKE)]


def test_what_is_saved_comes_back_bit_for_bit(checkpoints):
    save(checkpoints, 7)
    assert_is(checkpoints.latest(LIKE), 7)
    assert checkpoints.latest_head() == "head 7"


def test_there_is_none_before_the_first(checkpoints):
    assert checkpoints.latest(LIKE) is None
    assert checkpoints.latest_head() is None


def test_the_newest_two_are_kept(checkpoints):
    for step in (9, 10, 100, 101):
        save(checkpoints, step)
    assert len(files(checkpoints)) == KEPT == 2
    assert_is(checkpoints.latest(LIKE), 101)


@pytest.mark.parametrize("stride", [29, pytest.param(7, marks=pytest.mark.long)])
def test_a_flipped_byte_anywhere_is_noticed_or_without_effect(checkpoints, stride):
    save(checkpoints, 1)
    save(checkpoints, 2)
    newest = files(checkpoints)[-1]
    whole = newest.read_bytes()
    fell_back = 0
    for at in range(0, len(whole), stride):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << (at % 8)
        newest.write_bytes(damaged)
        try:
            found = checkpoints.latest(LIKE)
        except ValueError as error:  # a leaf's name was hit: refused, not misread
            assert "of another model" in str(error)  # noqa: PT017
            continue
        assert_is(found, int(found.state.step))
        fell_back += found.state.step == 1
    assert fell_back > len(whole) / stride / 4


@pytest.mark.parametrize("keep", [0, 1, 100, -1], ids=["empty", "byte", "part", "all but one"])
def test_a_cut_file_gives_way_to_the_one_before(checkpoints, keep):
    save(checkpoints, 1)
    save(checkpoints, 2)
    newest = files(checkpoints)[-1]
    newest.write_bytes(newest.read_bytes()[:keep])
    assert_is(checkpoints.latest(LIKE), 1)
    assert checkpoints.latest_head() == "head 1"


def test_nothing_left_to_read_is_said(checkpoints):
    for step in (1, 2):
        save(checkpoints, step)
    for file in files(checkpoints):
        file.write_bytes(b"")
    with pytest.raises(ValueError, match="every checkpoint is damaged"):
        checkpoints.latest(LIKE)


@pytest.mark.parametrize("kind", [{"size": 4}, {"dtype": jnp.float16}], ids=["shape", "dtype"])
def test_another_model_is_refused(checkpoints, kind):
    save(checkpoints, 1, **kind)
    with pytest.raises(ValueError, match=r"another model|needs float32"):
        checkpoints.latest(LIKE)


@pytest.mark.parametrize("operation", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_ones_before(checkpoints, monkeypatch, operation):
    save(checkpoints, 1)
    save(checkpoints, 2)
    before = files(checkpoints)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, operation, full)
    with pytest.raises(OSError, match="No space left"):
        save(checkpoints, 3)
    assert files(checkpoints) == before
    assert_is(checkpoints.latest(LIKE), 2)


def test_the_name_appears_after_the_content_is_on_the_disk(checkpoints, monkeypatch):
    happened = []

    def watched(name, call):
        def watching(*args):
            happened.append(name)
            return call(*args)

        return watching

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, watched(name, getattr(os, name)))
    save(checkpoints, 1)
    assert happened == ["fsync", "replace", "fsync"]


def test_no_temporary_file_is_taken_for_a_checkpoint(checkpoints):
    save(checkpoints, 1)
    (checkpoints.folder / ".000000000002.npz.unfinished").write_bytes(b"half")
    assert_is(checkpoints.latest(LIKE), 1)
    checkpoints.remove()
    assert not checkpoints.folder.exists()
