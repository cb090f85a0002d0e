"""The directory of one run: what is written there, and how it is read back."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpsgd.files import (
    PUBLIC,
    SECRET,
    check_writable,
    file_sha256,
    fsync_folder,
    make_folder,
    open_own,
    parse_json,
    write_atomically,
)
from dpsgd.runs.checkpoint import Checkpoints
from dpsgd.runs.draws import destroy_stop, stop_files
from dpsgd.runs.history import History, LedgerError
from dpsgd.runs.ledger import read
from dpsgd.runs.records import checked
from dpsgd.runs.spec import check_version, config_digest

if TYPE_CHECKING:
    from dpsgd.core.state import Diagnostics

PyTree = Any

DIAGNOSTICS = "diagnostics_not_private.jsonl"
"""Apart from everything else, since the guarantee does not cover it."""

DATA = "data_not_private.json"
"""Which data a run was trained on: by a digest of private rows, which no noise hides."""

BATCHES = "batches.json"
"""Where the batches lie that were drawn ahead, if any were."""

CALIBRATION = "calibration.json"
"""What the noisy sums after the last step came to: released, and part of the model."""

SECRETS = "secret"
"""Folder of a private selection under way: nobody may see it, and nothing of it stays."""


class RunDirectory:
    """The files of one run.

    `config.json`, `environment.json` and `guarantee.json` say what was asked, where and at what
    price; `ledger.jsonl` what was audited and what was released; `params.npz` is the model, and
    `calibration.json` what calibrated it. `report.json` and `report.md` are written last, so a run
    that has them is whole. Until then `checkpoints` are there to resume from, and after a clean
    stop `secret.json`; afterwards they are removed. What is not private says so in its name, and
    only the owner can read it. Each file appears under its name only when it is complete and on
    disk.
    """

    def __init__(self, path: Path):
        self.path = path

    @staticmethod
    def refuse_existing(path: Path, option: str = "--out") -> None:
        """Raises OSError if something is at `path`, which `option` named, or nothing can be."""
        if os.path.lexists(path):
            raise FileExistsError(
                f"{path} exists already and is left as it is: name another {option}, or remove it"
            )
        check_writable(path)

    @classmethod
    @contextmanager
    def create(cls, path: Path) -> Iterator[RunDirectory]:
        """Makes the directory of a new run, with what is written in the context or not at all."""
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
        """Opens the directory of a run, which must be `finished`, or raises FileNotFoundError."""
        run = cls(path)
        if (path / SECRETS).is_dir() and not run.finished:
            raise FileNotFoundError(
                f"{path} is a private selection that is not finished: the command that began it "
                "resumes it"
            )
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} is not the directory of a run")
        if finished and not run.finished:
            raise FileNotFoundError(
                f"{path} is not the directory of a finished run: `dpsgd resume {path}` resumes it"
            )
        return run

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return (self.path / "report.json").is_file()

    @property
    def ledger_path(self) -> Path:
        """What was released: see `dpsgd.runs.ledger`."""
        return self.path / "ledger.jsonl"

    @property
    def params_path(self) -> Path:
        """The released parameters."""
        return self.path / "params.npz"

    @property
    def checkpoints(self) -> Checkpoints:
        """Where an unfinished run can resume."""
        return Checkpoints(self.path / "checkpoints")

    def history(self) -> History:
        """Reads the ledger, and refuses one that contradicts the last checkpoint or the report."""
        history = read(self.ledger_path)
        if self.finished:
            report, where = self.read_json("report.json"), self.path / "report.json"
            proved = {"audit": history.audit, "params_sha256": history.released}
            stated = {
                name: checked(report.get(name), str, f"{where} is damaged: {name}")
                for name in ("ledger_head", *proved)
            }
            history.check_head(stated.pop("ledger_head"), "report.json")
            for name, value in proved.items():
                if stated[name] != value or not history.released:
                    raise LedgerError(
                        f"{where} states another {name} than the ledger: one of them was edited, "
                        "cut or replaced; restore it from a copy"
                    )
        elif head := self.checkpoints.latest_head():
            history.check_head(head, "the last checkpoint")
        elif self.params_path.exists() and not history.released:
            raise LedgerError(
                f"{self.ledger_path} does not end in the line that closes it, and the model is "
                "there: it was cut, or is of an earlier version; restore it from a copy"
            )
        return history

    def config(self, history: History) -> dict[str, Any]:
        """Reads the configuration of a run, or refuses another than `history` names."""
        record = self.read_json("config.json")
        check_version(record, self.path)
        if config_digest(record) != history.attempts[-1].terms.config:
            raise ValueError(
                f"{self.path / 'config.json'} is not what the run was begun with, as its ledger "
                "knows it: it was edited or replaced; restore it from a copy"
            )
        return record

    def data(self) -> list[str | None]:
        """Returns the digests of the data that the run was trained on; None for what is unknown."""
        if not (self.path / DATA).exists():
            return [None]
        digests = self.read_json(DATA).get("data") or [None]
        return checked(digests, list[str | None], f"{self.path / DATA} is damaged: data")

    def check_data(self, digest: str) -> None:
        """Raises ValueError unless the run was begun on the rows of this digest."""
        if self.data() == [None]:
            raise ValueError(f"{self.path / DATA} is missing: restore it, or start a new run")
        if self.data() != [digest]:
            raise ValueError(
                f"{self.path / DATA}: the run was begun on other rows, and its guarantee is for "
                "those: bring them back, or start a new run"
            )

    @property
    def batches(self) -> Path | None:
        """The folder of batches that were drawn ahead; None if none were."""
        if not (self.path / BATCHES).exists():
            return None
        where = f"{self.path / BATCHES} is damaged: path"
        return Path(checked(self.read_json(BATCHES).get("path"), str, where))

    def note_batches(self, path: Path) -> None:
        """Writes down where batches are being drawn, which are destroyed when the run ends."""
        self.write_json(BATCHES, {"path": str(path.absolute())})

    @property
    def untidy(self) -> bool:
        """Whether there is something that a finished run needs no more."""
        paths = self.path / BATCHES, self.checkpoints.folder, *stop_files(self.path)
        return any(map(os.path.lexists, paths))

    def forget(self) -> None:
        """Removes what a finished run needs no more: checkpoints, batches and a sampling seed."""
        if (batches := self.batches) is not None:
            from dpsgd.engine import batch_files  # with JAX, which reading a run needs not

            batch_files.forget(batches, read(self.ledger_path).name)
            self.withdraw(BATCHES)
        self.checkpoints.remove()
        destroy_stop(self.path)
        fsync_folder(self.path)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Writes `content` to the file `name`; NaN and infinity are not JSON and raise."""
        self.write_text(name, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def withdraw(self, name: str) -> None:
        """Removes the file `name`, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def write_text(self, name: str, text: str) -> None:
        """Writes `text` to the file `name`."""
        mode = SECRET if "not_private" in name else PUBLIC
        write_atomically(self.path / name, lambda file: file.write(text.encode()), mode=mode)

    def read_json(self, name: str) -> dict[str, Any]:
        """Reads back an object that `write_json` wrote, or refuses what is damaged."""
        try:
            content = parse_json((self.path / name).read_bytes())
            if not isinstance(content, dict):
                raise ValueError("it holds no object")
        except ValueError as error:
            raise ValueError(f"{self.path / name} is damaged: {error}") from None
        return content

    def write_params(self, params: PyTree) -> None:
        """Writes every leaf of `params` under its path in the tree."""
        import jax

        leaves = {
            jax.tree_util.keystr(at): np.asarray(leaf)
            for at, leaf in jax.tree_util.tree_leaves_with_path(params)
        }
        write_atomically(
            self.params_path, lambda file: np.savez(file, allow_pickle=False, **leaves)
        )

    def read_params(self, like: PyTree) -> PyTree:
        """Reads the parameters back, see `read_arrays`."""
        from dpsgd.runs.arrays import read_arrays  # with JAX

        return read_arrays(self.params_path, like)

    def params_digest(self) -> str:
        """Returns the SHA-256 of the file of the parameters, which tell no more than they do."""
        return file_sha256(self.params_path)

    def append_diagnostics(self, first_step: int, diagnostics: Diagnostics) -> None:
        """Appends one JSON line a step. NOT covered by the guarantee: a file of its own."""
        rows = zip(*(column.tolist() for column in diagnostics), strict=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(open_own(self.path / DIAGNOSTICS, flags, SECRET), "a") as file:
            for step, values in enumerate(rows, first_step):
                line = {"step": step, **dict(zip(diagnostics._fields, values, strict=True))}
                file.write(json.dumps(line) + "\n")

    def cut_diagnostics(self, step: int) -> None:
        """Removes the lines from `step` on, which a resumed run will write again."""
        try:
            descriptor = open_own(self.path / DIAGNOSTICS, os.O_RDWR, SECRET)
            with os.fdopen(descriptor, "rb+") as file:
                if not os.fstat(file.fileno()).st_size:
                    return
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
                    # From the end: it takes as long as there is to cut, however long the file is.
                    cut = lines.rfind(b'{"step": %d,' % step)
                    if cut < 0:
                        cut = lines.rfind(b"\n") + 1  # at most a line that a crash left unended
                file.truncate(cut)
        except FileNotFoundError:
            return
