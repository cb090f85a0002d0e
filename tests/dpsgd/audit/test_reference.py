"""The audit's own noise is the documented law, and that which the program draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dpsgd.audit import reference
from dpsgd.core import gaussian, normals
from dpsgd.core.philox import philox4x32

KEY = np.array([0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89], np.uint32)


@pytest.mark.parametrize(
    ("counter", "key", "block"),
    [
        ([0] * 4, (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, (2**32 - 1,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_blocks_are_those_of_the_published_vectors(counter, key, block):
    """Known answers of Random123 1.09, `kat_vectors`, philox4x32-10."""
    blocks = reference.philox([np.array([word], np.uint64) for word in counter], *key)
    assert " ".join(f"{int(word[0]):08x}" for word in blocks) == block


standard_normal = jax.jit(gaussian.standard_normal, static_argnums=3)


@pytest.mark.parametrize("step", [0, 1, 2**31 - 1])
@pytest.mark.parametrize("leaf", [0, 5])
def test_normals_are_those_of_the_program_but_for_rounding(step, leaf):
    values = standard_normal(KEY, step, leaf, (3, 7, 500))
    expected = reference.normals(KEY, step, leaf, np.arange(values.size).reshape(values.shape))
    np.testing.assert_allclose(values, expected, atol=4e-6)


@pytest.mark.parametrize("purpose", [gaussian.STEP, gaussian.MOMENTUM, gaussian.VALUE])
def test_normals_and_uniforms_of_rows_are_those_of_the_program(purpose):
    rows, width = jnp.array([0, 7, 2**20]), 9
    index = np.asarray(rows)[:, None] * width + np.arange(width)
    arguments = KEY, 11, 3

    @jax.jit
    def drawn(rows):
        table = gaussian.TableRows(3, purpose, rows, width)
        return gaussian.normal_at(KEY, 11, table), gaussian.uniform_at(KEY, 11, table)

    z, u = drawn(rows)
    np.testing.assert_allclose(z, reference.normals(*arguments, index, purpose), atol=4e-6)
    np.testing.assert_array_equal(u, reference.uniforms(*arguments, index, purpose))


@pytest.mark.long
def test_an_index_beyond_32_bits_has_words_of_its_own():
    index = np.array([5, 2**32 + 5, 2**63])
    low, high = (jnp.asarray(word.astype(np.uint32)) for word in (index % 2**32, index // 2**32))
    key = jnp.asarray(KEY)
    counter = low, high, jnp.uint32(3) ^ key[2], jnp.uint32(8) ^ key[3]
    words = philox4x32(counter, (key[0], key[1]))
    values = np.asarray(normals.normal(words))
    np.testing.assert_allclose(values, reference.normals(KEY, 8, 3, index), atol=4e-6)


def test_normals_are_normal_and_uniforms_uniform():
    index = np.arange(2**18)
    z, u = (draw(KEY, 3, 1, index) for draw in (reference.normals, reference.uniforms))
    assert stats.kstest(z, "norm").pvalue > 1e-6
    assert stats.kstest(u, "uniform").pvalue > 1e-6
    assert abs(stats.spearmanr(z, u).statistic) < 5 / 2**9
