"""Delta over epsilon: every curve bounds what it names, and is drawn and printed."""

from pathlib import Path

import pytest

from experiments.cli.console import Console
from experiments.figures import comparison, delta, estimators
from experiments.figures.delta import Setting

SETTING = Setting("tiny", 1.0, 20, 1.0)


@pytest.fixture(scope="module")
def curves():
    config = delta.Config(Path(), num_samples=500)
    return {c.name: c for c in delta.curves(SETTING, [0.5, 1.0], config)}


def test_published_bounds_of_balls_and_bins_are_around_the_certified_curve(curves):
    for i in range(2):
        certified = curves["balls-and-bins"].bounds[i]
        for name in (comparison.MONTE_CARLO, "balls-and-bins, other bins"):
            assert curves[name].bounds[i].lower <= certified.upper
            assert certified.lower <= curves[name].bounds[i].upper
            assert curves[name].bounds[i].confidence < 1.0
        shuffled = curves["shuffle"].bounds[i]
        assert certified.lower <= shuffled.lower
        assert shuffled.upper == curves["deterministic"].bounds[i].upper


def test_poisson_is_bounded_by_two_accountants(curves):
    pytest.importorskip("dp_accounting")
    both = (curves[name].bounds for name in ("poisson", "poisson, dp_accounting"))
    for ours, other in zip(*both, strict=True):
        assert other.lower <= ours.upper
        assert ours.lower <= other.upper


@pytest.mark.long
@pytest.mark.parametrize("module", [delta, estimators])
def test_a_panel_for_each_setting_is_drawn_and_what_is_estimated_says_so(
    module, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(module, "SETTINGS", (SETTING,))
    config = module.Config(
        tmp_path / "a.svg", points=2, **({} if module is delta else {"seconds": 0.02})
    )
    with Console() as console:
        figure = module.draw(config, console)
    assert len(figure.axes) == 1
    assert (tmp_path / "a.svg").exists()
    printed = capsys.readouterr().out
    assert "zero-out adjacency" in printed
    assert "mean" in printed
    assert "~" in printed
