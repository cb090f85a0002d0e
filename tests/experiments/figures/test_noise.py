"""The comparison of correlated noise: errors at one guarantee, printed and drawn as computed."""

import pytest

from dpsgd.noise import planning
from experiments.cli import main
from experiments.figures import noise, records

SIZES = ["--num-examples", "1000", "--batch-size", "50"]


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "each", map)
        # How sigma is found is claimed of plans; here of each sampler it is another one.
        patch.setattr(planning, "calibrate", lambda privacy, **at: privacy(1.0).delta(0.5).upper)
        of = noise.samplers(1000, 50, 1)
        how = {"epsilon": 5.0, "delta": 1e-2, "momentum": 0.5, "schedule": "constant"}
        return noise.curves(of, **how, bands=[4])


def test_errors_are_over_that_of_the_best_independent_noise(found):
    assert [curve.name for curve in found] == ["deterministic", "poisson", "balls-and-bins"]
    runs = [c for curve in found for c in (*curve.banded, *curve.buffered)]
    assert min(c.error for c in runs if c.bands == 1) == 1.0
    assert len({c.alone for c in runs}) == 1
    assert [[c.bands for c in curve.banded] for curve in found] == [[1, 4]] * 3
    deterministic = found[0]
    assert deterministic.banded[1].error < deterministic.banded[0].error
    assert deterministic.buffered[0].error < deterministic.banded[1].error
    assert not any(curve.buffered for curve in found[1:])


def test_the_table_has_a_row_for_each_number_of_bands_and_buffers(found):
    header, rows = noise.table(found)
    assert header[:4] == ["b", "deterministic", "sigma", "cyclic Poisson"]
    assert [row[0] for row in rows][:3] == ["1", "4", "BLT 1"]
    assert all(len(row) == len(header) for row in rows)
    assert rows[1][1] == f"{found[0].banded[1].error:.4f}"
    assert rows[2][3:] == ["", "", "", ""]


def test_the_figure_shows_every_run_and_what_it_is_compared_with(found):
    left, right = noise.draw(found, "title").axes
    for axes, of in ((left, lambda c: c.error), (right, lambda c: c.noise_multiplier)):
        drawn = [y for line in axes.lines if len(line.get_xdata()) > 0 for y in line.get_ydata()]
        for curve in found:
            for run in (*curve.banded, *curve.buffered):
                assert of(run) in drawn
    labels = [text.get_text() for text in left.get_legend().get_texts()]
    assert labels[0] == "deterministic order, bands"
    assert "buffer" in labels[1]
    assert labels[2:4] == ["cyclic Poisson, bands", "cyclic balls-and-bins, bands"]


def test_the_command_names_the_guarantee_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(records, "each", map)
    monkeypatch.setattr(noise, "samplers", lambda *sizes: {"deterministic": _deterministic(*sizes)})
    words = ["compare", *SIZES, "--target-epsilon", "5", "--momentum", "0.9"]
    assert main([*words, "--bands", "2", "--plot", str(tmp_path / "a.png")]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(
        "error of the iterates of SGD with momentum 0.9, over that of independent"
    )
    assert out[0].endswith("<= 5.0 at delta 1e-05 (zero-out adjacency, unit: one example)")
    assert (tmp_path / "a.png").stat().st_size > 1000


def _deterministic(*sizes):
    from samplers import Deterministic

    return Deterministic(*sizes)
