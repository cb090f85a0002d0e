"""Reads finished runs, checked against their ledgers, and exported models.

An export is a folder of three files: `params.npz`, `guarantee.json`, and `model.json`, which has
the record of the task, and checksums of this record and of the other files. Checksums find damage
and mixed exports. Against forgery, sign the folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from accounting.records import Count, Ge, Le
from dpsgd.core.mechanism import Mechanism
from dpsgd.core.segments import Segment
from dpsgd.files import file_sha256
from dpsgd.runs import report
from dpsgd.runs.directory import Configuration, RunDirectory
from dpsgd.runs.history import History
from dpsgd.runs.log import WORDS
from dpsgd.runs.records import checked, fields_of
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.task import TaskRecord
from dpsgd.runs.terms import segments_from_records
from samplers.settings import SAMPLERS

_Number = Annotated[float | None, Ge(-1e39), Le(1e39)]
"""Number in the range of float32; None if undefined or secret."""

_Time = Annotated[float | None, Ge(0), Le(1e39)]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Report entries that no ledger has; times are None after a selection."""

    metrics: dict[str, _Number]
    num_params: Count
    calibration: dict[str, float | None] | None
    stage_seconds: dict[Literal[*WORDS], Annotated[float, Ge(0), Le(1e39)]] | None = None  # type: ignore[valid-type]
    training_seconds: _Time = None
    examples_per_second: _Time = None


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, read from its directory.

    Attributes:
      path: Run directory.
      config: Configuration of the run.
      record: Content of `report.json`, with the ledger's values for all entries of `proved`.
      history: Content of the ledger.
    """

    path: Path
    config: Configuration
    record: dict[str, Any]
    history: History

    @property
    def task(self) -> dict[str, Any]:
        """The task's "name", "settings" and "description", as JSON values."""
        return self.config.task

    @property
    def spec(self) -> RunSpec:
        """Resolved settings."""
        return self.config.spec

    @classmethod
    def read(cls, path: Path) -> FinishedRun:
        """Reads and checks a run directory.

        Raises:
          FileNotFoundError: if there is no finished run.
          ValueError: if a file is damaged, or the files do not belong together.
        """
        run = RunDirectory.open(path)
        history = run.history()
        config = run.configuration()
        config.check(history)
        record = run.read_json("report.json")
        fields_of(
            Figures, record, where=f"{path / 'report.json'} is damaged, or of another version"
        )
        return cls(path, config, {**record, **proved(history)}, history)

    def check_params(self) -> None:
        """Refuses parameters other than those that the run released.

        Raises:
          ValueError: if their digest differs from the ledger's.
        """
        if file_sha256(path := RunDirectory(self.path).params_path) != self.history.released:
            raise ValueError(
                f"{path} is not the model that the ledger records as released: restore it from "
                "a copy"
            )

    @property
    def mechanism(self) -> Mechanism | None:
        """Mechanism of the only attempt, or None.

        It is None after several attempts, and for a selection.
        """
        attempts = self.history.attempts
        alone = len(attempts) == 1 and self.history.selection is None
        return attempts[0].terms.mechanism if alone else None

    @property
    def data(self) -> str | None:
        """Digest of the training rows; None if it is unknown."""
        return RunDirectory(self.path).data()

    @property
    def environments(self) -> list[dict[str, Any]]:
        """Distinct versions and hardware of the run's attempts."""
        distinct: list[dict[str, Any]] = []
        for attempt in self.history.attempts:
            entries = attempt.environment.items()
            facts = {name: entry for name, entry in entries if name not in ("code", "placement")}
            distinct += [facts] if facts not in distinct else []
        return distinct


def environment_mismatch(runs: Iterable[FinishedRun]) -> list[str]:
    """Returns names of environment entries that differ."""
    stated = [attempt.environment for run in runs for attempt in run.history.attempts]
    names = dict.fromkeys(name for facts in stated for name in facts)
    return [n for n in names if any(facts.get(n) != stated[0].get(n) for facts in stated)]


def proved(history: History) -> dict[str, Any]:
    """Returns the report entries that a ledger proves."""
    mechanism = history.attempts[-1].terms.mechanism
    sampler, signal = mechanism.sampler, mechanism.signal_to_noise
    return {
        "sampler": SAMPLERS.name_of(type(sampler)),
        **history.guarantee().record(),
        "num_examples": sampler.num_examples,
        "num_steps": sampler.num_steps,
        "signal_to_noise": signal if math.isfinite(signal) else None,
        "attempts": len(history.attempts),
        "audit": history.audit,
        "params_sha256": history.released,
        "selection": history.selection.summary() if history.selection else None,
    }


