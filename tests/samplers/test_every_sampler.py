"""Claims that hold for every sampler, over the list in conftest.py.

Draws at scale against the law that each states: `tests/dpsgd/audit/test_conformance.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samplers import BatchSource, Poisson, UserPoisson, batch
from samplers.plans import CHUNK
from tests.samplers.conftest import matrix

small_runs = st.tuples(
    st.integers(1, 60), st.integers(1, 60), st.integers(1, 3), st.integers(0, 2**200)
).filter(lambda run: run[1] <= run[0])
over_samplers = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.short("poisson", "balls-and-bins", "shuffle", "full-batch", "multistage")
@given(run=small_runs)
@over_samplers
def test_the_columns_are_the_rows_of_all_chunks_drawn_in_any_order(make, small_chunks, run):
    n, b, epochs, seed = run
    small_chunks(7)
    sampler = make(n, b, epochs)
    for epoch in reversed(range(epochs)):
        rows = np.zeros((n, sampler.steps_per_epoch), dtype=np.uint8)
        for chunk in np.random.default_rng(n).permutation(sampler.num_chunks):
            examples, steps = sampler.participations(seed, epoch, int(chunk))
            assert set(examples) <= set(range(chunk * 7, chunk * 7 + 7))
            np.add.at(rows, (examples, steps), 1)
        np.testing.assert_array_equal(rows, matrix(sampler, seed, epoch))


@given(run=small_runs)
@over_samplers
def test_nobody_is_in_a_batch_twice_and_members_ascend(make, small_chunks, run):
    n, b, epochs, seed = run
    small_chunks(16)
    sampler = make(n, b, epochs)
    plan = sampler.plan(seed, epochs - 1)
    assert plan.starts[0] == 0
    assert plan.starts[-1] == plan.examples.size
    assert plan.examples.dtype == np.int32
    for step in range(sampler.steps_per_epoch):
        members = plan.members(step)
        assert np.all(np.diff(members) > 0)
        assert np.all((members >= 0) & (members < n))


@pytest.mark.short("poisson-*", "balls-and-bins-5*", "shuffle-5*", "deterministic-*")
@pytest.mark.parametrize(
    ("n", "b", "chunk"),
    [
        (5, 2, 2),
        pytest.param(3, 2, 2, marks=pytest.mark.long),
        pytest.param(4, 4, 2, marks=pytest.mark.long),
        (1, 1, 2),
        pytest.param(5, 2, CHUNK, marks=pytest.mark.long),
    ],
)
def test_an_epoch_has_its_exact_law(
    make_epochs, small_chunks, assert_law, outcome_law, n, b, chunk
):
    # Every possible matrix is a cell, so marginals, independence and sizes are all implied.
    small_chunks(chunk)
    sampler = make_epochs(n, b)
    if isinstance(sampler, Poisson) and n == 5:
        sampler = make_epochs(4, 2)  # 2^15 cells would be too many
    if isinstance(sampler, UserPoisson) and n == 3:
        sampler = make_epochs(2, 1)  # the dearest law, of draws that are Poisson's (see the end)
    law = outcome_law(sampler)
    counts = dict.fromkeys(law, 0)
    for seed in range(max(200, math.ceil(6 / min(filter(None, law.values()))))):
        counts[matrix(sampler, seed, 0).tobytes()] += 1
    assert_law(np.array(list(counts.values())), np.array(list(law.values())))


def test_every_bit_of_a_long_seed_matters(make):
    sampler = make(400, 20)
    if sampler.row_law().certain:
        return
    draws = {matrix(sampler, 1 << bit, 0).tobytes() for bit in (0, 31, 32, 63, 64, 127, 128, 255)}
    assert len(draws) == 8


def test_random_access_equals_replay(make):
    sampler = make(50, 8, 3)
    replayed = BatchSource(sampler, 3)
    block = replayed.fill(0, sampler.num_steps)
    jumping = BatchSource(sampler, 3)
    for step in np.random.default_rng(0).permutation(sampler.num_steps):
        passes = jumping.passes(int(step))
        rows = range(block.starts[step], block.starts[step + 1])
        assert len(passes) == len(rows) >= 1
        for one, row in zip(passes, rows, strict=True):
            np.testing.assert_array_equal(one.indices, block.indices[row])
            np.testing.assert_array_equal(one.weights, block.weights[row])
        if len(passes) == 1:
            np.testing.assert_array_equal(batch(sampler, 3, int(step)).indices, passes[0].indices)


def test_a_batch_is_padded_with_index_zero_and_weight_zero_to_one_shape(make):
    sampler = make(50, 8, 2)
    source = BatchSource(sampler, 5)
    for step in range(sampler.num_steps):
        members = sampler.plan(5, step // sampler.steps_per_epoch).members(
            step % sampler.steps_per_epoch
        )
        one = source.batch(step)
        assert one.indices.shape == one.weights.shape == (sampler.padded_batch_size,)
        assert (one.indices.dtype, one.weights.dtype) == (np.int32, np.float32)
        np.testing.assert_array_equal(one.indices[: members.size], members)
        np.testing.assert_array_equal(one.weights[: members.size], 1)
        assert not one.indices[members.size :].any()
        assert not one.weights[members.size :].any()


def test_the_divisor_is_the_mean_batch_size_or_the_nominal_one(make_epochs):
    sampler = make_epochs(50, 8)
    if isinstance(sampler, Poisson) or not hasattr(sampler, "sampling_prob"):
        assert sampler.expected_batch_size == 8
    else:
        assert sampler.expected_batch_size == pytest.approx(50 / 7, rel=1e-15)


def test_steps_cover_the_data_with_a_last_batch_that_may_be_smaller(make_epochs):
    assert make_epochs(50, 8, 3).steps_per_epoch == 7
    assert make_epochs(50, 10, 3).steps_per_epoch == 5
    assert make_epochs(50, 8, 3).num_steps == 21


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 11), "batch_size must be at most num_examples = 10, got 11"),
        ((0, 1), "num_examples must be an integer >= 1"),
        ((10, 0), "batch_size must be an integer >= 1"),
        ((10, 2, 0), "epochs must be an integer >= 1"),
        ((2**31, 2), "at most 2\\^31 - 1"),
        ((10, 2, 10**18), "a run has at most 2\\^31 - 1 steps, got 5000000000000000000"),
    ],
)
def test_impossible_sizes_are_refused_in_one_line(make_epochs, arguments, message):
    with pytest.raises(ValueError, match=message) as refusal:
        make_epochs(*arguments)
    assert "\n" not in str(refusal.value)


WRONG_KINDS = {
    "Poisson(10, 2.5)": "batch_size must be an integer >= 1, got 2.5",
    "Shuffle('10', 2)": "num_examples must be an integer >= 1, got '10'",
    "Deterministic(10, 2, None)": "epochs must be an integer >= 1, got None",
    "Poisson(10, 2, max_batch_size=4.0)": "max_batch_size must be an integer >= 1, got 4.0",
    "Poisson(10, 2, overflow='drop')": "overflow must be truncate or accumulate, got drop",
    "BallsAndBins(10, 2, assignment='new')": "assignment must be redrawn or fixed",
    "Shuffle(10, 2, order=None)": "order must be redrawn or fixed",
    "BatchSource(Poisson(10, 2), 0.5)": "the sampling seed must be an integer",
}


def test_values_of_a_wrong_kind_are_refused_in_one_line():
    # In a process of its own, as here the checked annotations would be first to complain.
    script = ["from samplers import *"]
    for call in WRONG_KINDS:
        script += ["try:", f"    {call}", "except ValueError as error:", "    print(error)"]
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(script)], capture_output=True, text=True, check=True
    )
    refusals = ran.stdout.splitlines()
    assert len(refusals) == len(WRONG_KINDS)
    for refusal, message in zip(refusals, WRONG_KINDS.values(), strict=True):
        assert message in refusal


def test_steps_chunks_and_seeds_out_of_range_are_refused(make_epochs):
    sampler = make_epochs(10, 2, 2)
    source = BatchSource(sampler, 1)
    for step in (-1, 10):
        with pytest.raises(ValueError, match=f"step must be in \\[0, 10\\), got {step}"):
            source.batch(step)
    with pytest.raises(ValueError, match="chunk must be in"):
        sampler.participations(1, 0, 1)
    with pytest.raises(ValueError, match="seed must be an integer >= 0"):
        BatchSource(sampler, -3)


def test_a_sampler_is_a_value(make):
    sampler = make(50, 8, 2)
    assert sampler == make(50, 8, 2)
    assert hash(sampler) == hash(make(50, 8, 2))
    assert pickle.loads(pickle.dumps(sampler)) == sampler
    assert type(sampler)(**dataclasses.asdict(sampler)) == sampler
    assert type(sampler).from_terms(sampler.terms()).terms() == sampler.terms()
    assert sampler.unit == ("user" if "max_contributions" in sampler.terms() else "example")


def test_a_source_does_not_show_its_secret(make):
    assert "987654321" not in repr(BatchSource(make(5, 2), 987654321))


DRAWS_FOR_EVER = {
    "deterministic": "1867c50719e1a34a",
    "shuffle": "e8c47d287b15fa87",
    "shuffle-fixed": "e148d2a35f66bbae",
    "poisson": "8b12de0bc3edc392",
    "balls-and-bins": "4c7ceab6cc174635",
    "balls-and-bins-fixed": "1a83c5cfd8a1ff09",
    "user-poisson": "8b12de0bc3edc392",
    "multistage": "58668dbf7593157c",
    "units-then-poisson": "bb801ced14a31295",
    "full-batch": "cf32ef826301e2f1",
}


def test_a_seed_gives_the_same_draw_for_ever(make, request):
    # A resumed run must see the very batches it declared. If this fails, the definition of a draw
    # has changed: runs begun before cannot be continued.
    sampler = make(CHUNK + 5000, 3000, 2)
    digest = hashlib.sha256()
    for epoch in range(2):
        plan = sampler.plan(2**130 + 1, epoch)
        digest.update(plan.starts.astype("<i8").tobytes() + plan.examples.astype("<i4").tobytes())
    assert digest.hexdigest()[:16] == DRAWS_FOR_EVER[request.node.callspec.id]
