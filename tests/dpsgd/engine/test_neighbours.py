"""Training on neighbouring data under one root: what an example can change, and what a user can.

The noise is the same for both, so the difference of the releases is that of the sums.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recording import recorder

from dpsgd import Mechanism, dpsgd, train_blocks
from dpsgd.noise.keys import RootKey
from samplers import BallsAndBins, BatchSource, Deterministic, Poisson, Shuffle

pytestmark = pytest.mark.usefixtures("unoptimised")

N, B, EPOCHS, CLIP = 60, 8, 2, 0.5
SAMPLERS = {
    "deterministic": Deterministic(N, B, EPOCHS),
    "shuffle": Shuffle(N, B, EPOCHS),
    "poisson": Poisson(N, B, EPOCHS),
    "balls-and-bins": BallsAndBins(N, B, EPOCHS),
    "accumulating poisson": Poisson(N, B, EPOCHS, overflow="accumulate", max_batch_size=3),
}
EVERY_SAMPLER = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
SEED = 7
ROOT = RootKey.from_insecure_seed(SEED)
STEPS = SAMPLERS["poisson"].num_steps


def loss_fn(params, x):
    return jnp.tanh(x @ params).sum() + jnp.square(x @ params).sum()  # x = 0 has gradient 0


ALGORITHM = dpsgd(loss_fn, recorder(STEPS))


def releases(sampler, rows):
    """The noised sum of every step, all at the same parameters: float64[steps, 6]."""
    mechanism, state = Mechanism(sampler, 1.0, CLIP), ALGORITHM.init(jnp.ones((2, 3)))
    for block in train_blocks(ALGORITHM, mechanism, state, rows, insecure_seed=SEED):
        found = jax.device_get(block.state.opt_state.releases)
    return np.float64(found).reshape(STEPS, -1) * sampler.expected_batch_size


def data():
    return np.random.default_rng(0).normal(size=(N, 2)).astype(np.float32)


@pytest.mark.short("shuffle", "poisson", "balls-and-bins")
@EVERY_SAMPLER
def test_example_moves_only_its_own_sums_and_by_at_most_c(sampler):
    rows = data()
    before = releases(sampler, rows)
    source = BatchSource(sampler, ROOT.sampling_seed(0))
    for example in (0, 17, N - 1):
        neighbour = rows.copy()
        neighbour[example] = 0.0
        moved = np.linalg.norm(releases(sampler, neighbour) - before, axis=1)
        takes_part = np.array([
            any(example in one.indices[one.weights > 0] for one in source.passes(step))
            for step in range(STEPS)
        ])  # fmt: skip
        assert (moved[~takes_part] == 0).all()  # to the bit
        assert (moved[takes_part] <= CLIP * (1 + 1e-4)).all()
        assert (moved[takes_part] > CLIP / 2).all()
