"""What figures computed, in files: of each job, so that long ones resume, and what was printed."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from dpsgd.files import write_atomically
from experiments.cli.console import Console
from experiments.figures.drawing import Picture, save
from experiments.processes import each

RECORDS = Path(__file__).parents[1] / "records"


def computed(
    compute: Callable[[Any], Any],
    jobs: Iterable[Any],
    progress: Callable[[str], None],
    record: Path | None = None,
) -> dict[Any, Any]:
    """Returns compute(job) by job: from a record where it has it, else on all processors.

    Args:
      compute: Pickled; results that are recorded go into JSON.
      jobs: Hashable; those that are recorded are tuples of numbers and words.
      progress: Called with one line of text after each new result.
      record: A line a job, which grows by each new result at once; None for none.
    """
    known = json.loads(record.read_text()) if record is not None and record.exists() else {}
    keys = {job: " ".join(map(str, job)) if record is not None else job for job in jobs}
    missing = [job for job, key in keys.items() if key not in known]
    if missing:
        progress(f"0 of {len(missing)}")
    for done, (job, found) in enumerate(zip(missing, each(compute, missing), strict=True), 1):
        known[keys[job]] = found
        progress(f"{done} of {len(missing)}")
        if record is not None:
            rows = (f"{json.dumps(key)}: {json.dumps(row)}" for key, row in known.items())
            _write(record, "{\n" + ",\n".join(rows) + "\n}\n")
    return {job: known[key] for job, key in keys.items()}


class _Notes(Console):
    """A console that keeps the lines and the tables that it prints."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str | dict[str, Any]] = []

    def line(self, text: str) -> None:
        super().line(text)
        self.shown.append(text)

    def table(self, header: list[str], rows: list[list[str]]) -> None:
        super().table(header, rows)
        self.shown.append({"header": header, "rows": rows})


def draw_recorded(draw: Callable[..., Figure], config: Picture, command: str) -> dict[str, Any]:
    """Draws a figure, and writes its record beside it, which is returned."""
    path, before = _path(config.out), _cpu_seconds()
    path.unlink(missing_ok=True)  # while it is there, the picture is what it says
    console = _Notes()
    with console:
        save(draw(config, console), config.out)
    seconds = round(_cpu_seconds() - before)
    record = {"command": command, "cpu_seconds": seconds, "shown": console.shown}
    _write(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return record


def record_of(picture: Path) -> dict[str, Any]:
    """Returns the record of a picture, an empty one where there is none."""
    path = _path(picture)
    return json.loads(path.read_text()) if path.exists() else {}


def _path(picture: Path) -> Path:
    return picture.with_name(f"{picture.name}.json")


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write(text.encode()))


def _cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of those that it waited for."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)
