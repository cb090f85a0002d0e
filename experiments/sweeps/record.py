"""Finished sweeps as one short record: `python -m experiments.sweeps.record OUT FOLDER...`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from dpsgd.files import write_atomically
from experiments.cli.errors import in_one_line
from experiments.sweeps.config import AXES, SHIPPED
from experiments.sweeps.engine import ASKED


@dataclass(frozen=True)
class RecordConfig:
    """Write the results of shipped sweeps into one file that is small enough to be kept."""

    out: tyro.conf.Positional[Path]
    """File to write, .json."""
    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of finished sweeps, each of a shipped file."""
    note: str = ""
    """What else a reader should know: which rows, which machine."""


def record(folders: Sequence[Path], note: str = "") -> dict[str, Any]:
    """Returns where sweeps ran, how to do them again, and each grid point's mean and deviation.

    Raises:
      ValueError: for a folder whose sweep is not a shipped one as it is now, or was summarized by
        another version.
      OSError: for a folder that is not that of a finished sweep.
    """
    shipped = {file.read_bytes(): file.stem for file in sorted(SHIPPED.glob("*.toml"))}
    environments: list[Any] = []
    sweeps = []
    for folder in folders:
        asked = (folder / ASKED).read_bytes()
        if asked not in shipped:
            raise ValueError(f"{folder / ASKED} is not, or no longer, a shipped sweep")
        summary = json.loads((folder / "summary.json").read_text())
        try:
            store = " store" if "data" in summary["task"]["settings"] else ""
            environments += [e for e in summary["environments"] if e not in environments]
            sweeps.append(
                {
                    "command": f"dpsgd sweep {shipped[asked]}{store} --out {shipped[asked]}",
                    "title": summary["title"],
                    "setting": summary["setting"],
                    "insecure_seeds": summary["insecure_seeds"],
                    "results": [_point(cell) for cell in summary["cells"].values()],
                }
            )
        except KeyError as error:
            raise ValueError(
                f"{folder / 'summary.json'} has no {error}: the sweep's own command writes it anew"
            ) from None
    return {"note": note, "environments": environments, "sweeps": sweeps}


def _point(cell: dict[str, Any]) -> dict[str, Any]:
    """Returns a grid point, each metric as [mean, standard deviation]."""
    names = ("sampler", *AXES, "epsilon_lower", "epsilon_upper", "delta")
    where = {name: cell[name] for name in names if cell[name] is not None}
    metrics = {
        name: [_short(found["mean"]), _short(found["sd"])]
        for name, found in cell["metrics"].items()
        if not name.endswith("_num_examples")
    }
    return {**where, **metrics}


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 8)


def lines(found: dict[str, Any]) -> str:
    """Returns a record as JSON with a line for each grid point."""
    text = json.dumps(found, indent=1, allow_nan=False, ensure_ascii=False)
    for sweep in found["sweeps"]:
        for point in sweep["results"]:
            nested = json.dumps(point, indent=1, ensure_ascii=False).replace("\n", "\n    ")
            text = text.replace(nested, json.dumps(point, ensure_ascii=False))
    return text + "\n"


def run() -> int:
    """Writes the record."""
    config = tyro.cli(RecordConfig, prog="experiments.sweeps.record")
    text = lines(record(config.folders, config.note))
    write_atomically(config.out, lambda file: file.write(text.encode()))
    return 0


if __name__ == "__main__":
    raise SystemExit(in_one_line("experiments.sweeps.record", run))
