"""A checkpoint is whole and right, or it gives way to the one before."""

import errno
import os
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from several import together

from dpsgd.core.state import Table, TrainState
from dpsgd.runs import checkpoint
from dpsgd.runs.checkpoint import KEPT, Checkpoint, Checkpoints
from dpsgd.runs.processes import Processes


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


def test_the_newest_two_are_kept_and_come_back_bit_for_bit(checkpoints):
    assert (checkpoints.latest(LIKE), checkpoints.latest_head()) == (None, None)
    for step in (9, 10, 100, 101):
        save(checkpoints, step)
        assert_is(checkpoints.latest(LIKE), step)
        assert checkpoints.latest_head() == f"head {step}"
    assert len(files(checkpoints)) == KEPT == 2


def test_no_checkpoint_is_made_of_a_state_with_pending_noise(checkpoints):
    table = Table(jnp.ones((4, 2)), None, steps=jnp.zeros(4, jnp.int32))
    pending = TrainState(jnp.int32(1), {"table": table.values}, ()).with_tables({0: table})
    with pytest.raises(ValueError, match=r"pending noise, .*flush it"):
        checkpoints.save(Checkpoint(pending, "head", 1.5))
    assert not checkpoints.folder.exists()


def test_a_checkpoint_takes_the_room_that_was_kept_for_it(checkpoints):
    for step in (1, 2, 3):
        checkpoints.reserve(checkpoints.room(state(step)))
        (kept,) = checkpoints.folder.glob(".reserved*")
        place, room = kept.stat().st_ino, kept.stat().st_size
        save(checkpoints, step)
        newest = files(checkpoints)[-1].stat()
        assert (newest.st_ino, newest.st_size <= room) == (place, True)
        assert not list(checkpoints.folder.glob(".*"))
        assert_is(checkpoints.latest(LIKE), step)


