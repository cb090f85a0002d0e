"""Claims about bounds: they print outward, and inversions prove both of their ends."""

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import Bound, GaussianProfile, calibrate, default_delta, epsilon, largest_count
from accounting.profile import ContradictoryBounds, Question


@given(
    value=st.floats(0.0, 1e12, allow_nan=False),
    spec=st.sampled_from([".0f", ".3f", ".2e", ".1e", ".3g"]),
)
def test_what_is_printed_brackets_what_is_held(value, spec):
    bound = Bound(value, value)
    assert Decimal(bound.format_lower(spec)) <= Decimal(value) <= Decimal(bound.format_upper(spec))


@pytest.mark.parametrize(
    ("value", "printed"),
    [(0.9997, "[0.999, 1.00]"), (4.0133, "[4.01, 4.02]"), (0, "[0.00, 0.00]"), (1, "[1.00, 1.00]")],
)
def test_ends_are_printed_to_three_digits_and_no_wider(value, printed):
    assert str(Bound(value, value)) == f"{Bound(value, value)}" == printed


def test_an_infinite_end_prints_as_such():
    assert f"{Bound(0.5, math.inf):.2f}" == "[0.50, inf]"


@pytest.mark.parametrize("ends", [(1.0, 0.5), (math.nan, 1.0), (0.0, math.nan)])
def test_ends_in_the_wrong_order_are_refused(ends):
    with pytest.raises(ContradictoryBounds, match="error of the program"):
        Bound(*ends)


def test_both_ends_of_an_inversion_are_proved_by_the_curves():
    low, high = (lambda e, f=f: f * math.exp(-e) for f in (0.99, 1.01))
    found = Question("epsilon", 1e-3).between(low, high)
    assert math.exp(-found.upper) * 1.01 <= 1e-3 < math.exp(-found.lower) * 0.99
    assert found.lower == pytest.approx(math.log(0.99e3), abs=1e-9)
    assert found.upper == pytest.approx(math.log(1.01e3), abs=1e-9)


def test_contradictory_curves_are_an_error():
    low, high = (lambda e, f=f: f * math.exp(-e) for f in (1.01, 0.99))
    with pytest.raises(ContradictoryBounds):
        Question("epsilon", 1e-3).between(low, high)


def test_flat_curve_gives_infinity_and_low_curve_gives_0():
    assert Question("epsilon", 0.1).between(lambda e: 0.0, lambda e: 0.5) == Bound(0.0, math.inf)
    assert Question("epsilon", 0.1).between(lambda e: 0.0, lambda e: 0.01) == Bound(0.0, 0.0)


@pytest.mark.parametrize("delta", [0.0, 0.1, 0.9, 2.0, math.nan])
def test_no_guarantee_is_given_at_a_delta_that_is_none(delta):
    for ask in (
        lambda: epsilon(GaussianProfile(1.0), delta),
        lambda: largest_count(lambda n: GaussianProfile(n), epsilon=1.0, delta=delta),
        lambda: calibrate(GaussianProfile, epsilon=1.0, delta=delta),
    ):
        with pytest.raises(ValueError, match=r"^delta must lie in \(0, 0\.1\), got"):
            ask()
    assert epsilon(GaussianProfile(1.0), 0.0999).upper > 0


@pytest.mark.parametrize("num_units", [1, 9, 1000, 35_111, 35_112, 88_000, 10**6, 37 * 10**6])
def test_the_default_delta_is_below_what_publishing_one_unit_has(num_units):
    delta = default_delta(num_units)
    wanted = min(1e-5, num_units**-1.1)
    assert delta <= wanted
    assert delta < 1 / num_units
    digit, exponent = f"{delta:.0e}".split("e")
    assert delta == float(f"{digit}e{exponent}")  # one digit
    assert float(f"{int(digit) + 1}e{exponent}") > wanted * (1 - 1e-12)
