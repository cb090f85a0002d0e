"""In full blocks of 64 steps: what is right in a block of four steps may be wrong in these."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import Mechanism, Noise, RootKey, dpsgd, train_blocks
from dpsgd.noise.gaussian import add_gaussian_noise
from samplers import BallsAndBins, Poisson

SIGMA, CLIP = 0.7, 2.0
ROOT = RootKey(bytes(range(32)), insecure=True)  # several tests train under it


def blocks_of(algorithm, mechanism, params, rows, **how):
    state = algorithm.init(params, mechanism)
    return train_blocks(algorithm, mechanism, state, rows, root=ROOT, **how)


# 130 steps in ten epochs: two full blocks of 64 and a short one.


@dataclass(frozen=True)
class Remembered(Noise):
    """Each step's noise is its own and half of the one before. It has no price."""

    def init(self, like):
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), like)

    def add(self, total, state, key, step, scales):
        zeros = jax.tree.map(jnp.zeros_like, total)
        fresh = add_gaussian_noise(zeros, key, step, scales.noise_stddev)
        noise = jax.tree.map(lambda z, before: z + before / 2, fresh, state)
        return jax.tree.map(lambda s, n: (s + n) / scales.expected_batch_size, total, noise), noise


STEPS, N, D = 130, 260, 64
EPOCHS = {"num_examples": N, "batch_size": 20, "epochs": 10}
PASSES = BallsAndBins(**EPOCHS, overflow="accumulate", max_batch_size=5)
CUT = Poisson(**EPOCHS, max_batch_size=22)
RUNS = [
    pytest.param(Mechanism(CUT, SIGMA, CLIP), id="batches that are cut", marks=pytest.mark.long),
    pytest.param(Mechanism(PASSES, SIGMA, CLIP, Remembered()), id="passes, and noise remembered"),
]
ROWS = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)


def squares(params, example):
    return (example[1:] @ params - example[0]) ** 2


SQUARES = dpsgd(squares, optax.adam(optax.cosine_decay_schedule(0.1, STEPS)))


@pytest.mark.long
@pytest.mark.usefixtures("optimised")  # bits are the claim
@pytest.mark.parametrize("mechanism", RUNS)
def test_130_steps_in_blocks_of_64_are_bit_for_bit_those_taken_one_by_one(mechanism):
    def steps(block_steps):
        seen, start = [], np.zeros(D - 1, np.float32)
        for block in blocks_of(SQUARES, mechanism, start, ROWS, block_steps=block_steps):
            shown = np.asarray(block.watched)[: len(block.steps)]
            seen.append(np.stack([*block.diagnostics, *shown.T]))
        state = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(block.state)]
        return np.concatenate(seen, axis=1), state

    (together, state), (alone, last) = steps(64), steps(1)
    assert together.shape == (4 + D - 1, STEPS)
    assert together.tobytes() == alone.tobytes()
    assert state == last
