"""An exported model: its parameters, the public part of its task, and its guarantee.

A bundle is a folder of three files: `params.npz`, `guarantee.json`, and `model.json`, which says
what task the model is of, what is public of it, and the checksums of all this, so that parts of two
bundles do not pass for one. (They find damage. Against forgery, sign the folder.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsgd.files import parse_json
from dpsgd.runs.records import checked
from dpsgd.runs.task import RECORD

MODEL, PARAMS, GUARANTEE = "model.json", "params.npz", "guarantee.json"
_FORMAT, _VERSION = "dpsgd-model", 2


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
        """Reads the bundle in the folder `path`.

        Raises:
          FileNotFoundError: if there is none, or one of its files is missing.
          ValueError: if it is damaged, of another version, or parts of two.
        """
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
        for name, kind in RECORD.items():
            checked(task.get(name), kind, f"{where} is damaged: task, {name}")
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
