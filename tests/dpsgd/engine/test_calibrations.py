"""Every calibration: its sensitivity, and which rows count.

A new one gets all of this by one entry of `KINDS`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpsgd import Mechanism, Platt, Refinement, RootKey
from dpsgd.core.queries import FullSums
from dpsgd.engine.calibration import RULES, Affine, Temperature
from dpsgd.engine.queries import refine, sums_run
from samplers import Poisson

N = 600


def value(params, example):
    return example["z"]


def label(example):
    return example["y"]


def vector(params, *found):
    return jnp.concatenate([jnp.ravel(one) for one in found])


def numbers(rng, *shape):
    """Of all sizes and both signs."""
    return (rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(np.float32)


@dataclass(frozen=True)
class Kind:
    """A calibration, and what its rows are."""

    of: Refinement
    width: tuple[int, ...]
    """Of what a model says of a row."""
    labels: Callable
    """(rng, z) -> labels that depend on what the model says."""
    largest_shift: float
    scales: tuple[float, float] = (1 / 8, 4.0)
    spread: float = 2.0
    """Of what it says."""

    def rows(self, rng):
        """Rows from which a fit can be told."""
        z = (self.spread * rng.normal(size=(N, *self.width))).astype(np.float32)
        return {"z": z, "y": self.labels(rng, z)}

    def wild(self, rng):
        """Rows of any numbers."""
        z = numbers(rng, N, *self.width) + rng.choice([-9, 0, 9], (N, *self.width))
        z = z.astype(np.float32)
        return {"z": z, "y": rng.permutation(self.labels(rng, z))}

    @property
    def most(self):
        return RULES[self.of.kind].l2_clip_norm

    @property
    def size(self):
        """Of the vector of a row."""
        row = self.of.reads((), {"z": jnp.zeros(self.width), "y": 0})
        return self.of.statistic(self.of.start(), row).size

    def folded(self, rng, scale):
        """States after noisy means."""

        def ends(means):
            state = self.of.start()
            for mean in means:
                state = self.of.fold(state, mean)
            return state

        drawn = scale * rng.normal(size=(100, RULES[self.of.kind].steps, self.size))
        return jax.jit(jax.vmap(ends))(drawn.astype(np.float32))

    def fitted(self, data):
        count = len(data["y"])
        sums = FullSums(RULES[self.of.kind].steps, 1e-6, self.most)
        mechanism = Mechanism(Poisson(count, 10), 1.0, 1.0, full_sums=sums)
        root = RootKey.from_insecure_seed(0)
        return np.asarray(refine(self.of, mechanism, (), data, root=root).params)


def one_of_two(rng, z):
    return (0.7 * z + rng.logistic(size=N) > 0.3).astype(np.float32)


def one_of_several(rng, z):
    return (0.7 * z + rng.gumbel(size=z.shape)).argmax(axis=1).astype(np.int32)


def a_number(rng, z):
    return (0.7 * z + 0.1 + 0.1 * rng.normal(size=N)).astype(np.float32)


def of_classes(count):
    return Kind(Temperature(value, label, vector), (count,), one_of_several, 0.0)


KINDS = {
    "platt": Kind(Platt(value, label, vector), (), one_of_two, 8.0),
    "temperature, 2 classes": of_classes(2),
    "temperature, 9 classes": of_classes(9),
    "affine": Kind(Affine(value, label, vector), (), a_number, 1.0, (1 / 4, 4.0), 0.4),
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@each_kind
def test_no_vector_of_a_row_is_longer_than_the_norm_that_it_is_clipped_to(kind):
    rng = np.random.default_rng(0)
    data = kind.wild(rng)
    states = [kind.of.start()[None], *(kind.folded(rng, scale)[:40] for scale in (0.1, 10.0))]

    @jax.jit
    @jax.vmap
    def norms(state):
        read = jax.vmap(kind.of.reads, (None, 0))((), data)
        found = jax.vmap(kind.of.statistic, (None, 0))(state, read)
        return jnp.linalg.norm(found.astype(jnp.float32), axis=1)

    found = np.asarray(norms(jnp.concatenate(states)))
    assert np.isfinite(found).all()
    assert 0.95 * kind.most < found.max() < kind.most * (1 - 2e-6)


@each_kind
def test_no_row_is_clipped(kind):
    sums = FullSums(1, 1.0, kind.most)
    mechanism = Mechanism(Poisson(N, 10), 1.0, 1.0, full_sums=sums).sums_mechanism()
    run = sums_run(kind.of, mechanism, (), kind.wild(np.random.default_rng(1)))
    _, counted = jax.jit(run.algorithm.clipped_sum)(
        run.state.params, run.rows, jnp.ones(N), mechanism.scales()
    )
    assert (counted.clipped_count, counted.nonfinite_count) == (0, 0)


@each_kind
def test_a_row_without_class_or_number_counts_for_nothing(kind):
    rng = np.random.default_rng(3)
    data = kind.rows(rng)
    gone = {name: column.copy() for name, column in data.items()}
    data["z"][:40] = np.nan
    absent = 40
    if data["y"].dtype == np.int32:
        absent = 70
        data["y"][40:absent] = rng.choice([-1, *kind.width, 2**31 - 1, -(2**31)], 30)
    gone["z"][:absent] = np.nan
    found = kind.fitted(data)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, kind.fitted(gone), atol=1e-4)
    left = {name: column[absent:] for name, column in data.items()}
    np.testing.assert_allclose(found, kind.fitted(left), atol=0.05)


@each_kind
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e4, 1e30, np.inf, np.nan])
def test_whatever_is_released_the_numbers_are_finite_and_keep_to_their_range(kind, scale):
    states = kind.folded(np.random.default_rng(4), scale)
    found = np.asarray(jax.vmap(kind.of.apply, (None, 0))((), states))
    assert np.isfinite(found).all()
    assert kind.scales[0] - 1e-6 <= found[:, 0].min() <= found[:, 0].max() <= kind.scales[1] + 1e-6
    assert np.abs(found[:, 1:]).max(initial=0) <= kind.largest_shift