def test_where_there_is_no_room_none_is_taken(checkpoints, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.reserve(checkpoints.room(state(1)))
    assert not files(checkpoints)


def test_checkpoints_after_a_step_are_destroyed(checkpoints):
    for step in (1, 2):
        save(checkpoints, step)
    checkpoints.destroy_after(1)
    assert_is(checkpoints.latest(LIKE), 1)
    assert len(files(checkpoints)) == 1


@pytest.mark.parametrize("stride", [61, pytest.param(7, marks=pytest.mark.long)])
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
        found = checkpoints.latest(LIKE)
        assert_is(found, int(found.state.step))
        fell_back += found.state.step == 1
    assert fell_back > len(whole) / stride / 4


def test_a_cut_or_mixed_checkpoint_yields_to_the_previous_one(checkpoints):
    for step in (1, 2, 3):
        checkpoints.save(Checkpoint(state(step), f"head {step}", float(step)))
    older, newest = files(checkpoints)[-2:]
    content, others = newest.read_bytes(), older.read_bytes()
    cut = len(content) // 2
    later = newest.with_name(newest.name.replace("3", "9"))
    damages = [lambda n=n: newest.write_bytes(content[:n]) for n in (0, 1, 39, 100, -1)]
    damages += [lambda n=n: newest.write_bytes(content[:n] + others[n:]) for n in (1, cut, -9)]
    damages += [lambda n=n: newest.write_bytes(others[:n] + content[n:]) for n in (1, cut, -9)]
    damages += [lambda: newest.write_bytes(content[:-8] + bytes(7) + b"\xff")]
    damages += [lambda: shutil.copy(older, newest)]  # under a name that is not its own
    damages += [lambda: shutil.copy(older, later)]
    for damage in damages:
        damage()
        found = checkpoints.latest(LIKE)
        assert (found.step, *found[1:]) == (2, "head 2", 2.0)
    later.unlink()
    newest.write_bytes(content)
    assert int(checkpoints.latest(LIKE).state.step) == 3
    for path in files(checkpoints):
        path.write_bytes(content[:100])
    assert checkpoints.latest_head() is None
    with pytest.raises(ValueError, match="every checkpoint is damaged"):
        checkpoints.latest(LIKE)


@pytest.mark.parametrize("kind", [{"size": 4}, {"dtype": jnp.float16}], ids=["shape", "dtype"])
def test_another_model_is_refused(checkpoints, kind):
    save(checkpoints, 1, **kind)
    with pytest.raises(ValueError, match=r"another model|expected float32"):
        checkpoints.latest(LIKE)


def test_the_name_appears_after_the_content_is_on_the_disk(checkpoints, monkeypatch):
    happened, calls = [], {"fsync": os.fsync, "replace": os.replace}
    for name, call in calls.items():
        watching = lambda *of, name=name, call=call: happened.append(name) or call(*of)  # noqa: E731
        monkeypatch.setattr(os, name, watching)
    save(checkpoints, 1)
    assert happened == ["fsync", "replace", "fsync"]


class Dealt:
    """An array of which each process has some rows, or columns, and those in two places."""

    def __init__(self, array, index, count, axis=0):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        bounds = [k * array.shape[axis] // count for k in range(count + 1)]
        rows = [slice(None)] * array.ndim
        rows[axis] = slice(bounds[index], bounds[index + 1])
        rows = tuple(rows)
        self.addressable_shards = [
            SimpleNamespace(index=rows, data=array[rows], replica_id=replica) for replica in (0, 1)
        ]


@pytest.fixture
def dealt(monkeypatch):
    monkeypatch.setattr(checkpoint, "_is_sharded", lambda leaf: isinstance(leaf, Dealt))


def table(step, dtype=np.float32):
    rows = (np.arange(24).reshape(8, 3) + step).astype(dtype)
    return TrainState(np.int32(step), {"table": rows, "dense": np.float32([step])}, (), rows + 1)


def save_parts(folder, steps=(1, 2), count=2, dtype=np.float32):
    def work(processes):
        for step in steps:
            whole = table(step, dtype)
            rows = Dealt(whole.params["table"], processes.index, count)
            noise = Dealt(whole.noise, processes.index, count, axis=1)
            state = whole._replace(raw_params={**whole.params, "table": rows}, noise=noise)
            Checkpoints(folder, processes).save(Checkpoint(state, f"head {step}", 1.5))

    assert together(count, work) == [None] * count


def assert_all_have(folder, step, count=2, dtype=np.float32):
    like = table(0, dtype)
    for found in together(count, lambda p: Checkpoints(folder, p).latest(like)):
        assert found.ledger_head == f"head {step}"
        jax.tree.map(np.testing.assert_array_equal, found.state, table(step, dtype))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_saved_parts_load_in_any_number_of_processes(tmp_path, dealt, dtype):
    save_parts(tmp_path / "c", dtype=dtype)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "c").iterdir()} == {0o600}
    for count in (1, 2, 3):
        assert_all_have(tmp_path / "c", 2, count, dtype)


def test_what_is_indexed_is_read_across_parts(tmp_path, dealt):
    save_parts(tmp_path / "c", count=3)
    state = Checkpoints(tmp_path / "c", Processes()).latest(table(0)).state
    for array, whole in (
        (state.params["table"], table(2).params["table"]),
        (state.noise, table(2).noise),
    ):
        for start, stop in ((0, 8), (1, 3), (2, 7), (5, 8), (4, 4)):
            for columns in (slice(None), slice(1, 3)):
                index = slice(start, stop), columns
                np.testing.assert_array_equal(array[index], whole[index])


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("harm", ["bit", "cut", "gone", "older"])
def test_a_damaged_part_takes_all_to_the_previous_checkpoint(tmp_path, dealt, part, harm):
    save_parts(tmp_path / "c")
    name = "part-1-of-2" if part else "checkpoint"
    path, older = (tmp_path / f"c/{step:012d}.{name}" for step in (2, 1))
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes({"bit": content, "cut": content[:-1], "older": older.read_bytes()}[harm])
    assert_all_have(tmp_path / "c", 1)
    assert_all_have(tmp_path / "c", 1, count=1)
    if part or harm == "bit":  # its head is known: a ledger that is older than that is refused
        assert Checkpoints(tmp_path / "c").latest_head() == "head 2"


def test_a_checkpoint_unreadable_to_one_process_is_read_by_none(tmp_path, dealt):
    save_parts(tmp_path / "c")
    shutil.copytree(tmp_path / "c", tmp_path / "other")
    (tmp_path / "other/000000000002.checkpoint").unlink()

    def work(processes):
        return Checkpoints(tmp_path / ("other" if processes.index else "c"), processes).latest(
            table(0)
        )

    found = together(2, work)
    assert [one.ledger_head for one in found] == ["head 1", "head 1"]
