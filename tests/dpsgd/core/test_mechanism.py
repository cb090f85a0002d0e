"""A mechanism is what accounting prices, or it is refused."""

from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dpsgd import (
    BandedToeplitz,
    Independent,
    Mechanism,
    dpsgd,
    train,
)
from dpsgd.core.mechanism import SCALES
from dpsgd.core.queries import FullSums
from samplers import BallsAndBins, Deterministic


@pytest.mark.parametrize("sigma", [1.0, 0.1, 1 / 3, 5.5])
@pytest.mark.parametrize("clip", [1.0, 0.1, 3.7])
def test_rounding_to_float32_never_shortens_the_noise(sigma, clip):
    scales = Mechanism(BallsAndBins(100, 10), sigma, clip).scales()
    assert float(scales.noise_stddev) >= sigma * float(scales.l2_clip_norm)
    assert scales.expected_batch_size == 10


@pytest.mark.parametrize(
    ("sigma", "clip"),
    [(-1, 1), (np.nan, 1), (np.inf, 1), (1, 0), (1, -1), (1, np.nan), (1, np.inf)],
)
def test_impossible_noise_and_clipping_are_refused(sigma, clip):
    with pytest.raises(ValueError, match=r"noise|l2_clip_norm"):
        Mechanism(BallsAndBins(100, 10), sigma, clip).privacy()


def test_without_noise_there_is_no_price():
    with pytest.raises(ValueError, match="no privacy guarantee"):
        Mechanism(BallsAndBins(100, 10), 0.0, np.inf).privacy()


@pytest.mark.parametrize(
    ("sigma", "clip"),
    [
        (0.5, 2e-38),  # the noise is subnormal, which XLA takes for 0
        (0.1, 1e-37),
        (1e-30, 1e-4),
        (1e45, 1e-50),  # C is 0 in float32, whatever sigma C is
        (1e-320, 1e-10),  # sigma C is 0 in float64
        (1e4, 3e37),  # the noise overflows
        (1e-30, 1e39),  # C does
        (1.0, np.nextafter(SCALES[0], 0)),
        (1.0, np.nextafter(SCALES[1], np.inf)),
        (1e300, 1e300),
    ],
)
def test_scale_outside_the_float32_range_is_refused(sigma, clip):
    with pytest.raises(ValueError, match=r"l2_clip_norm .* noise_multiplier \* l2_clip_norm = "):
        Mechanism(Deterministic(1, 1, 1), sigma, clip)


@pytest.mark.parametrize("clip", SCALES)
def test_noise_is_finite_at_both_ends_of_the_allowed_scales(clip):
    mechanism = Mechanism(Deterministic(1, 1, 1), 1.0, clip)
    algorithm = dpsgd(lambda params, example: params @ example, optax.sgd(1.0))
    data, ends = jnp.ones((1, 1000)), []
    for _ in range(2):
        w = train(algorithm, mechanism, jnp.zeros(1000), data, delta=0.05, audit=False).params
        ends.append(np.asarray(w, np.float64) / clip)
    assert (ends[0] - ends[1]).std() == pytest.approx(np.sqrt(2), rel=0.15)


@dataclass(frozen=True)
class Hidden(Deterministic):
    """Costs by a field that equality does not see."""

    repeats: int = field(default=1, compare=False)

    def privacy(self, noise_multiplier):
        return super().privacy(noise_multiplier / self.repeats**0.5)


class Undecorated(Deterministic):
    """Costs by an attribute that is no field."""

    def __init__(self, num_examples, batch_size, repeats=1):
        super().__init__(num_examples, batch_size)
        object.__setattr__(self, "repeats", repeats)


@pytest.mark.parametrize("kind", [Hidden, Undecorated])
def test_what_is_equal_and_costs_otherwise_is_refused(kind):
    assert kind(100, 10) == kind(100, 10, repeats=9)  # one would be told the other's price
    with pytest.raises(ValueError, match=f"{kind.__name__} is compared without its repeats, so"):
        Mechanism(kind(100, 10), 1.0, 1.0)


@pytest.mark.parametrize("noise", [Independent(), BandedToeplitz((1.0, 0.5))])
def test_sums_over_all_rows_have_independent_noise(noise):
    full_sums = FullSums(2, 3.0, 4.0)
    assert (
        Mechanism(Deterministic(64, 8), 1.0, 1.0, noise, full_sums).sums_mechanism().noise
        == Independent()
    )
