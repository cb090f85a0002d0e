"""Records beside a picture: its computed points, and its printed tables.

A record names the code that computed it and seals its content, so that other code, or an edit,
computes it again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
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

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "experiments" / "records"
"""Measurements that ship with the package; figures only read them."""
PACKAGES = ("accounting", "samplers", "dpsgd", "experiments")
"""Folders under `ROOT` whose sources decide a figure's numbers."""
LIBRARIES = ("numpy", "scipy", "jax", "matplotlib")
"""Distributions whose versions decide a figure's numbers."""


@functools.cache
def code_digest() -> str:
    """Returns the SHA-256 of all sources and versions behind a figure."""
    digest = hashlib.sha256()
    for path in sorted(file for name in PACKAGES for file in (ROOT / name).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)} {len(content)}\n".encode() + content)
    for name in LIBRARIES:
        digest.update(f"{name} {importlib.metadata.version(name)}\n".encode())
    return digest.hexdigest()


def computed(
    compute: Callable[[Any], Any],
    jobs: Iterable[Any],
    progress: Callable[[str], None],
    picture: Path | None = None,
) -> dict[Any, Any]:
    """Returns compute(job) by job, on all processors.

    Args:
      compute: Function of a module, pickled; its recorded results go into JSON.
      jobs: Hashable arguments; recorded ones are tuples of numbers and words.
      progress: Function of one line of text, called after each new result.
      picture: Picture drawn from the results. `PICTURE.points.json` stores each new result at once,
        and serves a later call of the same code. None records nothing.
    """
    record = picture and picture.with_name(f"{picture.name}.points.json")
    name = f"{compute.__module__}.{compute.__qualname__}" if record else ""
    sealed = _read(record) if record else {}
    results = sealed["points"] if sealed.get("computed_by") == name else {}
    keys = {job: " ".join(map(str, job)) if record else job for job in jobs}
    missing = [job for job, key in keys.items() if key not in results]
    if missing:
        progress(f"0 of {len(missing)}")
    for count, (job, result) in enumerate(zip(missing, each(compute, missing), strict=True), 1):
        results[keys[job]] = result
        progress(f"{count} of {len(missing)}")
        if record:
            _write(record, {"computed_by": name, "points": results})
    return {job: results[key] for job, key in keys.items()}


class _Notes(Console):
    """Console that records its printed lines and tables."""

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
    """Draws a figure, and writes and returns its record."""
    path, start = _path(config.out), _cpu_seconds()
    path.unlink(missing_ok=True)  # a record is valid for its picture only
    console = _Notes()
    with console:
        save(draw(config, console), config.out)
    seconds = round(_cpu_seconds() - start)
    record = {"command": command, "cpu_seconds": seconds, "shown": console.shown}
    _write(path, record)
    return record


def record_of(picture: Path) -> dict[str, Any]:
    """Returns the record of a picture, empty without one of this code."""
    return _read(_path(picture))


def _path(picture: Path) -> Path:
    return picture.with_name(f"{picture.name}.json")


def _seal(record: dict[str, Any]) -> str:
    text = json.dumps([code_digest(), record], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _write(path: Path, record: dict[str, Any]) -> None:
    sealed = {**record, "seal": _seal(record)}
    text = json.dumps(sealed, indent=1, ensure_ascii=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def _read(path: Path) -> dict[str, Any]:
    """Returns a record, empty if it is absent, damaged, edited or of other code."""
    try:
        record = json.loads(path.read_bytes())
        seal = record.pop("seal")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}
    return record if seal == _seal(record) else {}


def _cpu_seconds() -> float:
    """Returns the CPU seconds of this process and its finished children."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in usages)
