"""Both ends of a root search are seen, wherever it starts."""

import math

import pytest

from accounting import TrialCount
from accounting.roots import falling_root

FUNCTIONS = {
    "line": lambda x: 3.0 - x,
    "steep": lambda x: 1e6 * (3.0 - x),
    "curve": lambda x: math.log(3.0) - math.log(max(x, 1e-300)),
    "plateaus": lambda x: 1.0 if x <= 2.9 else max(-1.0, 30.0 - 10.0 * x),
    "cliff": lambda x: math.inf if x < 3.0 else -5.0,
    "jump": lambda x: 700.0 if x < 3.0 else -700.0,
}


@pytest.mark.parametrize("start", [0.0, 1.0, 3.0, 3.0 + 1e-10, 50.0])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bracket_has_two_proved_ends_as_near_as_asked(name, start):
    asked = []

    def excess(x):
        asked.append(x)
        return FUNCTIONS[name](x)

    low, high = falling_root(excess, start, lambda x: 1e-9, low=0.0)
    assert {low, high} <= {0.0, *asked}
    assert FUNCTIONS[name](low) > 0.0 >= FUNCTIONS[name](high)
    assert high - low <= 1e-9
    assert len(asked) <= 90


@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
@pytest.mark.parametrize("start", [1.0, math.inf])
def test_function_that_never_falls_has_no_upper_end(value, start):
    assert falling_root(lambda x: value, start, lambda x: 1e-9, low=0.0)[1] == math.inf


def test_value_that_is_not_a_number_proves_no_end():
    low, high = falling_root(lambda x: math.nan if x < 5.0 else -1.0, 1.0, lambda x: 1e-9, low=0.0)
    assert low < 5.0 <= high <= low + 1e-9


@pytest.mark.parametrize("mean", [1.5, 2.0, 10.0, 10.125, 44.354, 64.0])
@pytest.mark.parametrize("shape", [-0.5, 0.0, 1.0, 2.0])
def test_gamma_has_the_mean_that_was_asked_for(mean, shape):
    gamma = TrialCount(mean, shape).gamma
    power = -math.log(gamma) if shape == 0.0 else (1.0 - gamma**shape) / shape
    assert (1.0 - gamma) / (gamma * power) == pytest.approx(mean, rel=1e-9)
