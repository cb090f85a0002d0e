"""Claims that hold for every sampler, over the list in conftest.py.

Draws at scale against the law that each states: `tests/dpsgd/audit/test_conformance.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import pickle
import re

import numpy as np
import pytest
from checked_types import assert_refused
from enumeration import matrix_law
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samplers import BatchSource, Poisson, batch
from samplers.plans import CHUNK
from tests.samplers.conftest import EPOCH_SAMPLERS, SAMPLERS, matrix

small_runs = st.tuples(
    st.integers(1, 60), st.integers(1, 60), st.integers(1, 3), st.integers(0, 2**200)
).filter(lambda run: run[1] <= run[0])
over_samplers = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.short(
    "poisson", "balls-and-bins", "shuffle", "full-batch", "multistage", "units*", "*cyclic"
)
@given(run=small_runs, shards=st.sampled_from([1, 2, 4, 7]))
@over_samplers
def test_columns_match_rows_of_chunks_drawn_in_any_order(make, small_chunks, run, shards):
    n, b, epochs, seed = run
    small_chunks(7)
    several = {"num_shards": min(shards, n)} if make in EPOCH_SAMPLERS.values() else {}
    sampler = make(n, b, epochs, **several)
    for epoch in reversed(range(epochs)):
        rows = np.zeros((n, sampler.steps_per_epoch), dtype=np.uint8)
        for chunk in np.random.default_rng(n).permutation(sampler.num_chunks):
            examples, steps = sampler.participations(seed, epoch, int(chunk))
            assert set(examples) <= set(range(chunk * 7, chunk * 7 + 7))
            np.add.at(rows, (examples, steps), 1)
        np.testing.assert_array_equal(rows, matrix(sampler, seed, epoch))
        if several and sampler.row_law().independent:  # shards change no draw
            np.testing.assert_array_equal(rows, matrix(make(n, b, epochs), seed, epoch))
        for shard in range(sampler.num_shards):
            own, plan = sampler.shard_range(shard), sampler.shard_plan(seed, epoch, shard)
            assert plan.examples.dtype == np.int32
            for step in range(sampler.steps_per_epoch):  # ascending, and nobody twice
                expected = np.flatnonzero(rows[own.start : own.stop, step])
                np.testing.assert_array_equal(plan.members(step), expected)


SMALL = [
    *((make, (1, 1), 2) for make in EPOCH_SAMPLERS),
    *((make, (5, 2), 2) for make in ("deterministic", "shuffle", "balls-and-bins")),
    ("poisson", (2, 1), 1),
    *((make, (5, b), 65_536) for make, b in (("poisson-cyclic", 2), ("balls-and-bins-cyclic", 2))),
    ("units-then-poisson", (7, 2), 2),
    ("shuffle", (4, 1), 2),  # the whole order is seen, over two buckets of about two each
    *(
        pytest.param(make, at, chunk, marks=pytest.mark.long)
        for make in EPOCH_SAMPLERS
        for at, chunk in (((5, 2), 2), ((3, 2), 2), ((4, 4), 2), ((5, 2), CHUNK))
    ),
]


@pytest.mark.parametrize(("name", "sizes", "chunk"), SMALL)
def test_an_epoch_has_its_exact_law(name, sizes, chunk, small_chunks, assert_law):
    # Every possible matrix is a cell, so marginals, independence and sizes are all implied.
    small_chunks(chunk)
    if name in ("poisson", "user-poisson") and sizes == (5, 2):
        sizes = (4, 2)  # 2^15 cells would be too many
    if name == "user-poisson" and sizes == (3, 2):
        sizes = (2, 1)  # the dearest law, of draws that are Poisson's
    sampler = SAMPLERS[name](*sizes)
    law = matrix_law(sampler)
    rare = {cell for cell, p in law.items() if p < 2e-3}  # of which there is one cell for all
    cells = [(cell,) for cell in law if cell not in rare] + [tuple(rare)] * bool(rare)
    exact = np.array([sum(law[one] for one in cell) for cell in cells])
    counts = dict.fromkeys(law, 0)
    least = 1000 if len(law) > 1 else 100  # if only one matrix is possible, each draw has it
    for seed in range(max(least, math.ceil(6 / exact[exact > 0].min()))):
        counts[matrix(sampler, seed, 0).tobytes()] += 1
    found = np.array([sum(counts[one] for one in cell) for cell in cells])
    assert_law(found, exact)
    if hasattr(sampler, "sampling_prob"):
        sizes = sum(p * sum(cell) for cell, p in law.items())  # a cell has a byte for each entry
        assert sampler.expected_batch_size == pytest.approx(sizes / sampler.steps_per_epoch)


def test_every_bit_of_a_long_seed_matters(make):
    sampler = make(400, 20)
    if sampler.row_law().certain:
        return
    draws = {matrix(sampler, 1 << bit, 0).tobytes() for bit in (0, 31, 32, 63, 64, 127, 128, 255)}
    assert len(draws) == 8


@pytest.mark.parametrize("shards", [1, 2, 7])
def test_blocks_hold_what_is_drawn_cut_split_and_padded(make, shards):
    if shards > 1 and make not in (*EPOCH_SAMPLERS.values(), SAMPLERS["poisson-cut"]):
        return
    sampler = make(50, 8, 3, **({"num_shards": shards} if shards > 1 else {}))
    cap, length = sampler.shard_batch_size, sampler.steps_per_epoch
    block, jumping = BatchSource(sampler, 3).fill(0, sampler.num_steps), BatchSource(sampler, 3)
    assert block.indices.shape[1] == block.weights.shape[1] == sampler.padded_batch_size
    assert (block.indices.dtype, block.weights.dtype) == (np.int32, np.float32)
    assert set(np.unique(block.weights)) <= {0.0, 1.0}
    assert not block.indices[block.weights == 0].any()
    places = block.indices if block.places is None else block.places
    for step in np.random.default_rng(0).permutation(sampler.num_steps).tolist():
        rows = range(block.starts[step], block.starts[step + 1])
        for one, row in zip(jumping.passes(step), rows, strict=True):
            np.testing.assert_array_equal(one.indices, places[row])
            np.testing.assert_array_equal(one.weights, block.weights[row])
        for shard in range(shards):
            plan = sampler.shard_plan(3, sampler.drawn_epoch(step // length), shard)
            members, columns = plan.members(step % length), slice(shard * cap, (shard + 1) * cap)
            taken = block.weights[rows.start : rows.stop, columns] > 0
            seen = block.indices[rows.start : rows.stop, columns][taken]
            assert len(rows) == (max(1, -(-members.size // cap)) if sampler.accumulates else 1)
            if sampler.accumulates or members.size <= cap:
                np.testing.assert_array_equal(seen, members)
            else:
                assert seen.size == cap
                assert set(seen) <= set(members)
                assert np.all(np.diff(seen) > 0)
            begin = sampler.shard_range(shard).start
            np.testing.assert_array_equal(
                places[rows.start : rows.stop, columns][taken], seen + begin
            )
    for held in (range(k, min(k + 3, shards)) for k in range(0, shards, 3)):
        source = BatchSource(sampler, 3, shards=held)
        part, columns = source.fill(0, sampler.num_steps), slice(held.start * cap, held.stop * cap)
        np.testing.assert_array_equal(part.indices, block.indices[:, columns])
        np.testing.assert_array_equal(part.weights, block.weights[:, columns])
        if shards > 1:
            np.testing.assert_array_equal(part.shards, np.repeat(list(held), cap))
            real = part.weights > 0
            np.testing.assert_array_equal(
                part.places[real] + source.rows.start, places[:, columns][real]
            )
            assert not part.places[~real].any()
        else:
            assert (part.places, part.shards) == (None, None)


def test_a_batch_is_that_of_its_source(make):
    sampler = make(50, 8, 3)
    if sampler.max_passes == 1:
        one, other = batch(sampler, 3, 5), BatchSource(sampler, 3).batch(5)
        np.testing.assert_array_equal(one.indices, other.indices)


def test_the_divisor_is_the_mean_batch_size_or_the_nominal_one(make_epochs):
    sampler = make_epochs(50, 8)
    if isinstance(sampler, Poisson) or not hasattr(sampler, "sampling_prob"):
        assert sampler.expected_batch_size == 8
    else:
        assert sampler.expected_batch_size == pytest.approx(50 / 7, rel=1e-15)


def test_steps_cover_the_data_with_a_smaller_last_batch(make_epochs):
    assert make_epochs(50, 8, 3).steps_per_epoch == 7
    assert make_epochs(50, 10, 3).steps_per_epoch == 5
    assert make_epochs(50, 8, 3).num_steps == 21


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 11), "batch_size must be at most num_examples = 10, got 11"),
        ((2**31, 2), "at most 2\\^31 - 1"),
        ((10, 2, 10**18), "a run has at most 2\\^31 - 1 steps, got 5000000000000000000"),
    ],
)
def test_impossible_sizes_are_refused_in_one_line(make_epochs, arguments, message):
    with pytest.raises(ValueError, match=message) as refusal:
        make_epochs(*arguments)
    assert "\n" not in str(refusal.value)


def test_values_outside_their_annotations_are_refused_by_name(make):
    assert_refused(make(40, 8, 2), 0, -1, 2**63)


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
    several = {"num_shards": 3} if make in EPOCH_SAMPLERS.values() else {}
    sampler = make(50, 8, 2, **several)
    assert sampler == make(50, 8, 2, **several)
    assert hash(sampler) == hash(make(50, 8, 2, **several))
    assert pickle.loads(pickle.dumps(sampler)) == sampler
    assert dataclasses.replace(sampler) == sampler
    again = type(sampler).from_terms(sampler.terms())
    assert again.terms() == sampler.terms()
    assert again.privacy(1.0) == sampler.privacy(1.0)
    assert again.padded_batch_size == sampler.padded_batch_size
    assert sampler.with_epochs(sampler.epochs + 1).epochs == sampler.epochs + 1
    if several:
        assert dataclasses.replace(again, num_shards=1).terms() != sampler.terms()
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
    "multistage": "58668dbf7593157c",
    "units-then-poisson": "bb801ced14a31295",
    "full-batch": "cf32ef826301e2f1",
    "poisson-cyclic": "1a4273e217efa6d5",
    "balls-and-bins-cyclic": "e08bf838a1df4aa5",
}


def test_a_seed_gives_the_same_draw_for_ever(make, request):
    # A resumed run must see the very batches it declared. If this fails, the definition of a draw
    # has changed: runs begun before cannot be continued.
    sampler = make(CHUNK + 5000, 3000, 2)
    digest = hashlib.sha256()
    for epoch in range(2):
        plan = sampler.plan(2**130 + 1, epoch)
        digest.update(plan.starts.astype("<i8").tobytes() + plan.examples.astype("<i4").tobytes())
    kind = re.sub("-cut$|-passes$|^user-", "", request.node.callspec.id)  # the draws are the same
    assert digest.hexdigest()[:16] == DRAWS_FOR_EVER[kind]
