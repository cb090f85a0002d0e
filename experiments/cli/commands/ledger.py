"""`dpsgd ledger`: what a run has released so far, and what that costs."""

from __future__ import annotations

from math import isinf
from pathlib import Path

from accounting import Bound
from accounting.profile import format_delta
from dpsgd.core.guarantee import Guarantee
from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.history import History
from experiments.cli.console import counted, going_on
from experiments.cli.questions.directories import Ledger


def run(config: Ledger) -> None:
    """Runs `dpsgd ledger`."""
    history = _history(config.run)
    earlier = [_history(path) for path in config.earlier]
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
            alone = [guarantee, *(one.guarantee() for one in earlier)]
        for note in filter(None, whole.notes):
            print(f"note on all {len(earlier) + 1} runs: {note}")
        print(f"for a unit with rows in one of the runs alone: {_largest(alone, whole)}")
        print(f"for a unit with rows in all {len(earlier) + 1} runs: {whole.sentence()}")
        print(
            "not checked: in which of the runs a unit has rows. Runs on disjoint rows may have "
            "rows of one person. A choice among the runs by private rows "
            "is not covered"
        )


def _largest(guarantees: list[Guarantee], together: Guarantee) -> str:
    """Returns the guarantee that each of several runs gives, in words.

    Args:
      guarantees: Guarantee of each run.
      together: Joint guarantee, which names initial models that none of the runs trained.
    """
    if void := [one for one in guarantees if one.epsilon is None or isinf(one.epsilon.upper)]:
        return f"{void[0].sentence()} (of one of the runs)"
    upper = max(one.epsilon.upper for one in guarantees if one.epsilon)
    delta = max(one.delta for one in guarantees)
    stated = f"epsilon <= {Bound(0.0, upper).format_upper()} at delta {format_delta(delta)}"
    if any(one.otherwise for one in guarantees):
        most = max(bound.upper for one in guarantees if (bound := one.otherwise or one.epsilon))
        if most > upper:
            stated += " if interruptions did not depend on what the runs had released; otherwise "
            stated += f"<= {Bound(0.0, most).format_upper()}"
        stated += ", for as many attempts, epochs and steps"
    rows = ", for rows that trained no initial model" if together.initial_names else ""
    return f"{stated}, the largest of the runs{rows}"


def _history(path: Path) -> History:
    folder = RunDirectory(path)
    if not folder.ledger_path.is_file():
        folder = RunDirectory.open(path, finished=False)
    return folder.history()
