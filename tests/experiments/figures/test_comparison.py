"""The comparison of samplers: what is drawn and printed is what was computed."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.cli import main
from experiments.figures import comparison, records

NOISE = (0.5, 1.0)


@pytest.fixture(scope="module")
def found():
    """Curves that were computed in this process; the command's test spawns others."""
    samplers = comparison.all_samplers(num_examples=1000, batch_size=100, epochs=1)
    profiles = {"balls-and-bins": samplers["balls-and-bins"].privacy}
    profiles[comparison.MONTE_CARLO] = comparison.monte_carlo(bins=10, num_samples=20_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "each", map)
        return comparison.curves(profiles, NOISE, 1e-3)


def test_monte_carlo_stands_beside_the_certified_interval_and_above_its_lower_end(found):
    certified, estimated = found
    for sure, likely in zip(certified.bounds, estimated.bounds, strict=True):
        assert sure.confidence == 1.0
        assert likely.confidence == 0.999
        # The seed is fixed: this holds or it does not.
        assert sure.lower <= likely.upper <= 1.5 * sure.upper + 0.1


def test_only_monte_carlo_is_drawn_as_crosses_and_names_its_confidence(found):
    axes = Figure().subplots()
    comparison.draw(axes, found, "title")
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert [line.get_label() for line in crosses] == ["balls-and-bins, Monte Carlo (99.9 %)"]
    np.testing.assert_array_equal(
        crosses[0].get_ydata(), [bound.upper for bound in found[1].bounds]
    )


def test_the_figure_names_adjacency_and_the_unit_of_every_sampler_in_it(found):
    axes = Figure().subplots()
    comparison.draw(axes, found, "title")
    (unit,) = {s.unit for s in comparison.all_samplers(100, 10, 1).values()}
    assert axes.get_ylabel() == f"ε (zero-out adjacency, unit: one {unit})"


def test_the_command_names_delta_adjacency_and_unit(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(records, "each", map)
    words = ["--num-examples", "1000", "--batch-size", "100", "--noise-multiplier", "1"]
    assert main(["compare", *words, "--plot", str(tmp_path / "a.png")]) == 0
    heading = capsys.readouterr().out.splitlines()[0]
    assert heading.endswith("at delta 1e-05 (zero-out adjacency, unit: one example)")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_the_table_has_a_row_for_each_noise_multiplier_and_fits_a_page(found):
    header, rows = comparison.table(found)
    assert header == ["sigma", "balls-and-bins", comparison.MONTE_CARLO]
    assert [row[0] for row in rows] == ["0.5", "1"]
