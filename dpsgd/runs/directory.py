"""Writes and reads the files in the directory of one run."""

from __future__ import annotations

import functools
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpsgd.files import (
    PUBLIC,
    SECRET,
    check_writable,
    fsync_folder,
    make_folder,
    open_own,
    parse_json,
    write_atomically,
)
from dpsgd.runs.attempts import StopFile
from dpsgd.runs.checkpoint import Checkpoints
from dpsgd.runs.history import History, LedgerError, read
from dpsgd.runs.records import checked, fields_of
from dpsgd.runs.spec import REGISTRIES, RunSpec, config_digest
from dpsgd.runs.task import TaskRecord
from samplers.registry import import_named

if TYPE_CHECKING:
    from dpsgd.core.state import Diagnostics

PyTree = Any

DIAGNOSTICS = "diagnostics_not_private.jsonl"
"""File of per-step diagnostics, which the guarantee does not cover."""

DATA = "data_not_private.json"
"""File with a digest of the training rows, unprotected by noise."""

BATCHES = "batches.json"
"""File that names the folder of batches drawn ahead, if any."""

CALIBRATION = "calibration.json"
"""File with the results of the full-batch queries, released with the model."""

SECRETS = "secret"
"""Folder with secrets of a private selection, destroyed at its end."""


@dataclass(frozen=True)
class Configuration:
    """Configuration of a run.

    Attributes:
      path: Path of `config.json`.
      record: Content of the file.
    """

    path: Path
    record: dict[str, Any]

    @property
    def damage(self) -> str:
        """Prefix of error messages."""
        return f"{self.path} is damaged, or of another version"

    @functools.cached_property
    def spec(self) -> RunSpec:
        """Resolved settings; raises ValueError if they are damaged, or leave an option open."""
        return RunSpec.from_record(self.record, self.damage)

    @functools.cached_property
    def task(self) -> dict[str, Any]:
        """The task's "name", "settings" and "description", as JSON values."""
        task = checked(self.record.get("task"), dict[str, Any], f"{self.damage}: task")
        fields_of(TaskRecord, task, where=f"{self.damage}: task")
        return task

    def differing(self, spec: RunSpec) -> list[str]:
        """Returns the names of options that were requested otherwise than in `spec`.

        The path of `init_from` is not compared.
        """
        ours = spec.record()
        theirs = checked(self.record.get("requested"), dict[str, Any], self.damage)
        names = dict.fromkeys([*ours, *theirs])  # a record lacks the options of other choices
        names.pop("init_from", None)
        return [name for name in names if ours.get(name) != theirs.get(name)]

    def check(self, history: History) -> None:
        """Raises ValueError if a ledger records another configuration."""
        if config_digest(self.record) != history.attempts[-1].terms.config:
            raise ValueError(
                f"{self.path} is not the configuration that the ledger records: it was edited or "
                "replaced; restore it from a copy"
            )


