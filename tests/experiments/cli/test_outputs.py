"""Files that a command writes: what is there stays, and a name that cannot be is refused first."""

import pytest
from matplotlib.figure import Figure

from experiments import cli
from experiments.cli import outputs
from experiments.cli.questions.models import OTHER_FORMATS
from experiments.figures import drawing
from experiments.results.render import Page

COMPARE = ["compare", "--num-examples", "1000", "--batch-size", "100", "--noise-multiplier", "1"]
AUDIT = ["audit", "sampler:poisson", "--num-examples", "100", "--batch-size", "10"]
AUDIT += ["--noise-multiplier", "1", "--black-box"]

COMMANDS = {
    "compare": (COMPARE, "--plot", ".png"),
    "audit": (AUDIT, "--plot", ".png"),
    "report": (["report", "run"], "--out", ".html"),
}


@pytest.fixture
def nothing_is_done(monkeypatch):
    """Fails where a command begins with its work."""

    def work(*args, **kwargs):
        pytest.fail("it began to work")

    monkeypatch.setattr(cli, "going_on", work)


@pytest.mark.parametrize(("words", "option", "ending"), COMMANDS.values(), ids=COMMANDS)
def test_a_file_that_is_there_is_named_and_left_as_it_is(
    words, option, ending, tmp_path, command, nothing_is_done
):
    there = tmp_path / f"page{ending}"
    there.write_text("precious")
    said = f"{there} exists already: name another {option}, or give "
    assert command.refuses(*words, option, there) == f"dpsgd: {said}--overwrite"
    assert there.read_text() == "precious"


@pytest.mark.parametrize(("words", "option", "ending"), COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("name", ["page", "page.doc", "page.html.gz"])
def test_another_ending_is_refused_before_any_work(
    words, option, ending, name, tmp_path, command, nothing_is_done
):
    said = command.refuses(*words, option, tmp_path / name)
    assert f"{option} must end in {ending}" in said
    assert name in said
    assert not list(tmp_path.iterdir())


def test_a_page_that_would_lie_inside_of_a_file_is_refused(tmp_path, command, nothing_is_done):
    (tmp_path / "file").write_text("")
    said = command.refuses(*COMPARE, "--plot", tmp_path / "file" / "a.png")
    assert "Not a directory" in said


def test_a_picture_is_replaced_on_request_and_never_partly(tmp_path, monkeypatch):
    there, folder = tmp_path / "page.svg", tmp_path / "folder.svg"
    there.write_text("old")
    folder.mkdir()
    outputs.check(there, outputs.PICTURES, "--out", overwrite=True)
    with pytest.raises(FileExistsError, match=r"name another --out$"):
        outputs.check(folder, outputs.PICTURES, "--out", overwrite=True)

    class Torn(Figure):
        def savefig(self, file, **options):
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drawing.save(Torn(), there)
    assert there.read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"page.svg", "folder.svg"}


def test_a_page_is_replaced_with_its_figures_or_not_at_all(tmp_path, command, monkeypatch):
    found = Page("t", "# t\n", {"a.svg": b"<svg/>"})
    monkeypatch.setattr("experiments.results.page.page", lambda *settings, **more: found)
    words = "report", "run", "--out", tmp_path / "page.html", "--markdown", tmp_path / "page"
    command(*words)
    (tmp_path / "page.html").unlink()
    assert "or give --overwrite" in command.refuses(*words)
    command(*words, "--overwrite")
    (tmp_path / "page" / "notes.txt").write_text("mine")
    said = command.refuses(*words, "--overwrite")
    assert said.endswith("holds notes.txt: name another --markdown")
    assert (tmp_path / "page" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("ending", OTHER_FORMATS)
def test_predictions_with_another_formats_suffix_are_refused(ending, tmp_path, command):
    said = command.refuses("score", "run", "data", "--out", tmp_path / f"x{ending}")
    assert said.endswith(
        f"x{ending}: predictions are written as CSV; end the name in .csv or .csv.gz"
    )
