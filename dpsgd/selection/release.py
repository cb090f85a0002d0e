"""Release of a selection: a run directory of the best model, under the joint guarantee.

The trial's own ledger, guarantee, environment and times stay secret: they would reveal the privacy
cost of one trial, and of the others. A second attempt writes the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dpsgd.files import write_atomically
from dpsgd.runs.directory import CALIBRATION, DATA, RunDirectory
from dpsgd.runs.history import History, line_of
from dpsgd.runs.records import to_json
from dpsgd.runs.result import Figures, code_digest, environment, write_report
from dpsgd.runs.terms import Terms
from dpsgd.selection.candidates import Candidates
from dpsgd.selection.vault import VaultSecret

NOTHING = "nothing_released.json"
"""File in place of a model after every trial failed."""

_KEPT = ("metrics", "num_params", "calibration")
"""Report entries of a trial that reveal nothing about other trials or time."""


def ended(folder: RunDirectory) -> bool:
    """Returns True if everything is released."""
    return folder.finished or (folder.path / NOTHING).exists()


def release_nothing(folder: RunDirectory) -> None:
    """Records that every trial failed."""
    folder.write_json(NOTHING, {"why": "every trial failed or diverged"})


def release(
    wanted: Candidates, terms: Terms, best: Path, folder: RunDirectory, secret: VaultSecret
) -> None:
    """Writes the run directory of the best trial.

    Args:
      wanted: The requested selection.
      terms: Terms of the best trial's candidate.
      best: Directory of the best trial's run.
      folder: Directory to write.
      secret: Secret of the selection.
    """
    trial = RunDirectory(best)
    record, trial_report = trial.read_json("config.json"), trial.read_json("report.json")
    terms = dataclasses.replace(terms, trained=trial.history().attempts[0].terms.trained)
    nonce = secret.blind("model")  # a second attempt writes the same bytes
    content = trial.params_path.read_bytes()
    lines = {"audit": trial_report["audit"]}, {"released": hashlib.sha256(content).hexdigest()}
    history = _write_ledger(folder, terms, nonce, lines)
    folder.write_json("config.json", record)
    folder.write_json("environment.json", environment())
    folder.write_json(DATA, {"data": wanted.data})
    if trial_report["calibration"]:
        folder.write_json(CALIBRATION, trial_report["calibration"])
    write_atomically(folder.params_path, lambda file: file.write(content))
    figures = Figures(**{key: trial_report[key] for key in _KEPT})
    write_report(folder, history, figures)


def _write_ledger(
    folder: RunDirectory, terms: Terms, nonce: str, last: Iterable[dict[str, Any]]
) -> History:
    """Appends the release of a model of these terms, and the `last` lines, to the ledger."""
    content = folder.ledger_path.read_bytes()
    head, content = folder.history().name, content[: content.index(b"\n") + 1]
    facts = to_json({**environment(), "code": code_digest()})
    beginning = {"attempt": 0, "first_step": 0, "drawing": "", "nonce": nonce, **terms.record()}
    steps: dict[str, Any] = {"declare": [0, terms.mechanism.num_steps]}
    for body in ({**beginning, "environment": facts}, steps, *last):
        line, head = line_of(body, head)
        content += line
    history = History.parse(content, folder.ledger_path)
    write_atomically(folder.ledger_path, lambda file: file.write(content))
    return history
