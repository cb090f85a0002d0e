"""What a finished run left for anybody to read, held against its ledger; and exported models.

An export is a folder of three files: `params.npz`, `guarantee.json`, and `model.json`, which says
what task the model is of, what is public of it, and the checksums of all this, so that parts of two
exports do not pass for one. (They find damage. Against forgery, sign the folder.)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsgd.core.mechanism import Mechanism
from dpsgd.files import parse_json
from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.history import History
from dpsgd.runs.log import WORDS
from dpsgd.runs.records import checked
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.task import RECORD
from samplers.settings import name_of

_LARGEST = 1e39
"""Float32, in which a model computes, ends below."""

_FIGURES: dict[str, tuple[Any, float, float]] = {
    "num_params": (int, 1, _LARGEST),
    "training_seconds": (float | None, 0, _LARGEST),
    "examples_per_second": (float | None, 0, _LARGEST),
}
"""What a report alone says: the type of each figure, its least and its largest value.

Times are None where they are secret: those of a private selection.
"""

_ENVIRONMENT: dict[str, Any] = {
    "packages": dict[str, str],
    "python": str,
    "platform": str,
    "cpu_count": int | None,
    "backend": str,
    "devices": list[str],
}
"""What a ledger says of where an attempt ran, by type."""


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, read back.

    Attributes:
      path: Its directory.
      task: What was trained: its "name", "settings" and "description", as JSON values.
      spec: How.
      record: What `report.json` holds, with the ledger's word for all that the ledger proves.
      history: The ledger.
    """

    path: Path
    task: dict[str, Any]
    spec: RunSpec
    record: dict[str, Any]
    history: History

    @classmethod
    def read(cls, path: Path) -> FinishedRun:
        """Reads the run in a directory; refuses files that do not belong together."""
        run = RunDirectory.open(path)
        history = run.history()
        settings = run.config(history)
        where = f"{path / 'config.json'} is damaged, or of another version"
        spec = RunSpec.from_record(settings, where)
        task = checked(settings.get("task"), dict[str, Any], f"{where}: task")
        checked_fields(task, RECORD, f"{where}: task")
        record = run.read_json("report.json")
        where = f"{path / 'report.json'} is damaged, or of another version"
        kinds = {name: kind for name, (kind, *_) in _FIGURES.items()}
        kinds |= {"stage_seconds": dict[str, float] | None}
        kinds |= {"metrics": dict[str, float | None], "calibration": dict[str, float | None] | None}
        checked_fields(record, kinds, where)
        for name, (_, least, most) in _FIGURES.items():
            if record[name] is not None and not least <= record[name] <= most:
                shown = f"{record[name]!s:.20}"
                raise ValueError(f"{where}: {name} must lie in [{least:g}, {most:g}], got {shown}")
        for name, value in (record["stage_seconds"] or {}).items():
            if not (name in WORDS and 0 <= value <= _LARGEST):
                raise ValueError(f"{where}: stage_seconds, {name!a:.20}: {value!s:.20}")
        for name, value in record["metrics"].items():
            if value is not None and not abs(value) <= _LARGEST:
                raise ValueError(f"{where}: metrics, {name}: {value!s:.20} is too large")
        return cls(path, task, spec, {**record, **proved(history)}, history)

    @property
    def mechanism(self) -> Mechanism | None:
        """What its price can be asked of at another delta; None of several, and of a selection."""
        attempts = self.history.attempts
        alone = len(attempts) == 1 and self.history.selection is None
        return attempts[0].terms.mechanism if alone else None

    @property
    def data(self) -> list[str | None]:
        """Digests of the data that it was trained on; None for what was not written down."""
        return RunDirectory(self.path).data()

    @property
    def environments(self) -> list[dict[str, Any]]:
        """Versions and hardware of its attempts, each once."""
        found: list[dict[str, Any]] = []
        for attempt in self.history.attempts:
            stated, where = attempt.environment, f"{self.path / 'ledger.jsonl'} is damaged"
            checked_fields(stated, _ENVIRONMENT, where)
            here = {name: stated[name] for name in _ENVIRONMENT}
            found += [here] if here not in found else []
        return found


