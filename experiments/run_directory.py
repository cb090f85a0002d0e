"""The directory of one run: what is written there, and how it is read back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd import Diagnostics

PyTree = Any

DIAGNOSTICS = "diagnostics_not_private.jsonl"
"""Apart from everything else, since the guarantee does not cover it."""


class RunDirectory:
    """The files of one run.

    `config.json`, `environment.json` and `guarantee.json` say what was asked, where and at what
    price; `params.npz` is the model; `report.json` and `report.md` are written last, so a run that
    has them is whole. Each file appears under its name only when it is complete and on disk.
    """

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """Makes the directory of a new run.

        Raises:
          FileExistsError: if there is one already; it is left as it is.
        """
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise FileExistsError(
                f"{path} exists already and is left as it is: name another --out, or remove it"
            ) from None
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Opens the directory of a finished run.

        Raises:
          FileNotFoundError: if there is none, or its run did not finish.
        """
        if not (path / "report.json").is_file():
            raise FileNotFoundError(f"{path} is not the directory of a finished run")
        return cls(path)

    def write_json(self, name: str, content: Any) -> None:
        """Writes `content` to the file `name`; NaN and infinity are not JSON and raise."""
        text = json.dumps(content, indent=2, allow_nan=False) + "\n"
        self._write(name, lambda file: file.write(text.encode()))

    def write_text(self, name: str, text: str) -> None:
        """Writes `text` to the file `name`."""
        self._write(name, lambda file: file.write(text.encode()))

    def read_json(self, name: str) -> Any:
        """Reads back what `write_json` wrote."""
        return json.loads((self.path / name).read_text())

    def write_params(self, params: PyTree) -> None:
        """Writes every leaf of `params` under its path in the tree."""
        leaves = {
            jax.tree_util.keystr(at): np.asarray(leaf)
            for at, leaf in jax.tree_util.tree_leaves_with_path(params)
        }
        self._write("params.npz", lambda file: np.savez(file, allow_pickle=False, **leaves))

    def read_params(self, like: PyTree) -> PyTree:
        """Reads the parameters back, in the structure and dtypes of `like`.

        Raises:
          ValueError: if the saved parameters are not those of such a model.
        """
        path = self.path / "params.npz"
        with np.load(path) as saved:

            def read(at, leaf):
                name = jax.tree_util.keystr(at)
                if name not in saved or saved[name].shape != leaf.shape:
                    raise ValueError(f"{path} does not hold the parameter {name} {leaf.shape}")
                return jnp.asarray(saved[name], leaf.dtype)

            return jax.tree_util.tree_map_with_path(read, like)

    def append_diagnostics(self, first_step: int, diagnostics: Diagnostics) -> None:
        """Appends one JSON line a step. NOT covered by the guarantee: a file of its own."""
        rows = zip(*(column.tolist() for column in diagnostics), strict=True)
        with open(self.path / DIAGNOSTICS, "a") as file:
            for step, values in enumerate(rows, first_step):
                line = {"step": step, **dict(zip(diagnostics._fields, values, strict=True))}
                file.write(json.dumps(line) + "\n")

    def _write(self, name: str, write: Callable[[IO[bytes]], Any]) -> None:
        unfinished = self.path / f".{name}.unfinished"
        try:
            with open(unfinished, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, self.path / name)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
