"""`dpsgd train`: one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsgd.files import check_writable
from dpsgd.runs.spec import RunSpec, known_options
from dpsgd.runs.support import check
from experiments import cli
from experiments.cli import tasks
from experiments.cli.console import Console
from experiments.cli.devices import DevicesConfig, ProcessesConfig
from experiments.cli.errors import naming_options
from experiments.cli.sampler_commands import SamplerCommand, with_own_sampler


@dataclass(frozen=True, kw_only=True)
class Train(DevicesConfig, ProcessesConfig):
    """Train a task privately and write a run directory with the guarantee it earned.

    --task NAME says which: clicks, by default, another built-in one, or one of your own as
    module:object, whose module lies in the current folder or where Python finds modules. `dpsgd
    train --task NAME --help` lists the settings of that task among those below. A sampler of your
    own is named likewise, sampler:module:name.

    Of batch size, epochs, clipping norm and learning rate, what is left out is chosen before the
    run for the number of rows and the guarantee that is wanted, and recorded. The rule for clicks
    was found on the validation rows of a public data set: whoever chooses by rows of their own that
    are private pays for it, and the guarantee of a run does not cover that.
    """

    sampler: SamplerCommand
    out: Path
    """Run directory to create; an existing one is never touched."""
    begin: bool = False
    """Make the run directory, and take no step: `dpsgd batches` can draw the run's batches then,
    and `dpsgd resume` trains."""


def command(words: Sequence[str]) -> tuple[type[Train], list[str]]:
    """Returns what can be asked of the task that words name, and the other words."""
    return tasks.command(with_own_sampler(tasks.of_run(Train), words), words)


def run(asked: Train) -> None:
    """Runs `dpsgd train`."""
    with naming_options(type(asked), type(asked.sampler)):
        spec = RunSpec.of(**{name: getattr(asked, name) for name in known_options()})
        asked.check_devices()
        check(spec)
        task = tasks.task_of(asked)
        check_writable(asked.out)
        check(spec, getattr(task, "num_examples", None))
    with (
        asked.together(asked.out) as processes,
        Console(quiet=not processes.first) as console,
        naming_options(type(asked), type(asked.sampler)),
    ):
        console.progress("starting")
        import dpsgd

        how: dict[str, Any] = {
            "name": asked.task[0],  # type: ignore[attr-defined]
            "placement": asked.placement(),
            "started": cli.started,
            "progress": console.tell,
        }
        if asked.begin:
            dpsgd.Run.create(task, spec, asked.out, **how)
            console.line(f"begun: dpsgd resume {asked.out}")
        else:
            show(console, asked.out, dpsgd.run(task, spec, asked.out, **how))


def show(console: Console, path: Path, record: dict[str, Any]) -> None:
    """Says what the finished run in `path` came to."""
    from dpsgd.runs import report

    header, rows, caption = report.comparison([record])
    console.table(header, rows)
    console.line(caption)
    if diverged := report.divergence(record):
        console.line(f"note: {diverged}")
    console.line(record["guarantee"])
    console.line(f"audit: {record['audit']}")
    console.line(f"report: {path / 'report.md'}")
