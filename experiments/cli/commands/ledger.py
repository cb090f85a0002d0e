"""`dpsgd ledger`: what a run has released so far, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from experiments.cli.console import counted, going_on

if TYPE_CHECKING:
    from dpsgd.runs.history import History


@dataclass(frozen=True)
class LedgerConfig:
    """Print what a run has released so far and what that costs, by its ledger alone."""

    run: tyro.conf.Positional[Path]
    """Run directory, of a run that is finished, going on or dead."""
    together_with: tuple[Path, ...] = ()
    """Earlier runs: print as well what all together cost a unit with rows in each of them."""


def run(config: LedgerConfig) -> None:
    """Runs `dpsgd ledger`."""
    history = _history(config.run)
    earlier = [_history(path) for path in config.together_with]
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
    if earlier:
        with going_on("accounting"):
            whole = history.guarantee(*earlier)
        for note in filter(None, whole.notes):
            print(f"note on all {len(earlier) + 1} runs: {note}")
        print(f"for a unit with rows in all {len(earlier) + 1} runs: {whole.sentence()}")


def _history(path: Path) -> History:
    from dpsgd.runs.directory import RunDirectory

    folder = RunDirectory(path)
    if not folder.ledger_path.is_file():
        folder = RunDirectory.open(path, finished=False)
    return folder.history()
