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
from dpsgd.noise.keys import RootKey
from dpsgd.runs import report
from dpsgd.runs.directory import CALIBRATION, DATA, RunDirectory
from dpsgd.runs.fingerprint import environment, fingerprint, task_code_digest
from dpsgd.runs.history import NO_HEAD, History, line_of
from dpsgd.runs.result import proved
from dpsgd.runs.task import identity
from dpsgd.runs.terms import Terms
from dpsgd.selection.candidates import Candidates

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
    wanted: Candidates, terms: Terms, best: Path, folder: RunDirectory, root: RootKey
) -> None:
    """Writes the run directory of the best trial.

    Args:
      wanted: Selection as asked for.
      terms: Terms of the best trial's candidate.
      best: Directory of the best trial's run.
      folder: Directory to write.
      root: Root key of the selection.
    """
    trial = RunDirectory(best)
    record, trial_report = trial.read_json("config.json"), trial.read_json("report.json")
    task, name, sampler = wanted.task, record["task"]["name"], terms.mechanism.sampler
    code = task_code_digest(task, name, sampler, identity=identity(task, name))
    stated = fingerprint(record, wanted.data, root, code, "")
    if terms.segment().lazy_tables:
        stated["tables"] = "lazy"
    if trained := trial.history().attempts[-1].terms.fingerprint.get("trained"):
        stated["trained"] = trained
    content = trial.params_path.read_bytes()
    lines = {"audit": trial_report["audit"]}, {"released": hashlib.sha256(content).hexdigest()}
    history = _write_ledger(folder, dataclasses.replace(terms, fingerprint=stated), root, lines)
    folder.write_json("config.json", record)
    folder.write_json("environment.json", environment())
    folder.write_json("guarantee.json", history.guarantee().record())
    folder.write_json(DATA, {"data": [wanted.data]})
    if trial_report["calibration"]:
        folder.write_json(CALIBRATION, trial_report["calibration"])
    write_atomically(folder.params_path, lambda file: file.write(content))
    released: dict[str, Any] = {
        **proved(history),
        "ledger_head": history.head,
        **{key: trial_report[key] for key in _KEPT},
        "stage_seconds": None,
        "training_seconds": None,
        "examples_per_second": None,
    }
    folder.write_text("report.md", report.markdown(released, record))
    folder.write_json("report.json", released)


def _write_ledger(
    folder: RunDirectory, terms: Terms, root: RootKey, last: Iterable[dict[str, Any]]
) -> History:
    """Appends the release of a model of these terms, and the `last` lines, to the ledger."""
    content = folder.ledger_path.read_bytes()
    head, content = folder.history().name, content[: content.index(b"\n") + 1]
    beginning = {"attempt": 0, "first_step": 0, "origin": NO_HEAD, "nonce": root.blind("model")}
    steps: dict[str, Any] = {"steps": [0, terms.mechanism.num_steps]}
    for body in (beginning | terms.record(), steps, *last):
        line, head = line_of(body, head)
        content += line
    history = History.parse(content, folder.ledger_path)
    write_atomically(folder.ledger_path, lambda file: file.write(content))
    return history
