"""What is shown in a terminal: no number is ever cut, and what takes long is seen to go on."""

import io
import sys
import time

import pytest

from experiments.cli import console
from experiments.cli.console import Console, going_on

HEADER = ["sampler", "sigma", "epsilon [lo, up]", "delta", "AUC", "log loss", "calib.", "seconds"]
ROWS = [
    ["balls-and-bins", "0.5", "[2.041, 2.043]", "1.14e-05", "0.7401", "0.4823", "1.002", "12.3"],
    ["poisson overflow-accumulate", "10", "none", "2.71e-08", "0.7", "0.5", "0.998", "1234.5"],
]


@pytest.mark.parametrize("columns", [*range(40, 90), 120])
def test_no_cell_of_a_table_is_cut_however_narrow_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    Console().table(HEADER, ROWS)
    said = capsys.readouterr().out
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= columns
    words = said.split()
    for row in ROWS:
        for cell in row:
            assert set(cell.split()) <= set(words)
    for name in HEADER:
        assert set(name.split()) <= set(words)


@pytest.mark.parametrize("columns", [40, 100])
def test_a_table_that_fits_has_a_line_for_each_row(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    Console().table(["sigma", "poisson"], [["0.5", "[1, 2]"], ["1", "[0.1, 0.2]"]])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["sigma", "poisson"],
        ["0.5", "[1,", "2]"],
        ["1", "[0.1,", "0.2]"],
    ]


def test_in_a_pipe_each_row_is_one_line(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    Console().table(HEADER, ROWS)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(ROWS)


class Terminal(io.StringIO):
    """A file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "seconds", "shown"),
    [(Terminal(), 0.6, True), (Terminal(), 0.0, False), (io.StringIO(), 0.6, False)],
    ids=["long", "short", "no terminal"],
)
def test_what_takes_long_is_seen_to_go_on_in_a_terminal(stderr, seconds, shown, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(console, "PATIENCE", 0.1)
    monkeypatch.setenv("TERM", "xterm")
    with going_on("pricing"):
        time.sleep(seconds)
    assert ("pricing (0 s)" in stderr.getvalue()) == shown
    assert ("pricing" in stderr.getvalue()) == shown


@pytest.mark.long
def test_piped_progress_is_plain_lines_at_growing_intervals(monkeypatch, capsys):
    monkeypatch.setattr(console, "EVERY", 0.2)
    with Console() as shown:
        shown.progress("7 of 9 epsilons")
        time.sleep(0.9)  # after .2 and .6 s
        shown.line("the answer")
    with going_on("pricing"):
        time.sleep(0.3)
    with Console(quiet=True) as shown:
        shown.progress("of another process")
        time.sleep(0.3)
    time.sleep(0.3)
    said = capsys.readouterr()
    assert said.out == "the answer\n"
    lines = ["7 of 9 epsilons (0 s in all)", "7 of 9 epsilons (1 s in all)", "pricing (0 s in all)"]
    assert said.err.splitlines() == lines


def interrupted_work():
    with going_on("pricing"):
        time.sleep(0.3)
        raise KeyboardInterrupt


def test_the_terminal_is_as_it_was_after_an_error(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(console, "PATIENCE", 0.0)
    with pytest.raises(KeyboardInterrupt):
        interrupted_work()
    assert sys.stderr.getvalue().endswith("\x1b[2K")  # the line is gone
