"""The noised step finds the affine fit of least squares, and no noise throws it away."""

import jax.numpy as jnp
import numpy as np
import pytest

from accounting import GaussianProfile, calibrate
from dpsgd import Affine, Mechanism, RootKey, affine_sums, refine
from dpsgd.core.queries import FullSums
from dpsgd.engine.affine import L2_CLIP_NORM
from samplers import Poisson

N = 4_000


def prediction(params, example):
    return example["u"]


def label(example):
    return example["y"]


def pair(params, a, c):
    return jnp.stack([a, c])


AFFINE = Affine(prediction, label, pair)


def rows(a=0.7, c=0.1, n=N, spread=0.2):
    """Predictions that a u + c would calibrate, and labels."""
    rng = np.random.default_rng(0)
    u = rng.normal(0.1, spread, n).clip(-0.9, 0.9)
    y = (a * u + c + rng.normal(0, 0.1, n)).clip(-1, 1)
    return {"u": u.astype(np.float32), "y": y.astype(np.float32)}


def least_squares(data):
    return np.polyfit(data["u"].astype(np.float64), data["y"], 1)


def fitted(data, sums, seed=0, affine=AFFINE):
    mechanism = Mechanism(Poisson(len(data["y"]), 10), 1.0, 1.0, full_sums=sums)
    root = RootKey.from_insecure_seed(seed)
    return np.asarray(refine(affine, mechanism, (), data, root=root).params)


QUIET = FullSums(1, 1e-6, L2_CLIP_NORM)


@pytest.mark.parametrize("c", [-0.3, 0.1])
@pytest.mark.parametrize("a", [0.5, 1.5])
def test_without_noise_one_step_is_the_fit_of_least_squares(a, c):
    data = rows(a, c)
    np.testing.assert_allclose(fitted(data, QUIET), least_squares(data), atol=1e-3)


def test_predictions_that_are_all_alike_are_shifted_and_keep_their_scale():
    data = rows(spread=0.0)
    a, c = fitted(data, QUIET)
    mean = float(np.mean(data["u"]))
    assert a == pytest.approx(1, abs=0.1)
    assert a * mean + c == pytest.approx(float(np.mean(data["y"])), abs=1e-3)


def test_residuals_beyond_the_largest_count_as_the_largest():
    data = rows(a=1.0, c=0.0)
    data["y"][:200] = 1.0  # outlying labels
    robust = fitted(data, QUIET, affine=Affine(prediction, label, pair, 0.1))
    plain = fitted(data, QUIET)
    at = np.array([0.1, 1.0])
    assert abs(robust @ at - 0.1) < 0.3 * abs(plain @ at - 0.1)


def test_the_noise_that_is_chosen_costs_little_of_the_squared_error():
    n = 26_000
    data = rows(n=n)
    best = least_squares(data)
    lost = []
    for epsilon in (1.0, 8.0):
        sums = affine_sums(n, epsilon=epsilon, delta=1 / n)
        for seed in range(4):
            off = np.polyval(fitted(data, sums, seed) - best, data["u"])
            lost.append(np.mean(off**2))
        # What the run's noise grows by, to pay for the sum.
        mu = 1 / calibrate(GaussianProfile, epsilon=epsilon, delta=1 / n)
        assert sums.count / sums.noise_multiplier**2 < 0.1 * mu**2
    assert max(lost) < 1e-3
    assert np.mean(lost) < 2e-4


def test_few_rows_release_nothing_and_a_range_that_is_none_is_refused():
    assert affine_sums(1_000) is None
    assert affine_sums(10**6).noise_multiplier > affine_sums(26_000).noise_multiplier
    for most in (0, 1.5, np.nan):
        with pytest.raises(ValueError, match=r"largest_residual must lie in \(0, 1\], got"):
            Affine(prediction, label, pair, most)
