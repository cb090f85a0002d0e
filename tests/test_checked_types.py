"""What is imported under the tests keeps its annotations, or fails."""

import pytest

from accounting import GaussianProfile, epsilon
from samplers import Poisson

NO_TYPE = "violates type hint"


def test_an_argument_or_a_field_of_another_type_is_refused():
    with pytest.raises(TypeError, match=NO_TYPE):
        epsilon(GaussianProfile(1.0), delta="1e-5")
    with pytest.raises(TypeError, match=NO_TYPE):
        GaussianProfile(noise_multiplier="1")


def test_a_result_of_another_type_is_refused(monkeypatch):
    sampler = Poisson(100, 10, 1)
    monkeypatch.setattr(Poisson, "steps_per_epoch", "ten")
    with pytest.raises(TypeError, match=NO_TYPE):
        _ = sampler.num_steps


def test_an_int_is_a_float():
    assert epsilon(GaussianProfile(2), 1e-5) == epsilon(GaussianProfile(2.0), 1e-5)
