"""Calibrations without noise are exact fits, and the noise that is chosen costs little."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special

from accounting import GaussianProfile, calibrate
from dpsgd import Mechanism, Platt, RootKey, calibration_sums
from dpsgd.core.queries import FullSums
from dpsgd.engine.calibration import RULES, Affine, Temperature
from dpsgd.engine.newton import hessian_weight
from dpsgd.engine.queries import refine
from samplers import Poisson


def said(params, example):
    return example["z"]


def label(example):
    return example["y"]


def numbers(params, *found):
    return jnp.stack(found)


def of_two_classes(a, c, rate=-1.1, n=4_000):
    """Logits that a z + c would calibrate, and labels."""
    rng = np.random.default_rng(0)
    calibrated = rng.normal(rate, 0.9, n)
    labels = rng.random(n) < special.expit(calibrated)
    return {"z": ((calibrated - c) / a).astype(np.float32), "y": labels.astype(np.float32)}


def of_classes(a, classes=4, n=4_000):
    """Logits that a z would calibrate, and labels."""
    rng = np.random.default_rng(0)
    z = 2 * rng.normal(size=(n, classes))
    labels = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    return {"z": (z / a).astype(np.float32), "y": labels.astype(np.int32)}


def of_numbers(a, c, spread=0.2, n=4_000):
    """Predictions that a z + c would calibrate, and labels."""
    rng = np.random.default_rng(0)
    z = rng.normal(0.1, spread, n).clip(-0.9, 0.9)
    y = (a * z + c + rng.normal(0, 0.1, n)).clip(-1, 1)
    return {"z": z.astype(np.float32), "y": y.astype(np.float32)}


def log_loss_of_two(both, data):
    z = both[0] * np.clip(data["z"].astype(np.float64), -6, 6) + both[1]
    return float(np.mean(np.logaddexp(0, z) - data["y"] * z))


def log_loss(a, data):
    z = a[0] * data["z"].astype(np.float64)
    return float(np.mean(special.logsumexp(z, axis=1) - z[np.arange(len(z)), data["y"]]))


def squared_error(both, data):
    return float(np.mean((np.polyval(both, data["z"].astype(np.float64)) - data["y"]) ** 2))


@dataclass(frozen=True)
class Fit:
    """A calibration, rows that it mends, and its loss.

    Attributes:
      of: The calibration.
      rows: (a, ...) -> rows that the numbers a, ... would calibrate.
      loss: (numbers, rows) -> the loss of the rows, calibrated by these numbers.
      tolerance: Of the numbers that are found without noise.
      most_loss: What noise may cost at epsilon 1 and 8, mean of four seeds.
    """

    of: object
    rows: Callable
    loss: Callable
    tolerance: float
    most_loss: float

    @property
    def rule(self):
        return RULES[self.of.kind]

    def exact(self, data):
        """The numbers of least loss, by an optimizer from elsewhere."""
        begin = np.array([1.0, 0.0][: self.of.start().size])
        return optimize.minimize(self.loss, begin, (data,), method="Nelder-Mead", tol=1e-9).x

    def found(self, data, sums=None, seed=0, of=None):
        sums = sums or FullSums(self.rule.steps, 1e-6, self.rule.l2_clip_norm)
        mechanism = Mechanism(Poisson(len(data["y"]), 10), 1.0, 1.0, full_sums=sums)
        root = RootKey.from_insecure_seed(seed)
        return np.asarray(refine(of or self.of, mechanism, (), data, root=root).params)


PLATT = Fit(Platt(said, label, numbers), of_two_classes, log_loss_of_two, 1e-3, 5e-4)
TEMPERATURE = Fit(Temperature(said, label, numbers), of_classes, log_loss, 0.02, 5e-4)
AFFINE = Fit(Affine(said, label, numbers), of_numbers, squared_error, 1e-3, 2e-4)
each_fit = pytest.mark.parametrize(
    ("fit", "how"),
    [
        pytest.param(PLATT, (0.75, 0.1), id="platt", marks=pytest.mark.long),
        pytest.param(TEMPERATURE, (0.75,), id="temperature"),
        pytest.param(AFFINE, (0.7, 0.1), id="affine"),
    ],
)
MISCALIBRATED = [
    *[(PLATT, (a, c, r)) for a in (0.3, 0.8, 1.5) for c in (-1.0, 0.15, 1.0) for r in (-1.1, 0.0)],
    *[(TEMPERATURE, (a, classes)) for a in (0.4, 0.8, 1.6) for classes in (2, 3, 10)],
    *[(AFFINE, (a, c)) for a in (0.5, 1.5) for c in (-0.3, 0.1)],
]


@pytest.mark.parametrize(("fit", "how"), MISCALIBRATED)
def test_steps_without_noise_end_at_the_exact_fit(fit, how):
    data = fit.rows(*how)
    found, exact = fit.found(data), fit.exact(data)
    np.testing.assert_allclose(found, exact, atol=fit.tolerance)
    assert fit.loss(found, data) - fit.loss(exact, data) < 4e-4


@each_fit
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_chosen_noise_costs_little_loss(fit, how, epsilon):
    n = 26_000
    data = fit.rows(*how, n=n)
    least = fit.loss(fit.exact(data), data)
    assert fit.loss([1.0, 0.0], data) - least > 0.001
    sums = calibration_sums(fit.of.kind, n, epsilon=epsilon, delta=1 / n)
    lost = [fit.loss(fit.found(data, sums, seed), data) - least for seed in range(4)]
    assert np.mean(lost) < fit.most_loss
    # What the run's noise grows by, to pay for them.
    mu = 1 / calibrate(GaussianProfile, epsilon=epsilon, delta=1 / n)
    assert sums.count / sums.noise_multiplier**2 < 0.1 * mu**2


@pytest.mark.parametrize("kind", RULES)
def test_more_rows_get_more_noise_and_few_rows_no_sums(kind):
    assert calibration_sums(kind, 1) is None
    assert calibration_sums(kind, 1_000) is None
    assert calibration_sums(kind, 10_000, epsilon=0.1) is None
    sums = [calibration_sums(kind, n, epsilon=3.0) for n in (26_000, 88_000, 10**6, 37 * 10**6)]
    assert {one.count for one in sums} == {RULES[kind].steps}
    sigmas = [one.noise_multiplier for one in sums]
    assert sigmas == sorted(sigmas)
    more, less = (calibration_sums(kind, 10**6, epsilon=e).noise_multiplier for e in (1.0, 8.0))
    assert more > 2 * less


@pytest.mark.parametrize(
    ("kind", "name", "range_"),
    [
        (Platt, "largest_logit", "be finite and > 0"),
        (Temperature, "largest_gap", "be finite and > 0"),
        (Affine, "largest_residual", r"lie in \(0, 1\]"),
    ],
)
@pytest.mark.parametrize("value", [0, np.inf, np.nan])
def test_public_ranges_that_are_none_are_refused(kind, name, range_, value):
    with pytest.raises(ValueError, match=f"{name} must {range_}, got {value}"):
        kind(said, label, numbers, value)


def test_the_vector_of_a_row_holds_the_derivatives_of_its_log_loss():
    of = TEMPERATURE.of
    row = of.reads((), {"z": jnp.array([1.0, -2.0, 0.5, -30.0]), "y": 2})
    np.testing.assert_allclose(row["x"], [1, 0.75, 11.5 / 12, 0], atol=1e-6)

    def loss(theta):
        return jax.nn.logsumexp(theta * row["x"]) - theta * row["at_label"]

    @jax.jit
    def both(theta):
        expected = jax.grad(loss)(theta), hessian_weight(1.0) * jax.hessian(loss)(theta)
        return of.statistic(theta, row), jnp.stack(expected)

    np.testing.assert_allclose(*both(jnp.array(7.0)), atol=1e-6)


def test_predictions_that_are_all_alike_are_shifted_and_keep_their_scale():
    data = of_numbers(0.7, 0.1, spread=0.0)
    a, c = AFFINE.found(data)
    mean = float(np.mean(data["z"]))
    assert a == pytest.approx(1, abs=0.1)
    assert a * mean + c == pytest.approx(float(np.mean(data["y"])), abs=1e-3)


def test_residuals_beyond_the_largest_count_as_the_largest():
    data = of_numbers(1.0, 0.0)
    data["y"][:200] = 1.0  # outlying labels
    robust = AFFINE.found(data, of=Affine(said, label, numbers, 0.1))
    at = np.array([0.1, 1.0])
    assert abs(robust @ at - 0.1) < 0.3 * abs(AFFINE.found(data) @ at - 0.1)
