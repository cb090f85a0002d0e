"""A model that left the house, with its guarantee: how it lies on the disk, and how it is asked.

A bundle is a folder of three files: `params.npz`, `guarantee.json`, and `model.json`, which says
what kind of model it is, whatever its reader needs to know, and the checksums of all this, so that
parts of two bundles do not pass for one. (They find damage. Against forgery, sign the folder.)

What reads a kind is found by its name among the entry points `dpsgd.models` of the packages that
are *installed*: a file chooses among readers that somebody installed, and can name no module.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dpsgd.runs.files import parse_json
from dpsgd.runs.records import checked

READERS = "dpsgd.models"
"""Group of the entry points that name a `Reader` by the kind of models that it reads."""

MODEL, PARAMS, GUARANTEE = "model.json", "params.npz", "guarantee.json"
_FORMAT, _VERSION = "dpsgd-model", 1


@runtime_checkable
class ExportedModel(Protocol):
    """A model that can be asked, and what is guaranteed to those who were in its training data."""

    @property
    def guarantee(self) -> Mapping[str, Any]:
        """The guarantee as `Guarantee.record` has it: "guarantee" is its sentence."""

    @property
    def sizes(self) -> Mapping[str, Any]:
        """How large the model is, "num_params" among it."""

    def predict(self, rows: Mapping[str, Any]) -> np.ndarray:
        """Returns the predicted probabilities, float64[rows], of rows of raw values.

        Args:
          rows: Column name to its values, one a row, as they stand in the raw data; None, NaN and
            the empty text are missing.

        Raises:
          ValueError: for a column that is not there, or a value that it cannot hold.
        """


@dataclass(frozen=True)
class Bundle:
    """What an exported folder holds, with checksums that agree.

    Attributes:
      path: The folder; the parameters are in its file `PARAMS`.
      kind: Which models this is one of.
      model: What the reader of that kind needs to know, as JSON values.
      guarantee: The guarantee, as JSON values.
    """

    path: Path
    kind: str
    model: Mapping[str, Any]
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
        if "format" not in found:
            raise ValueError(
                f"{path} was exported by an earlier version, which did not write down what reads "
                "it: export its run again"
            )
        if (found["format"], found.get("version")) != (_FORMAT, _VERSION):
            raise ValueError(
                f"{path} is of another version: this program reads {_FORMAT} {_VERSION}, and it is "
                f"{found['format']!a:.20} {found.get('version')!a:.20}"
            )
        kind = checked(found.get("kind"), str, f"{where} is damaged: kind")
        model = checked(found.get("model"), dict[str, Any], f"{where} is damaged: model")
        sums = checked(found.get("sha256"), dict[str, str], f"{where} is damaged: sha256")
        for name, digest in _checksums(path, model).items():
            if sums.get(name) != digest:
                raise ValueError(
                    f"{path / name} is damaged, or of another export: its checksum is not that in "
                    f"{MODEL}; export the run again, or restore it from a copy"
                )
        guarantee = checked(parse_json((path / GUARANTEE).read_bytes()), dict[str, Any], GUARANTEE)
        return cls(path, kind, model, guarantee)

    @staticmethod
    def manifest(path: Path, kind: str, model: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what `MODEL` holds, as JSON values, once the other files lie in `path`."""
        sums = _checksums(path, model)
        return {
            "format": _FORMAT, "version": _VERSION, "kind": kind, "model": model, "sha256": sums
        }  # fmt: skip


def _checksums(path: Path, model: Mapping[str, Any]) -> dict[str, str]:
    """Returns the SHA-256 of what the manifest says of the model, and of the other files."""
    sums = {MODEL: hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()}
    for name in (PARAMS, GUARANTEE):
        with open(path / name, "rb") as file:
            sums[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return sums


Reader = Callable[[Bundle], ExportedModel]


def load_exported(path: str | os.PathLike[str]) -> ExportedModel:
    """Returns the model that `dpsgd export` wrote into the folder `path`, ready to be asked.

    Raises:
      FileNotFoundError: if there is no bundle, or one of its files is missing.
      ValueError: if it is damaged, of another version, or of a kind that no installed package
        reads.
    """
    bundle = Bundle.read(Path(path))
    found = {entry.value: entry for entry in entry_points(group=READERS, name=bundle.kind)}
    if len(found) != 1:
        kinds = ", ".join(sorted({entry.name for entry in entry_points(group=READERS)})) or "none"
        why, mend = (
            "no installed package reads",
            "install or update the one that wrote it",
        )
        if found:
            why, mend = "several installed packages read", f"keep one of {', '.join(sorted(found))}"
        raise ValueError(
            f"{path} is a model of the kind {bundle.kind!a:.40}, which {why} (kinds that are read: "
            f"{kinds}): {mend}"
        )
    (entry,) = found.values()
    reader: Reader = entry.load()
    return reader(bundle)
