"""Every figure is drawn by one command, which refuses what it cannot do before it computes."""

import importlib
import typing

import pytest

from experiments.figures import FIGURES, amplification, contributions, episodes, rating_model
from experiments.figures.__main__ import main
from experiments.figures.drawing import Picture


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_says_what_it_can_be_asked_for(name):
    draw = importlib.import_module(f"experiments.figures.{name}").draw
    assert issubclass(typing.get_type_hints(draw)["config"], Picture)


def test_what_there_is_to_draw_is_listed(capsys):
    assert main(["--help"]) == main([]) == 0
    listed = capsys.readouterr().out
    assert all(listed.count(f"  {name} ") == 2 for name in FIGURES)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["samplers", "a.png"], "there is no figure 'samplers'; there are epsilon, "),
        (["epsilon", "a.jpeg"], "OUT must end in .png, .pdf or .svg, got a.jpeg"),
        (["episodes", "a.png", "--ratings", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(words, problem, capsys):
    assert main(words) == 2
    line = capsys.readouterr().err
    assert line.startswith("scripts/figures: ")
    assert problem in line
    assert line.count("\n") == 1


def test_an_interrupted_figure_ends_in_one_line_and_leaves_no_file(tmp_path, monkeypatch, capsys):
    def interrupted(config, console):
        raise KeyboardInterrupt

    interrupted.__annotations__ = {"config": Picture}
    monkeypatch.setattr(amplification, "draw", interrupted)
    assert main(["amplification", str(tmp_path / "a.png")]) == 130
    assert capsys.readouterr().err == "scripts/figures: interrupted\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_the_figure_of_contributions_says_that_it_is_not_private(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(contributions, "DRAWS", 20)
    assert main(["contributions", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "NOT PRIVATE" in printed
    assert "epsilon of one such sum, delta 0 (zero-out adjacency, unit: one user)" in printed


@pytest.mark.long
@pytest.mark.parametrize("name", ["amplification", "rating_model", "episodes"])
def test_a_figure_that_trains_or_calibrates_is_drawn(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rating_model, "CAPS", (5, 20))
    monkeypatch.setattr(rating_model, "EPSILONS", {3.0: "black"})
    monkeypatch.setattr(rating_model, "SEEDS", 2)
    monkeypatch.setattr(episodes, "SEEDS", 2)
    monkeypatch.setattr(episodes, "STEPS", 20)
    assert main([name, str(tmp_path / "a.svg")]) == 0
    assert (tmp_path / "a.svg").stat().st_size > 10_000
    assert "zero-out" in capsys.readouterr().out
