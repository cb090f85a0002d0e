"""Noised Newton steps find the temperature of an exact fit, and no noise throws it away."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special

from accounting import GaussianProfile, calibrate
from dpsgd import Mechanism, RootKey, Temperature, refine, temperature_sums
from dpsgd.core.queries import FullSums
from dpsgd.engine.newton import hessian_weight
from dpsgd.engine.temperature import L2_CLIP_NORM
from samplers import Poisson

N, STEPS = 4_000, 4


def logits(params, example):
    return example["z"]


def label(example):
    return example["y"]


def scale(params, a):
    return a


TEMPERATURE = Temperature(logits, label, scale)


def rows(a, classes=4, n=N, seed=0):
    """Logits z that a z would calibrate, and labels."""
    rng = np.random.default_rng(seed)
    z = 2 * rng.normal(size=(n, classes))
    labels = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    return {"z": (z / a).astype(np.float32), "y": labels.astype(np.int32)}


def log_loss(a, data):
    z = a * data["z"].astype(np.float64)
    return float(np.mean(special.logsumexp(z, axis=1) - z[np.arange(len(z)), data["y"]]))


def exact(data):
    """The scale of least log loss, by an optimizer from elsewhere."""
    return optimize.minimize_scalar(log_loss, args=(data,), bounds=(0.1, 5), method="bounded").x


def fitted(data, sums, seed=0):
    mechanism = Mechanism(Poisson(len(data["y"]), 10), 1.0, 1.0, full_sums=sums)
    root = RootKey.from_insecure_seed(seed)
    return float(refine(TEMPERATURE, mechanism, (), data, root=root).params)


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("a", [0.4, 0.8, 1.6])
def test_without_noise_the_steps_end_at_the_exact_fit(a, classes):
    data = rows(a, classes)
    found = fitted(data, FullSums(STEPS, 1e-6, L2_CLIP_NORM))
    assert found == pytest.approx(exact(data), abs=0.02)
    assert log_loss(found, data) - log_loss(exact(data), data) < 4e-4
    assert temperature_sums(10**6).count == STEPS


def test_the_vector_of_a_row_holds_the_derivatives_of_its_log_loss():
    row = TEMPERATURE.reads((), {"z": jnp.array([1.0, -2.0, 0.5, -30.0]), "y": 2})
    np.testing.assert_allclose(row["x"], [1, 0.75, 11.5 / 12, 0], atol=1e-6)

    def loss(theta):
        return jax.nn.logsumexp(theta * row["x"]) - theta * row["at_label"]

    @jax.jit
    def both(theta):
        expected = jax.grad(loss)(theta), hessian_weight(1.0) * jax.hessian(loss)(theta)
        return TEMPERATURE.statistic(theta, row), jnp.stack(expected)

    np.testing.assert_allclose(*both(jnp.array(7.0)), atol=1e-6)


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_the_noise_that_is_chosen_costs_little_log_loss(epsilon):
    n = 26_000
    data = rows(0.75, n=n)
    least, without = log_loss(exact(data), data), log_loss(1.0, data)
    assert without - least > 0.01
    sums = temperature_sums(n, epsilon=epsilon, delta=1 / n)
    lost = [log_loss(fitted(data, sums, seed), data) - least for seed in range(4)]
    assert np.mean(lost) < 5e-4
    # What the run's noise grows by, to pay for them.
    mu = 1 / calibrate(GaussianProfile, epsilon=epsilon, delta=1 / n)
    assert sums.count / sums.noise_multiplier**2 < 0.1 * mu**2


def test_the_more_rows_the_more_noise_and_few_rows_release_nothing():
    assert temperature_sums(1_000) is None
    sigmas = [temperature_sums(n, epsilon=3.0).noise_multiplier for n in (26_000, 10**6)]
    assert sigmas == sorted(sigmas)


def test_a_gap_that_is_none_is_refused():
    with pytest.raises(ValueError, match="largest_gap must be finite and > 0, got 0"):
        Temperature(logits, label, scale, largest_gap=0)
