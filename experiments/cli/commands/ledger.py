"""`dpsgd ledger`: what a run has released so far, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from experiments.cli.console import counted, going_on


@dataclass(frozen=True)
class LedgerConfig:
    """Print what a run has released so far and what that costs, by its ledger alone."""

    run: tyro.conf.Positional[Path]
    """Run directory, of a run that is finished, going on or dead."""


def run(config: LedgerConfig) -> None:
    """Runs `dpsgd ledger`."""
    from dpsgd.runs.directory import RunDirectory

    folder = RunDirectory(config.run)
    if not folder.ledger_path.is_file():
        folder = RunDirectory.open(config.run, finished=False)
    history = folder.history()
    if history.selection is not None and not history.attempts:
        print("nothing is released yet; whatever will be costs what is said below")
    for attempt in history.attempts:
        mechanism, steps = attempt.terms.mechanism, attempt.steps
        print(
            f"attempt {attempt.index}: {counted(len(steps), 'step')} from {steps.start:,} "
            f"declared of {mechanism.num_steps:,}; noise multiplier "
            f"{mechanism.noise_multiplier:.6g}; {mechanism.sampler}"
        )
    if history.audit:
        print(f"audit: {history.audit}")
    if history.released:
        print(f"released: parameters with the SHA-256 {history.released}")
    with going_on("accounting"):
        guarantee = history.guarantee()
    for note in filter(None, guarantee.notes):
        print(f"note: {note}")
    print(guarantee.sentence())
