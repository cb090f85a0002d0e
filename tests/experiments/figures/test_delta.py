"""Delta over epsilon: every curve bounds what it names, and is drawn and printed."""

import pytest

from experiments.cli.console import Console
from experiments.figures import delta, estimators
from experiments.figures.delta import Setting

SETTING = Setting("tiny", 1.0, 20, 1.0)


@pytest.fixture(scope="module")
def curves():
    return {c.name: c for c in delta.samplers(500, SETTING, [0.5, 1.0])}


def test_published_bounds_of_balls_and_bins_are_around_the_certified_curve(curves):
    certified = curves[delta.CERTIFIED]
    for i in range(2):
        assert curves["balls-and-bins, equation 6"].bounds[i].lower <= certified.bounds[i].upper
        assert certified.bounds[i].lower <= curves["balls-and-bins, Monte Carlo"].bounds[i].upper
        assert certified.bounds[i].upper <= curves["shuffle, lower bound"].bounds[i].lower
        assert (
            curves["shuffle, lower bound"].bounds[i].lower
            <= curves["deterministic"].bounds[i].upper
        )


def test_poisson_is_bounded_by_two_accountants(curves):
    pytest.importorskip("dp_accounting")
    for ours, other in zip(
        curves["Poisson, certified"].bounds, curves["Poisson, dp_accounting"].bounds, strict=True
    ):
        assert other.lower <= ours.upper
        assert ours.lower <= other.upper


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
    assert len(figure.axes) == (1 if module is delta else 3)
    assert (tmp_path / "a.svg").exists()
    printed = capsys.readouterr().out
    assert "zero-out adjacency" in printed
    assert "mean" in printed
    assert "~" in printed
