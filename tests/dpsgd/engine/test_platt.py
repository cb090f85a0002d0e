"""Noised Newton steps find the Platt scaling of an exact fit, and no noise throws it away."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special

from accounting import GaussianProfile, calibrate
from dpsgd import Mechanism, Platt, RootKey, platt_sums, refine
from dpsgd.core.queries import FullSums
from dpsgd.engine.platt import L2_CLIP_NORM
from samplers import Poisson

N, RANGE, STEPS = 4_000, 6.0, 4


def logit(params, example):
    return example["l"]


def label(example):
    return example["y"]


def pair(params, a, c):
    return jnp.stack([a, c])


PLATT = Platt(logit, label, pair)


def rows(a, c, rate=-1.1, n=N, seed=0):
    """Logits that a l + c would calibrate, and labels."""
    rng = np.random.default_rng(seed)
    calibrated = rng.normal(rate, 0.9, n)
    labels = rng.random(n) < special.expit(calibrated)
    return {
        "l": ((calibrated - c) / a).astype(np.float32),
        "y": labels.astype(np.float32),
    }


def log_loss(both, data):
    z = both[0] * data["l"] + both[1]
    return float(np.mean(np.logaddexp(0, z) - data["y"] * z))


def exact(data):
    """(a, c) of least log loss on logits cut to the range, by an optimizer from elsewhere."""
    cut = {"l": np.clip(data["l"].astype(np.float64), -RANGE, RANGE), "y": data["y"]}
    return optimize.minimize(log_loss, [1.0, 0.0], (cut,), method="Nelder-Mead", tol=1e-9).x


def fitted(data, sums, seed=0, platt=PLATT):
    mechanism = Mechanism(Poisson(len(data["y"]), 10), 1.0, 1.0, full_sums=sums)
    root = RootKey.from_insecure_seed(seed)
    return np.asarray(refine(platt, mechanism, (), data, root=root).params)


@pytest.mark.parametrize("c", [-1.0, 0.15, 1.0])
@pytest.mark.parametrize("a", [0.3, 0.8, 1.5])
@pytest.mark.parametrize("rate", [-1.1, 0.0])
def test_without_noise_the_steps_end_at_the_exact_fit(a, c, rate):
    data = rows(a, c, rate)
    found = fitted(data, FullSums(STEPS, 1e-6, L2_CLIP_NORM))
    np.testing.assert_allclose(found, exact(data), atol=1e-3)
    assert platt_sums(10**6).count == STEPS


@pytest.mark.long
def test_the_noise_that_is_chosen_costs_little_log_loss():
    n = 20_000
    data = rows(0.75, 0.1, n=n)
    least, without = log_loss(exact(data), data), log_loss((1, 0), data)
    assert without - least > 0.01
    for epsilon in (1.0, 8.0):
        sums = platt_sums(n, epsilon=epsilon, delta=1 / n)
        lost = [log_loss(fitted(data, sums, seed), data) - least for seed in range(4)]
        assert min(lost) >= 0
        assert np.mean(lost) < 5e-4
        # What the run's noise grows by, to pay for them.
        mu = 1 / calibrate(GaussianProfile, epsilon=epsilon, delta=1 / n)
        assert sums.count / sums.noise_multiplier**2 < 0.1 * mu**2


def test_the_more_rows_the_more_noise_and_few_rows_release_nothing():
    assert platt_sums(1_000) is None
    assert platt_sums(1) is None
    sigmas = [platt_sums(n).noise_multiplier for n in (10_000, 88_000, 10**6, 37 * 10**6)]
    assert sigmas == sorted(sigmas)
    assert platt_sums(10_000, epsilon=0.1) is None
    assert platt_sums(88_000, epsilon=1.0).noise_multiplier > 2 * (
        platt_sums(88_000, epsilon=8.0).noise_multiplier
    )


def test_a_row_whose_logit_is_no_number_counts_for_nothing():
    data = rows(0.7, 0.1)
    data["l"][3], data["y"][4] = np.nan, np.nan
    kept = {name: np.delete(column, [3, 4]) for name, column in data.items()}
    sums = FullSums(STEPS, 1e-6, L2_CLIP_NORM)
    np.testing.assert_allclose(fitted(data, sums), exact(kept), atol=1e-3)


def test_a_range_that_is_none_is_refused():
    with pytest.raises(ValueError, match="largest_logit must be finite and > 0, got 0"):
        Platt(logit, label, pair, largest_logit=0)
