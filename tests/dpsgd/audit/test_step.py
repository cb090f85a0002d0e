"""The recording optimizer of the audits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpsgd.audit.step import recorder

pytestmark = pytest.mark.audit


def test_the_recorder_keeps_the_last_gradients_and_moves_nothing():
    optimizer = recorder(slots=2)
    params = {"w": jnp.full(20, 0.1), "b": jnp.zeros(())}
    state = optimizer.init(params)
    for k in (1.0, 2.0, 3.0):
        gradient = jax.tree.map(lambda leaf, k=k: jnp.full_like(leaf, k), params)
        updates, state = optimizer.update(gradient, state, params)
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    assert state.releases["w"][:, 0].tolist() == [3.0, 2.0]
