"""What is imported under the tests keeps its annotations, or fails."""

import optax
import pytest

from accounting import GaussianProfile, calibrate, epsilon
from dpsgd import Mechanism, Run, dpsgd, train
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


def loss(params, example):
    return params * example


SAMPLER = Poisson(100, 10, 1)
ALGORITHM = dpsgd(loss, optax.sgd(0.1))
MECHANISM = Mechanism(SAMPLER, 1.0, 1.0)


@pytest.mark.parametrize(
    ("call", "arguments", "named"),
    [
        (epsilon, (SAMPLER.privacy, 1e-5), "epsilon takes a profile, as sampler.privacy"),
        (calibrate, (SAMPLER,), "calibrate takes a function such as sampler.privacy, got a Poiss"),
        (dpsgd, (loss, 0.1), "optimizer must be one of optax, such as .*, got 0.1"),
        (train, (MECHANISM, ALGORITHM), "got a Mechanism in place of the Algorithm"),
        (train, (ALGORITHM, SAMPLER), "got a Poisson in place of the Mechanism"),
        (Run.create.__func__, (Run, None, SAMPLER, "out"), "spec must be a RunSpec, got a Poisson"),
    ],
)
def test_mistakes_of_newcomers_are_named_by_the_library_itself(call, arguments, named):
    terms = {calibrate: {"epsilon": 1.0, "delta": 1e-5}}.get(call, {})
    terms |= {"params": 0.0, "data": None} if call is train else {}
    with pytest.raises(TypeError, match=named):
        call.__wrapped__(*arguments, **terms)