def environment_mismatch(runs: Iterable[FinishedRun]) -> list[str]:
    """Returns what differs between the environments of runs, or within one."""
    stated = [attempt.environment for run in runs for attempt in run.history.attempts]
    names = dict.fromkeys(name for one in stated for name in one)
    return [n for n in names if any(one.get(n) != stated[0].get(n) for one in stated)]


def proved(history: History) -> dict[str, Any]:
    """Returns that part of a run's report which its ledger gives, the guarantee among it."""
    mechanism = history.attempts[-1].terms.mechanism
    sampler, signal = mechanism.sampler, mechanism.signal_to_noise
    return {
        "sampler": name_of(type(sampler)),
        **history.guarantee().record(),
        "num_examples": sampler.num_examples,
        "num_steps": sampler.num_steps,
        "signal_to_noise": signal if math.isfinite(signal) else None,
        "attempts": len(history.attempts),
        "audit": history.audit,
        "params_sha256": history.released,
        "selection": history.selection.summary() if history.selection else None,
    }


def checked_fields(record: Mapping[str, Any], kinds: Mapping[str, Any], where: str) -> None:
    """Raises ValueError, which begins with `where`, if a field is missing or of another type."""
    for name, kind in kinds.items():
        if name not in record:
            raise ValueError(f"{where}: {name} is missing")
        checked(record[name], kind, f"{where}: {name}")


# --- Exported models ------------------------------------------------------------------------------

MODEL, PARAMS, GUARANTEE = "model.json", "params.npz", "guarantee.json"
_FORMAT, _VERSION = "dpsgd-model", 3


@dataclass(frozen=True)
class Bundle:
    """What an exported folder holds, with checksums that agree.

    Attributes:
      path: The folder; the parameters are in its file `PARAMS`.
      task: The task's "name", "settings" and "description", as JSON values.
      guarantee: The guarantee, as JSON values.
    """

    path: Path
    task: Mapping[str, Any]
    guarantee: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Bundle:
        """Reads the export in a folder; refuses one that is damaged, or parts of two."""
        where = path / MODEL
        if not where.is_file():
            raise FileNotFoundError(f"{path} is not an exported model: it has no {MODEL}")
        try:
            found = checked(parse_json(where.read_bytes()), dict[str, Any], "it")
        except ValueError as error:
            raise ValueError(f"{where} is damaged: {error}") from None
        if (found.get("format"), found.get("version")) != (_FORMAT, _VERSION):
            raise ValueError(
                f"{path} was exported by another version: this program reads {_FORMAT} {_VERSION}, "
                f"and it is {found.get('format')!a:.20} {found.get('version')!a:.20}; export its "
                "run again"
            )
        task = checked(found.get("task"), dict[str, Any], f"{where} is damaged: task")
        checked_fields(task, RECORD, f"{where} is damaged: task")
        sums = checked(found.get("sha256"), dict[str, str], f"{where} is damaged: sha256")
        for name, digest in _checksums(path, task).items():
            if sums.get(name) != digest:
                raise ValueError(
                    f"{path / name} is damaged, or of another export: its checksum is not that in "
                    f"{MODEL}; export the run again, or restore it from a copy"
                )
        guarantee = checked(parse_json((path / GUARANTEE).read_bytes()), dict[str, Any], GUARANTEE)
        return cls(path, task, guarantee)

    @staticmethod
    def manifest(path: Path, task: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what `MODEL` holds, as JSON values, once the other files lie in `path`."""
        sums = _checksums(path, task)
        return {"format": _FORMAT, "version": _VERSION, "task": task, "sha256": sums}


def _checksums(path: Path, task: Mapping[str, Any]) -> dict[str, str]:
    """Returns the SHA-256 of what the manifest says of the task, and of the other files."""
    sums = {MODEL: hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()}
    for name in (PARAMS, GUARANTEE):
        with open(path / name, "rb") as file:
            sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums
