"""Bucket counts come from published constants, ids fold exactly, and missing stays apart."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.tasks.clicks.schema import DISPLAY_ADS, DISPLAY_CARDINALITIES, MISSING, Schema
from tests.experiments.tasks.clicks.slow import GOLDEN, WORD, split_mix


def oracle_id(value: int, feature: int, seed: int, buckets: int) -> int:
    key = split_mix((split_mix((seed + GOLDEN) & WORD) + (feature + 2) * GOLDEN) & WORD)
    return 1 + split_mix(value ^ key) % buckets


def test_bucket_counts_are_powers_of_two_with_few_collisions():
    assert len(DISPLAY_CARDINALITIES) == len(DISPLAY_ADS.buckets) == 26
    for cardinality, buckets in zip(DISPLAY_CARDINALITIES, DISPLAY_ADS.buckets, strict=True):
        assert buckets & (buckets - 1) == 0
        assert buckets <= 1 << 20
        if cardinality <= 1 << 16:
            assert buckets >= 4 * cardinality
        elif buckets < 1 << 20:
            assert 2**-0.5 <= buckets / cardinality <= 2**0.5


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20),
    st.integers(0, 25),
    st.integers(0, 2**70),
)
def test_hash_is_the_keyed_finaliser_of_split_mix(values, feature, seed):
    ids = DISPLAY_ADS.hash(np.array(values, dtype=np.uint64), feature, seed)
    assert ids.dtype == np.int32
    buckets = DISPLAY_ADS.buckets[feature]
    assert ids.tolist() == [oracle_id(v, feature, seed, buckets) for v in values]


@given(st.integers(0, 20), st.integers(0, 2**63), st.integers(0, 25))
def test_folding_equals_hashing_to_the_smaller_tables(exponent, seed, feature):
    most = 1 << exponent
    smaller = dataclasses.replace(
        DISPLAY_ADS, buckets=tuple(min(count, most) for count in DISPLAY_ADS.buckets)
    )
    values = np.random.default_rng(seed).integers(0, 2**32, size=500, dtype=np.uint64)
    ids = np.zeros((500, 26), dtype=np.int32)
    ids[:, feature] = DISPLAY_ADS.hash(values, feature, seed)
    folded = DISPLAY_ADS.fold(ids, most)
    assert folded.dtype == np.int32
    np.testing.assert_array_equal(folded[:, feature], smaller.hash(values, feature, seed))
    others = np.delete(folded, feature, axis=1)
    assert (others == MISSING).all()


@pytest.mark.short("1", "1024")
@pytest.mark.parametrize("most", [1, 1024, 1 << 20])
def test_stacked_tables_do_not_overlap_and_leave_no_gap(most):
    sizes, offsets = DISPLAY_ADS.table_sizes(most), DISPLAY_ADS.table_offsets(most)
    rows = np.concatenate([o + np.arange(n) for o, n in zip(offsets, sizes, strict=True)])
    np.testing.assert_array_equal(rows, np.arange(sum(sizes)))
    largest = DISPLAY_ADS.fold(np.array(DISPLAY_ADS.buckets, dtype=np.int32), most)
    assert (largest < np.array(sizes)).all()


@pytest.mark.parametrize("count", [0, -4, 3, 1000, 1 << 31])
def test_a_bucket_count_that_is_no_power_of_two_is_refused(count):
    with pytest.raises(ValueError, match="must be a power of two"):
        Schema("x", (), ("C1",), (count,))
    with pytest.raises(ValueError, match="must be a power of two"):
        DISPLAY_ADS.fold(np.zeros(26, dtype=np.int32), count)


def test_tables_of_more_rows_than_int32_are_refused():
    schema = Schema("wide", (), ("a", "b", "c"), (1 << 30,) * 3)
    assert schema.table_offsets(1 << 29)[-1] == 2 + (1 << 30)
    with pytest.raises(ValueError, match="tables of wide have 3,221,225,475 rows together"):
        schema.table_offsets()


def test_a_schema_needs_features_and_matching_buckets():
    with pytest.raises(ValueError, match="'none' has no columns to predict from"):
        Schema("none", (), (), ())
    with pytest.raises(ValueError, match="2 categorical columns but 1 bucket counts"):
        Schema("search", (), ("a", "b"), (2048,))
