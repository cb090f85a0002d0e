"""`dpsgd contributions`: how much users contribute, and where to cap it."""

from __future__ import annotations

from experiments import contributions
from experiments.cli.console import Console, going_on
from experiments.cli.questions.contributions import Contributions


def run(asked: Contributions) -> None:
    """Runs `dpsgd contributions`."""
    with going_on("reading the table"):
        usage = contributions.read(asked.table, asked.user, asked.loss)
    with Console() as console:
        console.line(contributions.STAMP)
        for line in contributions.lines(usage, asked.target_epsilon):
            console.line(line)
        console.line("how far a cap may move the mean loss of a model, at most:")
        console.table(*contributions.table(usage, asked.caps))
