"""Short record of finished sweeps: `python -m experiments.sweeps.record OUT FOLDER...`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tyro

from dpsgd.files import write_atomically
from experiments.cli.errors import in_one_line
from experiments.results.table import AXES
from experiments.results.views import Point
from experiments.sweeps import engine
from experiments.sweeps.config import SHIPPED


def record(folders: Sequence[Path], note: str = "") -> dict[str, Any]:
    """Returns the environments, commands and points of finished sweeps.

    Args:
      folders: Folders of finished sweeps, each of a shipped file.
      note: Note for readers, such as the rows or the machine.

    Raises:
      ValueError: For a sweep whose file is not a current shipped one.
      OSError: For a folder without a finished sweep.
    """
    shipped = {file.read_bytes(): file.stem for file in sorted(SHIPPED.glob("*.toml"))}
    environments: list[Any] = []
    sweeps = []
    for folder in folders:
        content = (folder / engine.ASKED).read_bytes()
        if content not in shipped:
            raise ValueError(f"{folder / engine.ASKED} is not, or no longer, a shipped sweep")
        summary, name = engine.read(folder), shipped[content]
        store = " store" if "data" in summary.task["settings"] else ""
        environments += [e for e in summary.environments if e not in environments]
        points = {point.rows[0]["run"]: point for view in summary.views for point in view.points}
        metrics = dict.fromkeys(
            name for v in summary.views for name in (v.judge.name, v.headline.name)
        )
        sweeps.append(
            {
                "command": f"dpsgd sweep {name}{store} --out {name}",
                "title": summary.sweep.title,
                "setting": summary.setting,
                "insecure_seeds": list(summary.sweep.insecure_seeds),
                "runs": len(summary.table.rows),
                "results": [_result(point, metrics) for point in points.values()],
            }
        )
    return {"note": note, "environments": environments, "sweeps": sweeps}


def _result(point: Point, metrics: Iterable[str]) -> dict[str, Any]:
    """Returns a point's settings and guarantee, with metrics as [mean, standard deviation]."""
    row, bound = point.rows[0], point.epsilon
    sampler = f"{row['sampler']} {row['sampler_settings']}".strip()
    values = {"sampler": sampler, **{name: row[name] for name in AXES}}
    values |= {"optimistic": True} if point.optimistic else {}
    values |= {"epsilon_lower": bound and bound.lower, "epsilon_upper": bound and bound.upper}
    values |= {"noise_multiplier": point.noise_multiplier, "delta": row["delta"]}
    result = {name: value for name, value in values.items() if value is not None}
    for name in metrics:
        mean_and_sd = point[name].mean, point[name].sd
        result[name] = [x if x is None else round(x, 8) for x in mean_and_sd]
    return result


def lines(found: dict[str, Any]) -> str:
    """Returns a record as JSON with a line for each point."""
    text = json.dumps(found, indent=1, allow_nan=False, ensure_ascii=False)
    for sweep in found["sweeps"]:
        for point in sweep["results"]:
            nested = json.dumps(point, indent=1, ensure_ascii=False).replace("\n", "\n    ")
            text = text.replace(nested, json.dumps(point, ensure_ascii=False))
    return text + "\n"


def main(
    out: tyro.conf.Positional[Path], folders: tyro.conf.Positional[tuple[Path, ...]], note: str = ""
) -> int:
    """Write the results of shipped sweeps into one file that is small enough to be kept.

    Args:
      out: File to write, .json.
      folders: Folders of finished sweeps, each of a shipped file.
      note: What else a reader should know: which rows, which machine.
    """
    text = lines(record(folders, note))
    write_atomically(out, lambda file: file.write(text.encode()))
    return 0


if __name__ == "__main__":
    program = "experiments.sweeps.record"
    raise SystemExit(in_one_line(program, lambda: tyro.cli(main, prog=program)))
