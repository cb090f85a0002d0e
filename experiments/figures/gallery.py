"""Every figure of the papers in one folder, with a page of them all."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import tyro

from dpsgd.files import write_atomically
from dpsgd.runs.report import escape, table
from experiments.cli.console import Console
from experiments.figures import FIGURES, figure_of
from experiments.figures.drawing import save

INDEX = "index.html"
OF_RUNS = """## Figure 1 of the balls-and-bins paper

It is of training runs, from their sweeps: `dpsgd sweep criteo-display-small STORE --out display`,
so with `criteo-search-small`, and `dpsgd results display search --plot figure-1.png`.
"""


@dataclass(frozen=True)
class Gallery:
    """Draws every figure."""

    out: tyro.conf.Positional[Path]
    """Folder for a picture of each figure, and for `index.html`."""

    small: bool = False
    """Draw the small version of each figure."""

    keep: bool = False
    """Keep the figures that are in the folder already, drawn by the same command."""

    ratings: Path | None = None
    """`u.data` of MovieLens 100K, for figures of ratings; by default a synthetic population."""

    images: Path | None = None
    """NumPy archive of images x and labels y, for figures of images; by default the digits."""


class _Notes(Console):
    """A console that keeps, as Markdown, the lines and the tables that it prints."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[str] = []

    def line(self, text: str) -> None:
        super().line(text)
        self.kept.append(escape(text))

    def table(self, header: list[str], rows: list[list[str]]) -> None:
        super().table(header, rows)
        self.kept.append(table(header, rows))


def draw_all(gallery: Gallery, names: Sequence[str] = tuple(FIGURES)) -> None:
    """Draws the figures one after another; the page shows, after each, what there is so far.

    A field of `gallery` that a figure's configuration has, too, is passed on.
    """
    gallery.out.mkdir(parents=True, exist_ok=True)
    sections: dict[str, str] = {}
    for name in names:
        picture, notes = gallery.out / f"{name}.svg", gallery.out / f"{name}.md"
        kind, draw = figure_of(name)
        passed = {field.name for field in fields(kind)} & {field.name for field in fields(Gallery)}
        given = {field: getattr(gallery, field) for field in passed - {"out"}}
        given = {field: value for field, value in given.items() if value is not None}
        words = ["scripts/figures", name, *(["--small"] if gallery.small else [])]
        words += [f"--{field} {value}" for field, value in given.items()]
        heading = f"## {FIGURES[name]}\n\n`{' '.join(words)}`"
        if not (gallery.keep and picture.exists() and _begins(notes, heading)):
            notes.unlink(missing_ok=True)  # while it is there, the picture is what it says
            before = _cpu_seconds()
            console = _Notes()
            with console:
                config = kind(picture, **{**(kind.SMALL if gallery.small else {}), **given})
                save(draw(config, console), picture)
            spent = f"{_cpu_seconds() - before:.0f} s of CPU time"
            image = f"![{FIGURES[name]}]({picture.name})"
            _write(notes, "\n\n".join([f"{heading} ({spent})", image, *console.kept, ""]))
        sections[name] = notes.read_text()
        _write_index(gallery.out, sections)
        print(f"{len(sections)} of {len(names)}: {picture}")


def _begins(notes: Path, heading: str) -> bool:
    return notes.exists() and notes.read_text().startswith(f"{heading} (")


def _cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of those that it waited for."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def _write(path: Path, text: str) -> None:
    write_atomically(path, lambda file: file.write(text.encode()))


def _write_index(folder: Path, sections: dict[str, str]) -> None:
    from experiments.results.render import Page, document

    title = "Figures of the papers"
    pictures = {f"{name}.svg": (folder / f"{name}.svg").read_bytes() for name in sections}
    markdown = "\n\n".join([f"# {title}", *sections.values(), OF_RUNS])
    _write(folder / INDEX, document(Page(title, markdown, pictures)))
