"""`dpsgd audit`: evidence against a claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.cli import outputs, tasks
from experiments.cli.config import AuditConfig
from experiments.cli.console import Console
from experiments.cli.sampler_commands import SamplerCommand, with_own_sampler


@dataclass(frozen=True)
class Audit(AuditConfig):
    """Look for evidence that a run costs more privacy than its sampler's guarantee says.

    Without --black-box: seconds, the program that trains on neighbouring batches under equal noise,
    the noise's law and the sampler's. With it: minutes, a lower bound on epsilon from many whole
    runs.
    The exit status is 1 if a violation is found.

    --task NAME says whose step: of clicks, by default, of another built-in task, or of one of your
    own as module:object. Its rows are generated, so that nothing that is printed depends on private
    ones; a store is read for its columns alone.
    """

    sampler: SamplerCommand


def command(words: Sequence[str]) -> tuple[type[Audit], list[str]]:
    """Returns what can be asked of the task that words name, and the other words."""
    return tasks.command(with_own_sampler(Audit, words), words, place=False)


def run(config: Audit) -> int:
    """Runs `dpsgd audit`; the status is 1 if a violation was found."""
    config.check()
    config.spec()  # refuses what no run can have
    if config.black_box:
        outputs.check(config.plot, outputs.PICTURES, "--plot", overwrite=config.overwrite)
    with Console() as console:
        console.progress("starting")
        from experiments.cli import audit

        if not config.black_box:
            report = audit.coupled(tasks.without_data(config), config, console.progress)
            for line in report.lines():
                console.line(line)
            return 0 if report.passed else 1
        bound = audit.black_box(config, console.progress)
        audit.plot(bound, config.plot)
        for line in (*bound.lines(), f"plot: {config.plot}"):
            console.line(line)
        return 1 if bound.violation else 0