def write_report(
    folder: RunDirectory, history: History, figures: Figures, origin: str = ""
) -> dict[str, Any]:
    """Writes guarantee and report of a finished run.

    It returns the content of the report.

    Args:
      folder: Run directory, with its configuration.
      history: Complete ledger of the run.
      figures: Entries that the ledger does not prove.
      origin: Date and command of the training, in words; may be empty.
    """
    record = {**proved(history), **vars(figures), "ledger_head": history.head}
    folder.write_json("guarantee.json", history.guarantee().record())
    config = folder.read_json("config.json")
    folder.write_text("report.md", report.markdown(record, config, origin))
    folder.write_json("report.json", record)
    return record


# --- Versions, devices and code -------------------------------------------------------------------

PACKAGES = ["dpsgd", "jax", "jaxlib", "flax", "optax", "numpy", "scipy", "dp-accounting"]


def environment() -> dict[str, Any]:
    """Returns package versions, platform and devices of this process.

    Packages that are not installed, such as `dpsgd` in a bare checkout, are left out.
    """
    import jax  # which reading a run needs not

    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "packages": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
    }


def origin(what: str = "Finished") -> str:
    """Returns a sentence: `what`, UTC time and this process's command."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return f"{what} on {datetime.now(UTC):%Y-%m-%d at %H:%M} UTC by:\n\n    {command}"


@functools.cache
def code_digest() -> str:
    """Returns a digest of the library's source files."""
    digest = hashlib.sha256()
    import accounting
    import samplers

    package = str(Path(__file__).parents[1])
    for folder in map(Path, [*accounting.__path__, *samplers.__path__, package]):
        for file in sorted(folder.rglob("*.py")):
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(
                f"{folder.name}/{file.relative_to(folder).as_posix()} {content}\n".encode()
            )
    return digest.hexdigest()


# --- Exported models ------------------------------------------------------------------------------

MODEL, PARAMS, GUARANTEE = "model.json", "params.npz", "guarantee.json"
_FORMAT, _VERSION = "dpsgd-model", 3


@dataclass(frozen=True)
class Bundle:
    """An exported model whose checksums agree.

    Attributes:
      path: Folder of the export; its file `PARAMS` has the parameters.
      task: The task's "name", "settings" and "description", as JSON values.
      guarantee: The guarantee, as JSON values.
    """

    path: Path
    task: Mapping[str, Any]
    guarantee: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Bundle:
        """Reads and checks an exported model.

        Raises:
          FileNotFoundError: if there is no exported model.
          ValueError: if a file is damaged, or the files are of two exports.
        """
        manifest_path = path / MODEL
        if not manifest_path.is_file():
            raise FileNotFoundError(f"{path} is not an exported model: it has no {MODEL}")
        folder = RunDirectory(path)
        manifest = folder.read_json(MODEL)
        if (manifest.get("format"), manifest.get("version")) != (_FORMAT, _VERSION):
            raise ValueError(
                f"{path} was exported by another version: its format is "
                f"{manifest.get('format')!a:.20} {manifest.get('version')!a:.20}, expected "
                f"{_FORMAT} {_VERSION}; export its run again"
            )
        task = checked(manifest.get("task"), dict[str, Any], f"{manifest_path} is damaged: task")
        fields_of(TaskRecord, task, where=f"{manifest_path} is damaged: task")
        sums = checked(
            manifest.get("sha256"), dict[str, str], f"{manifest_path} is damaged: sha256"
        )
        for name, digest in _checksums(path, task).items():
            if sums.get(name) != digest:
                raise ValueError(
                    f"{path / name} is damaged, or of another export: its checksum differs from "
                    f"{MODEL}; export the run again, or restore it from a copy"
                )
        return cls(path, task, folder.read_json(GUARANTEE))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Segments that trained the model; empty if unknown."""
        try:
            return segments_from_records(self.guarantee["segments"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path / GUARANTEE} is damaged: {error}") from None

    @staticmethod
    def manifest(path: Path, task: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of `MODEL`.

        Args:
          path: Folder with parameters and guarantee of the export.
          task: Record of the task.
        """
        sums = _checksums(path, task)
        return {"format": _FORMAT, "version": _VERSION, "task": task, "sha256": sums}


def _checksums(path: Path, task: Mapping[str, Any]) -> dict[str, str]:
    """Returns the SHA-256 of the task's record, parameters and guarantee."""
    sums = {MODEL: hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()}
    return sums | {name: file_sha256(path / name) for name in (PARAMS, GUARANTEE)}
