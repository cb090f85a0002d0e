"""Every figure is drawn by one command, which refuses what it cannot do before it computes."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from experiments.figures import (
    FIGURES,
    amplification,
    contributions,
    episodes,
    figure_of,
    gallery,
    rating_model,
)
from experiments.figures.__main__ import main
from experiments.figures.drawing import Picture, blank, panels


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_says_what_it_can_be_asked_for_and_has_a_small_version(name, tmp_path):
    kind, _ = figure_of(name)
    assert isinstance(kind(tmp_path / "a.png", **kind.SMALL), Picture)


def test_what_there_is_to_draw_is_listed(capsys):
    assert main(["--help"]) == main([]) == 0
    listed = capsys.readouterr().out
    assert all(listed.count(f"  {name} ") == 2 for name in (*FIGURES, "all"))


@dataclass(frozen=True)
class Squares(Picture):
    most: int = 9
    ratings: Path | None = None
    SMALL: ClassVar = {"most": 3}


def draw_squares(config, console):
    if config.out.name == "episodes.svg" and config.ratings and config.ratings.name == "torn":
        raise KeyboardInterrupt
    figure = blank(2, 2)
    panels(figure)[0].plot([n * n for n in range(config.most)])
    console.line(f"up to {config.most}, of {config.ratings}")
    console.table(["n", "square"], [[str(config.most), str(config.most**2)]])
    return figure


@pytest.fixture
def squares(monkeypatch):
    monkeypatch.setattr(gallery, "figure_of", lambda name: (Squares, draw_squares))


def test_the_page_of_all_figures_has_each_with_its_table_and_its_command(squares, tmp_path, capsys):
    assert main(["all", "--small", str(tmp_path / "out"), "--ratings", "u.data"]) == 0
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("<svg") + page.count("data:image/svg+xml") == len(FIGURES)
    assert page.count("up to 3, of u.data") == page.count(">square</th>") == len(FIGURES)
    assert "dpsgd sweep criteo-display-small" in page
    for name, what in FIGURES.items():
        assert what in page.replace("&#x27;", "'")
        assert f"<code>scripts/figures {name} --small --ratings u.data</code>" in page
        assert (tmp_path / "out" / f"{name}.svg").exists()


def test_figures_of_the_same_command_can_be_kept(squares, tmp_path, capsys):
    picture = tmp_path / "delta.svg"

    def drawn(**how):
        picture.write_text("kept")
        gallery.draw_all(gallery.Gallery(tmp_path, **how), ["delta"])
        return picture.read_text() != "kept"

    assert drawn()
    assert not drawn(keep=True)
    assert drawn(keep=True, small=True)
    assert drawn(small=True)


def test_the_page_of_figures_that_were_interrupted_has_those_before(squares, tmp_path, capsys):
    torn = gallery.Gallery(tmp_path, ratings=Path("torn"))
    with pytest.raises(KeyboardInterrupt):
        gallery.draw_all(torn, ["delta", "episodes"])
    assert (tmp_path / "index.html").read_text().count("data:image/svg+xml") == 1
    assert not (tmp_path / "episodes.svg.json").exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["samplers", "a.png"], "unknown figure 'samplers'; choose among epsilon, "),
        (["epsilon", "a.jpeg"], "OUT must end in .png, .pdf or .svg, got a.jpeg"),
        (["rating_model", "a.png", "--ratings", "nowhere"], "nowhere"),
        (["all", __file__], "File exists"),
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
    assert main(["contributions", "--small", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "NOT PRIVATE" in printed
    assert "epsilon of one such sum, delta 0 (zero-out adjacency, unit: one user)" in printed


@pytest.mark.long
@pytest.mark.parametrize("name", ["amplification", "rating_model", "episodes"])
def test_a_figure_that_trains_or_calibrates_is_drawn(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rating_model, "CAPS", (5, 20))
    monkeypatch.setattr(rating_model, "LINEAR", (3.0,))
    monkeypatch.setattr(rating_model, "FACTORIZED", (3.0,))
    monkeypatch.setattr(episodes, "STEPS", 20)
    assert main([name, "--small", str(tmp_path / "a.svg")]) == 0
    assert (tmp_path / "a.svg").stat().st_size > 10_000
    assert "zero-out" in capsys.readouterr().out
