"""`dpsgd report`: finished runs and sweeps as one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from experiments.cli import outputs
from experiments.cli.console import Console

MARKDOWN = "report.md"


@dataclass(frozen=True)
class ReportConfig:
    """Write one self-contained HTML page about finished runs and sweeps.

    Figures, guarantees with their intervals, what they do not cover, the commands that do it again,
    versions and hardware.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories and folders of sweeps."""
    out: Path = Path("report.html")
    """Page to write."""
    markdown: Path | None = None
    """Folder for a Markdown version of the page with its figures."""
    overwrite: bool = False
    """Replace existing files."""
    title: str = ""
    """Heading of the page."""
    headline: str | None = None
    """Metric to show first. Default: the task's own."""
    better: Literal["higher", "lower"] | None = None
    """Direction in which the headline metric improves."""
    data: Path | None = None
    """Labelled rows, a store or a raw file, on which the calibration of click models is shown. The
    guarantees do not cover these rows."""
    split: Literal["train", "validation", "test"] = "test"
    """Split of a store to use."""
    by: str | None = None
    """Also show predicted and observed positives for the largest categories of this column."""
    against: Path | None = None
    """Non-private run of the same model (dpsgd train --non-private) to compare with."""


def run(config: ReportConfig) -> None:
    """Runs `dpsgd report`."""
    outputs.check(config.out, (".html",), "--out", overwrite=config.overwrite)
    folder = config.markdown
    for file in folder.iterdir() if folder and folder.is_dir() else ():
        ours = file.name == MARKDOWN or file.suffix == ".svg"
        if not (ours and config.overwrite):
            raise FileExistsError(
                f"{folder} holds {file.name}: name another --markdown"
                f"{', or give --overwrite' if ours else ''}"
            )
    for option, value in (("--by", config.by), ("--against", config.against)):
        if value is not None and config.data is None:
            raise ValueError(f"{option} is about labelled rows: name them with --data")
    with Console() as console:
        console.progress("reading the runs and their guarantees")
        from dpsgd.files import write_atomically
        from dpsgd.runs.fingerprint import origin
        from experiments.results.clicks import Rows
        from experiments.results.page import page
        from experiments.results.render import document

        rows = None
        if config.data is not None:
            split = config.split if config.data.is_dir() else None
            rows = Rows(config.data, split, config.by)
        found = page(
            config.runs,
            config.title,
            config.headline,
            config.better,
            origin=origin("Written"),
            rows=rows,
            against=config.against,
        )
        files = {config.out: document(found).encode()}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            files[folder / MARKDOWN] = found.markdown.encode()
            files |= {folder / name: content for name, content in found.figures.items()}
        for path, content in files.items():
            write_atomically(path, lambda file, content=content: file.write(content))  # type: ignore[misc]
        console.line(
            f"report: {config.out}" + (f"; Markdown: {folder / MARKDOWN}" if folder else "")
        )
