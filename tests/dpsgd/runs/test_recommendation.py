"""Step sizes of lazy tables go by the noise that they will get."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import PoissonProfile, calibrate
from dpsgd.runs.optimizer import StepSizes
from dpsgd.runs.recommendation import (
    MOST_NOISE,
    Settings,
    about_sigma,
    table_step_size,
)
from dpsgd.runs.recommendation import (
    RecommendationRequest as Request,
)

LIMITS = {"most": 40.0, "without_noise": 5.0}
REQUEST = Request(88_000, 1 / 88_000, noise_multiplier=0.8, tables="lazy")


@given(
    n=st.integers(1, 40_000_000),
    batch_size=st.integers(1, 100_000),
    epochs=st.integers(1, 500),
    delta=st.floats(0, 1, exclude_min=True),
    epsilon=st.floats(1e-6, 1e300),
    more=st.floats(1, 1e6),
    clip=st.floats(1e-6, 1e6),
)
def test_table_rates_are_positive_and_rise_with_epsilon(
    n, batch_size, epochs, delta, epsilon, more, clip
):
    settings = Settings(min(n, batch_size), epochs, clip)
    found = [
        table_step_size(Request(n, delta, target_epsilon=e), settings, **LIMITS)
        for e in (epsilon, min(1e300, epsilon * more))
    ]
    assert found[0] <= found[1]
    assert all(0 < rate <= LIMITS["most"] for rate in found)


def test_a_table_rate_falls_with_the_total_noise_alone():
    rate = table_step_size(REQUEST, Settings(1000, 10))
    assert rate == pytest.approx(2.1 / (880 * 0.8 * 4 / 1000) ** (2 / 3), rel=0.05)  # two digits
    for other in (
        Settings(1000, 20, 2.0),
        Settings(1000, 5, 8.0),
        Settings(2000, 40),
        Settings(1000, 10, 4.0, 0.5),
    ):
        assert table_step_size(REQUEST, other) == rate
    eighth = table_step_size(replace(REQUEST, noise_multiplier=0.1), Settings(1000, 10))
    assert eighth == pytest.approx(4 * rate, rel=0.05)


def test_noise_moves_a_coordinate_no_further_than_its_bound():
    for sigma, settings in itertools.product((5.0, 300.0), (Settings(30, 10), Settings(300, 90))):
        request = Request(300, 1 / 300, noise_multiplier=sigma)
        peak = table_step_size(request, settings)
        steps = math.ceil(300 / settings.batch_size) * settings.epochs
        sizes = [StepSizes(peak, steps)(k) for k in range(steps)]
        moved = sigma * 4.0 / settings.batch_size * math.sqrt(sum(a * a for a in sizes))
        assert moved <= 1.1 * MOST_NOISE
        assert sigma == 5.0 or moved >= 0.9 * MOST_NOISE


@pytest.mark.short("86-*", "22-*", "100-*", "3-*")
@pytest.mark.parametrize(
    ("bins", "epochs", "epsilon"),
    [(86, 10, 0.5), (22, 30, 8.0), (100, 1, 3.0), (1000, 1, 3.0), (3, 60, 16.0)],
)
def test_noise_for_a_guarantee_is_estimated_within_a_third(bins, epochs, epsilon):
    n, steps = 1000 * bins, bins * epochs
    found = calibrate(
        lambda sigma: PoissonProfile(sigma, 1 / bins, steps), epsilon=epsilon, delta=1 / n
    )
    assert about_sigma(Request(n, 1 / n, target_epsilon=epsilon), 1000, steps) == pytest.approx(
        found, rel=1 / 3
    )
