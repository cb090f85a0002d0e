"""Every calibration: its sensitivity, the rows that count, its exact fit, and the noise chosen.

A new one gets all of this by one entry of `KINDS`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special

from accounting import GaussianProfile, calibrate
from dpsgd import Mechanism, Platt, Refinement, calibration_sums
from dpsgd.core.queries import FullSums
from dpsgd.engine.calibration import RULES, Affine, Temperature
from dpsgd.engine.queries import refine
from samplers import Poisson

N = 600


def said(params, example):
    return example["z"]


def label(example):
    return example["y"]


def vector(params, *found):
    return jnp.concatenate([jnp.ravel(one) for one in found])


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
class Kind:
    """A calibration, rows that it mends, and its loss.

    Attributes:
      of: The calibration.
      rows: (a, ..., n=) -> n rows that the numbers a, ... would calibrate.
      how: The numbers a, ... of usual rows.
      loss: (numbers, rows) -> the loss of the rows, calibrated by these numbers.
      tolerance: Largest error of the numbers that are found without noise.
      most_loss: Loss that noise may cost at epsilon 1 and 8, mean of four seeds.
      largest_shift: Largest second number.
      scales: Least and largest first number.
    """

    of: Refinement
    rows: Callable
    how: tuple
    loss: Callable
    tolerance: float
    most_loss: float
    largest_shift: float
    scales: tuple[float, float] = (1 / 8, 4.0)

    def wild(self, rng):
        """Rows of any numbers."""
        usual = self.rows(*self.how, n=N)
        shape = usual["z"].shape
        z = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, shape) + rng.choice(
            [-9, 0, 9], shape
        )
        return {"z": z.astype(np.float32), "y": rng.permutation(usual["y"])}

    @property
    def rule(self):
        return RULES[self.of.kind]

    @property
    def size(self):
        """Length of the vector of a row."""
        row = jax.tree.map(lambda x: x[0], self.rows(*self.how, n=1))
        return self.of.statistic(self.of.start(), self.of.reads((), row)).size

    @functools.cached_property
    def ends(self):
        """Means of steps -> the state that they end in, and the numbers that it applies."""

        def end(means):
            state = self.of.start()
            for mean in means:
                state = self.of.fold(state, mean)
            return state, self.of.apply((), state)

        return jax.jit(jax.vmap(end))

    def folded(self, rng, scale):
        """States after noisy means, and the numbers that they apply."""
        drawn = scale * rng.normal(size=(100, self.rule.steps, self.size))
        return map(np.asarray, self.ends(drawn.astype(np.float32)))

    def exact(self, data):
        """The numbers of least loss, by an optimizer from elsewhere."""
        begin = np.array([1.0, 0.0][: self.of.start().size])
        return optimize.minimize(self.loss, begin, (data,), method="Nelder-Mead", tol=1e-9).x

    def fitted(self, data, sums=None, seed=0, of=None):
        sums = sums or FullSums(self.rule.steps, 1e-6, self.rule.l2_clip_norm)
        mechanism = Mechanism(Poisson(len(data["y"]), 10), 1.0, 1.0, full_sums=sums)
        found = refine(of or self.of, mechanism, (), data, insecure_seed=seed)
        return np.asarray(found.params)


PLATT = Kind(
    Platt(said, label, vector), of_two_classes, (0.75, 0.1), log_loss_of_two, 1e-3, 5e-4, 8.0
)
TEMPERATURE = Kind(Temperature(said, label, vector), of_classes, (0.75,), log_loss, 0.02, 5e-4, 0.0)
AFFINE = Kind(
    *(Affine(said, label, vector), of_numbers, (0.7, 0.1), squared_error, 1e-3, 2e-4),
    largest_shift=1.0,
    scales=(1 / 4, 4.0),
)
KINDS = {
    "platt": PLATT,
    "temperature, 2 classes": replace(TEMPERATURE, how=(0.75, 2)),
    "temperature, 9 classes": replace(TEMPERATURE, how=(0.75, 9)),
    "affine": AFFINE,
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
MISCALIBRATED = [
    *[(PLATT, (a, c, r)) for a in (0.3, 0.8, 1.5) for c in (-1.0, 0.15, 1.0) for r in (-1.1, 0.0)],
    *[(TEMPERATURE, (a, classes)) for a in (0.4, 0.8, 1.6) for classes in (2, 3, 10)],
    *[(AFFINE, (a, c)) for a in (0.5, 1.5) for c in (-0.3, 0.1)],
]
NAMES = ["-".join([kind.of.kind, *map(str, how)]) for kind, how in MISCALIBRATED]


@pytest.mark.short("platt", "temperature, 2 classes", "affine")
@each_kind
def test_row_vectors_stay_within_the_clipping_norm(kind):
    rng = np.random.default_rng(0)
    data = kind.wild(rng)
    states = [np.asarray(kind.of.start())[None]]
    for scale in (0.1, 10.0):
        ends, _ = kind.folded(rng, scale)
        states.append(ends[:40])

    @jax.jit
    @jax.vmap
    def norms(state):
        read = jax.vmap(kind.of.reads, (None, 0))((), data)
        found = jax.vmap(kind.of.statistic, (None, 0))(state, read)
        return jnp.linalg.norm(found.astype(jnp.float32), axis=1)

    found = np.asarray(norms(np.concatenate(states)))
    assert np.isfinite(found).all()
    assert 0.95 * kind.rule.l2_clip_norm < found.max() < kind.rule.l2_clip_norm * (1 - 2e-6)


@pytest.mark.short("platt", "affine")
@each_kind
def test_a_row_without_class_or_number_counts_for_nothing(kind):
    rng = np.random.default_rng(3)
    data = kind.rows(*kind.how)  # of the size and so the program of exact fits
    gone = {name: column.copy() for name, column in data.items()}
    absent = 270
    data["z"][:absent] = np.nan
    if data["y"].dtype == np.int32:
        data["y"][absent:470] = rng.choice([-1, data["z"].shape[1], 2**31 - 1, -(2**31)], 200)
        absent = 470
    gone["z"][:absent] = np.nan
    found = kind.fitted(data)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, kind.fitted(gone), atol=1e-4)
    left = {name: column[absent:] for name, column in data.items()}
    np.testing.assert_allclose(found, kind.exact(left), atol=0.05)


@pytest.mark.short("*-platt", "*-temperature, 2 classes", "*-affine")
@each_kind
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e4, 1e30, np.inf, np.nan])
def test_fitted_numbers_stay_finite_and_in_range_for_any_release(kind, scale):
    _, found = kind.folded(np.random.default_rng(4), scale)
    assert np.isfinite(found).all()
    assert kind.scales[0] - 1e-6 <= found[:, 0].min() <= found[:, 0].max() <= kind.scales[1] + 1e-6
    assert np.abs(found[:, 1:]).max(initial=0) <= kind.largest_shift


@pytest.mark.short(
    "platt-0.3--1.0--1.1", "platt-1.5-1.0-0.0", "temperature-0.4-3", "affine-0.5-0.1"
)
@pytest.mark.parametrize(("kind", "how"), MISCALIBRATED, ids=NAMES)
def test_steps_without_noise_end_at_the_exact_fit(kind, how):
    data = kind.rows(*how)
    found, exact = kind.fitted(data), kind.exact(data)
    np.testing.assert_allclose(found, exact, atol=kind.tolerance)
    assert kind.loss(found, data) - kind.loss(exact, data) < 4e-4


@pytest.mark.short("8.0-affine")
@pytest.mark.parametrize("kind", [PLATT, TEMPERATURE, AFFINE], ids=lambda kind: kind.of.kind)
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_chosen_noise_costs_little_loss(kind, epsilon):
    n = 26_000
    data = kind.rows(*kind.how, n=n)
    least = kind.loss(kind.exact(data), data)
    assert kind.loss([1.0, 0.0], data) - least > 0.001
    sums = calibration_sums(kind.of.kind, n, epsilon=epsilon, delta=1 / n)
    lost = [kind.loss(kind.fitted(data, sums, seed), data) - least for seed in range(8)]
    assert np.mean(lost) < kind.most_loss
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
        kind(said, label, vector, value)


def loss_of_two(theta, row):
    z = theta[0] * row["x"] + theta[1]
    return jnp.logaddexp(0.0, z) - row["y"] * z


def loss_of_classes(theta, row):
    return jax.nn.logsumexp(theta * row["x"]) - theta[0] * row["at_label"]


@pytest.mark.parametrize(
    ("kind", "example", "loss", "weight"),
    [
        (PLATT, {"z": 2.4, "y": 1}, loss_of_two, np.sqrt(8 / 5)),
        (TEMPERATURE, {"z": [1.0, -2.0, 0.5, -30.0], "y": 2}, loss_of_classes, np.sqrt(8)),
    ],
    ids=["platt", "temperature"],
)
def test_row_vector_has_the_derivatives_of_its_log_loss(kind, example, loss, weight):
    @jax.jit
    def derivatives(theta, example):
        row = kind.of.reads((), example)
        gradient, hessian = (of(loss)(theta, row) for of in (jax.grad, jax.hessian))
        return gradient, hessian, kind.of.statistic(theta, row)

    example = {name: np.asarray(x) for name, x in example.items()}
    theta = np.asarray(kind.of.start()) * np.float32(0.9) + np.float32(0.1)
    gradient, hessian, found = map(np.asarray, derivatives(theta, example))
    i, j = np.triu_indices(len(theta))
    packed = hessian[i, j] * np.where(i == j, 1, np.sqrt(2))
    expected = np.append(gradient, weight * packed)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("y", [-1, 4, 2**31 - 1])
def test_a_label_beyond_the_classes_makes_no_finite_vector(y):
    row = TEMPERATURE.of.reads((), {"z": jnp.array([1.0, -2.0, 0.5, -30.0]), "y": y})
    assert not np.isfinite(TEMPERATURE.of.statistic(TEMPERATURE.of.start(), row)).all()


def test_equal_predictions_are_shifted_and_keep_their_scale():
    data = of_numbers(0.7, 0.1, spread=0.0)
    a, c = AFFINE.fitted(data)
    mean = float(np.mean(data["z"]))
    assert a == pytest.approx(1, abs=0.1)
    assert a * mean + c == pytest.approx(float(np.mean(data["y"])), abs=1e-3)


def test_residuals_beyond_the_largest_count_as_the_largest():
    data = of_numbers(1.0, 0.0)
    data["y"][:200] = 1.0  # outlying labels
    robust = AFFINE.fitted(data, of=Affine(said, label, vector, 0.1))
    at = np.array([0.1, 1.0])
    assert abs(robust @ at - 0.1) < 0.3 * abs(AFFINE.fitted(data) @ at - 0.1)
