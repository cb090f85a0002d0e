"""Blocks are plans of one shape that hold every batch, made one ahead of their use."""

import threading

import jax
import numpy as np
import optax
import pytest

from dpsgd import Mechanism, dpsgd
from dpsgd.engine.blocks import in_background, pad_columns, plan_blocks, select_columns, with_rows
from dpsgd.engine.feed import Layout
from samplers import BallsAndBins, BatchSource, Deterministic, Poisson

SAMPLERS = {
    "one pass": BallsAndBins(60, 8, 2),
    "some passes": Poisson(60, 8, 2, overflow="accumulate", max_batch_size=3),
    "more passes than a block has steps": Poisson(
        60, 30, 3, overflow="accumulate", max_batch_size=2
    ),
}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize(("first_step", "ends"), [(0, None), (3, 6)])
def test_blocks_hold_every_batch_in_plans_of_one_shape(sampler, first_step, ends):
    source = BatchSource(sampler, seed=5)
    planned = list(plan_blocks(source, first_step=first_step, block_steps=4, ends=ends))
    if ends:
        assert set(range(6, sampler.num_steps, 6)) <= {steps.stop for steps, _ in planned}
    assert len({tuple(np.shape(part) for part in plan) for _, plan in planned}) == 1
    step = first_step
    for steps, plan in planned:
        assert steps == range(step, step + int(plan.num_steps))
        for j, t in enumerate(steps):
            rows = slice(plan.starts[j], plan.starts[j + 1])
            for got, expected in zip(plan, zip(*source.passes(t), strict=True), strict=False):
                np.testing.assert_array_equal(got[rows], expected)
        step = steps.stop
    assert step == sampler.num_steps


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("block_steps", [2, 4, 64])
@pytest.mark.parametrize("max_passes", [None, 1], ids=["enough", "too few"])
def test_ends_of_blocks_tell_nothing_of_the_batches(sampler, block_steps, max_passes, monkeypatch):
    """Whoever reads the ledger sees them, and few passes would tell of few examples."""
    if max_passes:
        monkeypatch.setattr(type(sampler), "max_passes", max_passes)
    ends = {
        tuple(
            steps.stop
            for steps, _ in plan_blocks(
                BatchSource(sampler, seed), first_step=0, block_steps=block_steps
            )
        )
        for seed in range(40)
    }
    assert len(ends) == 1


def test_a_batch_beyond_what_was_thought_possible_is_taken_whole(monkeypatch):
    monkeypatch.setattr(Poisson, "max_passes", 1)
    sampler = SAMPLERS["more passes than a block has steps"]
    source = BatchSource(sampler, seed=5)
    for (t,), plan in plan_blocks(source, first_step=0, block_steps=1):
        taken = plan.indices[plan.weights > 0]
        assert sorted(taken) == sorted(np.concatenate([
            batch.indices[batch.weights > 0] for batch in source.passes(t)
        ]))  # fmt: skip


def test_an_item_is_made_while_the_one_before_it_is_in_use():
    made = [threading.Event() for _ in range(3)]

    def items():
        for number, event in enumerate(made):
            event.set()
            yield number

    taken = in_background(items())
    assert next(taken) == 0
    assert made[1].wait(30)
    assert not made[2].is_set()
    assert list(taken) == [1, 2]


def test_an_error_in_the_background_comes_where_its_item_would():
    def items():
        yield 0
        raise OSError("the disk is gone")

    taken = in_background(items())
    assert next(taken) == 0
    with pytest.raises(OSError, match="disk is gone"):
        next(taken)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_each_device_has_the_rows_of_its_own_places(devices):
    sampler = Poisson(40, 9, 2, max_batch_size=10)
    data = np.arange(40)
    _, plan = next(plan_blocks(BatchSource(sampler, 1), first_step=0, block_steps=4))
    wide = pad_columns(plan, 12)
    assert not wide.weights[:, 10:].any()
    np.testing.assert_array_equal(wide.weights[:, :10], plan.weights)
    rows, there = with_rows(data, wide, devices)
    for k, own in enumerate(np.split(rows, devices)):
        part = slice(k * 12 // devices, (k + 1) * 12 // devices)
        np.testing.assert_array_equal(own[there.places[:, part]], data[wide.indices[:, part]])
        alone, _ = with_rows(data, select_columns(wide, part))
        np.testing.assert_array_equal(alone, own)


def test_more_rows_than_32_bits_number_travel_with_their_blocks():
    data = jax.ShapeDtypeStruct((2**31, 1), np.float32)
    sampler = Poisson(2**31, 1024, num_shards=2)
    assert Layout.choose(sampler, data).streamed
    assert not Layout.choose(Poisson(2**31 - 1, 1024), data).streamed
    with pytest.raises(ValueError, match="data_on='device' allows 2,147,483,647 rows"):
        Layout.choose(sampler, data, data_on="device")


def test_more_entries_than_32_bits_number_are_refused():
    """JAX ended in an OverflowError, and the audit numbers entries in 32 bits, too."""
    rows = {"id": np.zeros(100, np.int32)}
    algorithm = dpsgd(lambda params, row: params["table"][row["id"]].sum(), optax.sgd(0.1))
    mechanism = Mechanism(Deterministic(100, 10), 1.0, 1.0)
    layout = Layout.choose(mechanism.sampler, rows)
    params = {"table": jax.ShapeDtypeStruct((2**16, 2**15), np.float32)}
    state = jax.eval_shape(lambda params: algorithm.init(params, mechanism, rows), params)
    with pytest.raises(ValueError, match=r"params\['table'\] has 2,147,483,648 entries, and 32"):
        layout.program(algorithm, mechanism, state, rows)
