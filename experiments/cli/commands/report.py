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
    """Write one self-contained HTML page, and its Markdown, about finished runs and sweeps.

    Figures, guarantees with their intervals, what they do not cover, the commands that do it again,
    versions and hardware.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories, and folders of sweeps."""
    out: Path = Path("report.html")
    """Page to write; its Markdown and figures go into a folder of the same name without .html."""
    overwrite: bool = False
    """Replace what is there under that name."""
    title: str = ""
    """Heading of the page; by default it says what is in it."""
    headline: str | None = None
    """Metric to show first, in place of each task's own."""
    better: Literal["higher", "lower"] | None = None
    """Which of its values are better."""


def run(config: ReportConfig) -> None:
    """Runs `dpsgd report`."""
    outputs.check(config.out, (".html",), "--out", overwrite=config.overwrite)
    folder = config.out.with_suffix("")
    for file in folder.iterdir() if folder.is_dir() else ():
        ours = file.name == MARKDOWN or file.suffix == ".svg"
        if not (ours and config.overwrite):
            raise FileExistsError(
                f"{folder}, where the Markdown and the figures of {config.out} belong, holds "
                f"{file.name}: name another --out{', or give --overwrite' if ours else ''}"
            )
    with Console() as console:
        console.progress("reading the runs and their guarantees")
        from dpsgd.runs.files import write_atomically
        from experiments.reports.html import document
        from experiments.reports.overview import overview

        page = overview(config.runs, config.title, config.headline, config.better)
        folder.mkdir(parents=True, exist_ok=True)
        files = {
            config.out: document(page).encode(),
            folder / MARKDOWN: page.markdown.encode(),
            **{folder / name: content for name, content in page.figures.items()},
        }
        for path, content in files.items():
            write_atomically(path, lambda file, content=content: file.write(content))  # type: ignore[misc]
        console.line(f"report: {config.out}; Markdown: {folder / MARKDOWN}")
