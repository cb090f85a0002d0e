"""The comparison of samplers: what is drawn and printed is what was computed."""

import numpy as np
from matplotlib.figure import Figure

from experiments import compare

NOISE = (0.5, 1.0)


def found():
    samplers = compare.all_samplers(num_examples=1000, batch_size=100, epochs=1)
    prices = {"balls-and-bins": samplers["balls-and-bins"].privacy}
    prices[compare.MONTE_CARLO] = compare.monte_carlo_price(bins=10, num_samples=20_000)
    return compare.curves(prices, NOISE, 1e-3)


def test_monte_carlo_stands_beside_the_certified_interval_and_above_its_lower_end():
    certified, estimated = found()
    for sure, likely in zip(certified.epsilons, estimated.epsilons, strict=True):
        assert sure.confidence == 1.0
        assert likely.confidence == 0.999
        # The seed is fixed: this holds or it does not.
        assert sure.lower <= likely.upper <= 1.5 * sure.upper + 0.1


def test_only_monte_carlo_is_drawn_as_crosses_and_names_its_confidence():
    axes = Figure().subplots()
    curves = found()
    compare.draw(axes, curves, "title")
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert [line.get_label() for line in crosses] == ["balls-and-bins, Monte Carlo (99.9 %)"]
    np.testing.assert_array_equal(
        crosses[0].get_ydata(), [bound.upper for bound in curves[1].epsilons]
    )


def test_the_table_has_a_row_for_each_noise_multiplier_and_fits_a_page():
    header, rows = compare.table(found())
    assert header == ["sigma", "balls-and-bins", compare.MONTE_CARLO]
    assert [row[0] for row in rows] == ["0.5", "1"]