class RunDirectory:
    """Files of one run.

    `config.json` holds the configuration, `environment.json` versions and devices,
    `guarantee.json` the guarantee, `ledger.jsonl` the declared steps, audits and the model's
    digest, `params.npz` the released parameters, and `calibration.json` the calibration.
    `report.json` and `report.md` are written last, so a run that has them is finished. An
    unfinished run has `checkpoints`, and after a clean stop `secret.json`; both are destroyed at
    the end of the run. Files that the guarantee does not cover have `not_private` in their names,
    and only their owner can read them. Every file is renamed into place once it is complete and on
    the disk, except the ledger and the diagnostics, which grow line by line.
    """

    def __init__(self, path: Path):
        self.path = path

    @staticmethod
    def refuse_existing(path: Path, option: str = "--out") -> None:
        """Refuses a path that exists or cannot be created.

        Args:
          path: Path of a new file or folder.
          option: Option that gives the path, for error messages.

        Raises:
          OSError: if `path` exists or cannot be created.
        """
        if os.path.lexists(path):
            raise FileExistsError(
                f"{path} exists already and is left as it is: name another {option}, or remove it"
            )
        check_writable(path)

    @classmethod
    @contextmanager
    def create(cls, path: Path) -> Iterator[RunDirectory]:
        """Creates a run directory, renamed to `path` at the end.

        A process that is killed before leaves a hidden folder beside `path`, of a run or selection
        that never began.
        """
        cls.refuse_existing(path)
        unfinished = path.with_name(f".{path.name}.unfinished-{secrets.token_hex(4)}")
        make_folder(unfinished)
        run = cls(unfinished)
        try:
            yield run
            fsync_folder(unfinished)
            cls.refuse_existing(path)
            os.rename(unfinished, path)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        run.path = path
        fsync_folder(path.parent)

    @classmethod
    def open(cls, path: Path, *, finished: bool = True) -> RunDirectory:
        """Opens the directory of a run.

        Args:
          path: Run directory.
          finished: True to refuse an unfinished run.

        Raises:
          FileNotFoundError: if `path` is no run directory, is an unfinished private selection, or
            is an unfinished run and `finished` is True.
        """
        run = cls(path)
        if (path / SECRETS).is_dir() and not run.finished:
            raise FileNotFoundError(
                f"{path} is an unfinished private selection: repeat the command that began it to "
                "resume it"
            )
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} is not a run directory")
        if finished and not run.finished:
            raise FileNotFoundError(
                f"{path} is not the directory of a finished run: finish it by `dpsgd resume {path}`"
            )
        return run

    @property
    def finished(self) -> bool:
        """True if the run has written its report."""
        return (self.path / "report.json").is_file()

    @property
    def ledger_path(self) -> Path:
        """Path of the ledger, see `dpsgd.runs.history`."""
        return self.path / "ledger.jsonl"

    @property
    def params_path(self) -> Path:
        """Path of the released parameters."""
        return self.path / "params.npz"

    @property
    def checkpoints(self) -> Checkpoints:
        """Checkpoints of an unfinished run."""
        return Checkpoints(self.path / "checkpoints")

    @property
    def stop_file(self) -> StopFile:
        """File of a clean stop of an unfinished run."""
        return StopFile(self.path)

    def history(self) -> History:
        """Reads the ledger.

        Raises:
          LedgerError: if it is damaged, or contradicts the checkpoint or the report.
        """
        # Before the ledger, which grows meanwhile if another process trains the run.
        holder, head = "the last checkpoint", self.checkpoints.latest_head()
        if finished := self.finished:
            holder, stated = "report.json", self.read_json("report.json").get("ledger_head")
            head = checked(stated, str, f"{self.path / holder} is damaged: ledger_head")
        has_params = self.params_path.exists()
        history = read(self.ledger_path)
        if head:
            history.check_head(head, holder)
        if (finished or (has_params and not head)) and not history.released:
            raise LedgerError(
                f"{self.ledger_path} does not record the released model in params.npz: it was "
                "cut, or is of an earlier version; restore it from a copy"
            )
        return history

    def configuration(self, importing: Callable[[str], None] | None = None) -> Configuration:
        """Reads the configuration.

        Args:
          importing: Function of one line of text, called before the module of a part from outside
            the package is imported, which executes its code: to resume your own run, not to read
            somebody else's. None imports no module.

        Raises:
          ValueError: if the file is damaged.
        """
        path, record = self.path / "config.json", self.read_json("config.json")
        if importing is not None:
            import_named(record, REGISTRIES, str(path), importing)
        return Configuration(path, record)

    def data(self) -> str | None:
        """Returns the digest of the training rows; None if it is unknown."""
        if not (path := self.path / DATA).exists():
            return None
        return checked(self.read_json(DATA).get("data"), str | None, f"{path} is damaged: data")

    def check_data(self, digest: str) -> None:
        """Raises ValueError if the run did not begin on the rows of this digest."""
        if self.data() != digest:
            raise ValueError(
                f"{self.path / DATA} is missing, or the run began on other rows, for which its "
                "guarantee holds: restore those rows, or start a new run"
            )

    @property
    def batches(self) -> Path | None:
        """Folder of the batches drawn ahead; None without such batches."""
        if not (self.path / BATCHES).exists():
            return None
        prefix = f"{self.path / BATCHES} is damaged: path"
        return Path(checked(self.read_json(BATCHES).get("path"), str, prefix))

    @property
    def untidy(self) -> bool:
        """True if files of an unfinished run remain."""
        paths = self.path / BATCHES, self.checkpoints.folder
        return any(map(os.path.lexists, paths)) or bool(self.stop_file.remains)

    def forget(self) -> None:
        """Destroys checkpoints, batches and seed of a finished run."""
        if (batches := self.batches) is not None:
            from dpsgd.engine import batch_files  # with JAX, which reading a run needs not

            batch_files.forget(batches, read(self.ledger_path).name)
            (self.path / BATCHES).unlink(missing_ok=True)
        self.checkpoints.remove()
        self.stop_file.destroy()
        fsync_folder(self.path)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Writes `content` as JSON.

        Args:
          name: File name in the run directory.
          content: JSON object; a new file replaces an old one.

        Raises:
          ValueError: if `content` has NaN or infinity.
        """
        self.write_text(name, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Writes a text file.

        Args:
          name: File name in the run directory; only the owner can read files with `not_private` in
            their names.
          text: Content, encoded as UTF-8.
        """
        mode = SECRET if "not_private" in name else PUBLIC
        write_atomically(self.path / name, lambda file: file.write(text.encode()), mode=mode)

    def read_json(self, name: str) -> dict[str, Any]:
        """Reads a JSON object.

        Raises:
          ValueError: if the file is damaged.
        """
        try:
            content = parse_json((self.path / name).read_bytes())
            if not isinstance(content, dict):
                raise ValueError("it is no JSON object")
        except ValueError as error:
            raise ValueError(f"{self.path / name} is damaged: {error}") from None
        return content

    def write_params(self, params: PyTree) -> None:
        """Writes each leaf of `params` under its key path."""
        import jax

        leaves = {
            jax.tree_util.keystr(key_path): np.asarray(leaf)
            for key_path, leaf in jax.tree_util.tree_leaves_with_path(params)
        }
        write_atomically(
            self.params_path, lambda file: np.savez(file, allow_pickle=False, **leaves)
        )

    def append_diagnostics(self, first_step: int, diagnostics: Diagnostics) -> None:
        """Appends one JSON line per step, NOT private.

        Args:
          first_step: Index of the first step.
          diagnostics: Arrays with one entry per step.
        """
        rows = zip(*(column.tolist() for column in diagnostics), strict=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(open_own(self.path / DIAGNOSTICS, flags, SECRET), "a") as file:
            for step, values in enumerate(rows, first_step):
                line = {"step": step, **dict(zip(diagnostics._fields, values, strict=True))}
                file.write(json.dumps(line) + "\n")

    def cut_diagnostics(self, step: int) -> None:
        """Removes the diagnostics from `step` on."""
        try:
            descriptor = open_own(self.path / DIAGNOSTICS, os.O_RDWR, SECRET)
            with os.fdopen(descriptor, "rb+") as file:
                lines = file.read()
                cut = lines.rfind(b'{"step": %d,' % step)
                # If the step is missing, only a line that a crash cut short is removed.
                file.truncate(lines.rfind(b"\n") + 1 if cut < 0 else cut)
        except FileNotFoundError:
            return
