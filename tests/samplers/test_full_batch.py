"""The full batch: every row in every step, once, in passes of one shape, at any number of rows."""

import numpy as np
import pytest

from samplers import BatchSource, FullBatch
from samplers.plans import CHUNK


@pytest.mark.parametrize(
    ("n", "most"), [(1, 4096), (50, 50), (50, 7), (CHUNK + 9, 4096), (2 * CHUNK, CHUNK)]
)
def test_the_passes_of_a_step_are_all_rows_once(n, most):
    sampler = FullBatch(n, 3, max_batch_size=most)
    source = BatchSource(sampler, 0)
    assert sampler.num_steps == 3
    for step in range(3):
        passes = source.passes(step)
        assert len(passes) == sampler.max_passes == -(-n // most)
        assert sampler.accumulates == (len(passes) > 1)
        assert {batch.indices.size for batch in passes} == {min(n, most)}
        read = np.concatenate([batch.indices[batch.weights > 0] for batch in passes])
        np.testing.assert_array_equal(read, np.arange(n))


def test_the_shape_of_a_pass_does_not_grow_with_the_rows():
    few, many = FullBatch(88_000), FullBatch(2**31 - 1)
    assert few.padded_batch_size == many.padded_batch_size
    assert (many.max_passes - 1) * many.padded_batch_size < 2**31 - 1
    assert many.expected_batch_size == 2**31 - 1
