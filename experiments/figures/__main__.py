"""Command that draws one or all figures: `python -m experiments.figures NAME OUT`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsgd.files import write_atomically
from dpsgd.removed import removal_notice
from dpsgd.runs.report import escape
from dpsgd.runs.report import table as markdown_table
from experiments.cli import outputs
from experiments.cli.console import Console
from experiments.cli.errors import in_one_line, require
from experiments.cli.help import asked_of
from experiments.figures import FIGURES, Options

if TYPE_CHECKING:
    from experiments.results.points import Cells

PROGRAM = "scripts/figures"
ALL = "all"
INDEX = "index.html"
OF_RUNS = """## Figure 1 of the balls-and-bins paper

This figure shows training runs. Draw it from two sweeps: `dpsgd sweep criteo-display-small STORE
--out display`, the same with `criteo-search-small` and `--out search`, then
`dpsgd results display search --plot figure-1.png`.
"""


def run(words: Sequence[str]) -> int:
    """Draws the figure that the first word names.

    Raises:
      ValueError: If an option, the name or the picture's suffix is unknown.
    """
    listed = {**FIGURES, ALL: f"Every figure, into the folder OUT, with a page {INDEX}."}
    lines = "\n".join(f"  {name:13}  {text}" for name, text in listed.items())
    about = f"Draw a figure of the papers, and print its points.\n\nFigures:\n\n{lines}"
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        if notice := removal_notice("figures", option.removeprefix("--").replace("-", "_")):
            raise ValueError(f"{option} was {notice}")
    options = asked_of(Options, words or ["--help"], PROGRAM, about)
    if options.name not in listed:
        raise ValueError(f"unknown figure {options.name!r}; choose among {', '.join(listed)}")
    require("matplotlib")
    with Console() as console:
        if options.name == ALL:
            page_words = [word for word in words if word not in (ALL, str(options.out))]
            draw_all(options, console, " ".join(["", *page_words]))
        else:
            outputs.check(options.out, outputs.PICTURES, "OUT", overwrite=True)
            draw(options.name, options.out, options, console)
    return 0


def figure_of(name: str) -> Any:
    """Returns the module of a figure.

    >>> figure_of("delta").__name__
    'experiments.figures.delta'
    """
    return importlib.import_module(f"experiments.figures.{name}")


def draw(name: str, out: Path, options: Options, console: Console) -> list[str | Cells]:
    """Draws one figure; prints and returns its text and tables.

    The points are in the Parquet file beside the picture, and computed only if the code or the
    settings differ from that file's.

    Args:
      name: Name in `FIGURES`.
      out: Picture to write.
      options: Options of the command.
      console: Console for progress and text.
    """
    from experiments.figures.drawing import draw_layout, save
    from experiments.results.points import computed, pivot

    module = figure_of(name)
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.with_name(f"{out.name}.parquet")
    report = lambda line: console.progress(f"{name}: {line}")  # noqa: E731
    table = computed(module.compute, module.jobs(options), file, report)
    printed: list[str | Cells] = list(module.NOTES)
    if hasattr(module, "lines"):
        printed += module.lines(table)
    else:
        for (panel,), points in table.group_by("panel", maintain_order=True):
            printed += [str(panel), pivot(points.to_dicts())]
    for item in printed:
        console.line(item) if isinstance(item, str) else console.table(*item)
    picture = module.draw(table) if hasattr(module, "draw") else draw_layout(table, module.LAYOUT)
    save(picture, out)
    console.line(f"drawn: {out}; points: {file}")
    return [f"({table['seconds'].sum():.0f} s of CPU time)", *printed]


def draw_all(options: Options, console: Console, words: str = "") -> None:
    """Draws every figure, updating the folder's page after each.

    Args:
      options: Options of the command.
      console: Console for progress and text.
      words: Words of the command after the name, for the page.
    """
    from experiments.results.render import Page, document

    folder, title = options.out, "Figures of the papers"
    folder.mkdir(parents=True, exist_ok=True)
    sections: list[str] = []
    pictures: dict[str, bytes] = {}
    for name, description in FIGURES.items():
        picture = folder / f"{name}.svg"
        printed = draw(name, picture, options, console)
        texts = [
            escape(item) if isinstance(item, str) else markdown_table(*item) for item in printed
        ]
        heading = f"## {description}\n\n`{PROGRAM} {name}{words}`"
        sections.append("\n\n".join([heading, f"![{description}]({picture.name})", *texts]))
        pictures[picture.name] = picture.read_bytes()
        text = "\n\n".join([f"# {title}", *sections, OF_RUNS])
        page = document(Page(title, text, pictures)).encode()
        write_atomically(folder / INDEX, lambda file, page=page: file.write(page))  # type: ignore[misc]


def main(argv: Sequence[str] | None = None) -> int:
    """Draws a figure; prints usage errors in one line."""
    words = list(sys.argv[1:] if argv is None else argv)
    return in_one_line(PROGRAM, lambda: run(words))


if __name__ == "__main__":
    raise SystemExit(main())
