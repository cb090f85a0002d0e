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
from typing import Annotated, Any, Literal

from accounting.records import Count, Ge, Le
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.segments import Segment
from dpsgd.files import file_sha256, parse_json
from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.history import History
from dpsgd.runs.log import WORDS
from dpsgd.runs.records import checked, fields_of
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.task import TaskRecord
from dpsgd.runs.terms import segments_from_records
from samplers.settings import name_of

_Number = Annotated[float | None, Ge(-1e39), Le(1e39)]
"""Figure within float32, in which a model computes; None where it is undefined or secret."""

_Time = Annotated[float | None, Ge(0), Le(1e39)]


@dataclass(frozen=True)
class _Figures:
    """What a report alone says: size, times (None of a private selection), and quality."""

    num_params: Count
    training_seconds: _Time
    examples_per_second: _Time
    stage_seconds: dict[Literal[*WORDS], Annotated[float, Ge(0), Le(1e39)]] | None  # type: ignore[valid-type]
    metrics: dict[str, _Number]
    calibration: dict[str, float | None] | None


@dataclass(frozen=True)
class _Environment:
    """What a ledger says of where an attempt ran."""

    packages: dict[str, str]
    python: str
    platform: str
    cpu_count: int | None
    backend: str
    devices: list[str]


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
        fields_of(TaskRecord, task, where=f"{where}: task")
        record = run.read_json("report.json")
        fields_of(
            _Figures, record, where=f"{path / 'report.json'} is damaged, or of another version"
        )
        return cls(path, task, spec, {**record, **proved(history)}, history)

    def check_params(self) -> None:
        """Raises ValueError unless the parameters are those that the ledger says were released."""
        if file_sha256(path := RunDirectory(self.path).params_path) != self.history.released:
            raise ValueError(
                f"{path} is not the model that the run's ledger says was released: restore it from "
                "a copy"
            )

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
            where = f"{self.path / 'ledger.jsonl'} is damaged"
            here = fields_of(_Environment, attempt.environment, where=where)
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
        fields_of(TaskRecord, task, where=f"{where} is damaged: task")
        sums = checked(found.get("sha256"), dict[str, str], f"{where} is damaged: sha256")
        for name, digest in _checksums(path, task).items():
            if sums.get(name) != digest:
                raise ValueError(
                    f"{path / name} is damaged, or of another export: its checksum is not that in "
                    f"{MODEL}; export the run again, or restore it from a copy"
                )
        guarantee = checked(parse_json((path / GUARANTEE).read_bytes()), dict[str, Any], GUARANTEE)
        return cls(path, task, guarantee)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Segments of the run that trained the model; none if they are not known."""
        try:
            return segments_from_records(self.guarantee["segments"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path / GUARANTEE} is damaged: {error}") from None

    @staticmethod
    def manifest(path: Path, task: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what `MODEL` holds, as JSON values, once the other files lie in `path`."""
        sums = _checksums(path, task)
        return {"format": _FORMAT, "version": _VERSION, "task": task, "sha256": sums}


def _checksums(path: Path, task: Mapping[str, Any]) -> dict[str, str]:
    """Returns the SHA-256 of what the manifest says of the task, and of the other files."""
    sums = {MODEL: hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()}
    return sums | {name: file_sha256(path / name) for name in (PARAMS, GUARANTEE)}
