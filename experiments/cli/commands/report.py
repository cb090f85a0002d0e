"""`dpsgd report`: finished runs and sweeps as one page."""

from __future__ import annotations

from dpsgd.files import write_atomically
from dpsgd.runs.environment import origin
from experiments.cli.console import Console
from experiments.cli.questions.results import MARKDOWN, Report
from experiments.results.clicks import Rows
from experiments.results.page import page
from experiments.results.render import document


def run(config: Report) -> None:
    """Runs `dpsgd report`."""
    folder = config.markdown
    with Console() as console:
        console.progress("reading the runs and their guarantees")
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
