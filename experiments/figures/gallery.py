"""Gallery of all figures in one folder, with a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import tyro

from dpsgd.files import write_atomically
from dpsgd.runs.report import escape, table
from experiments.figures import FIGURES, figure_of
from experiments.figures.records import draw_recorded, record_of

INDEX = "index.html"
OF_RUNS = """## Figure 1 of the balls-and-bins paper

It is of training runs, from their sweeps: `dpsgd sweep criteo-display-small STORE --out display`,
so with `criteo-search-small`, and `dpsgd results display search --plot figure-1.png`.
"""


@dataclass(frozen=True)
class Gallery:
    """Draws every figure."""

    out: tyro.conf.Positional[Path]
    """Folder for a picture of each figure with its record, and for `index.html`."""

    small: bool = False
    """Draw the small version of each figure."""

    keep: bool = False
    """Keep the figures that are in the folder already, drawn by the same command."""

    ratings: Path | None = None
    """`u.data` of MovieLens 100K, for figures of ratings; by default a synthetic population."""

    images: Path | None = None
    """NumPy archive of images x and labels y, for figures of images; by default the digits."""

    num_classes: int | None = None
    """Classes of that archive."""


def draw_all(gallery: Gallery, names: Sequence[str] = tuple(FIGURES)) -> None:
    """Draws the figures in turn, and updates the page after each.

    Fields of `gallery` that a figure's configuration has are passed on.
    """
    gallery.out.mkdir(parents=True, exist_ok=True)
    sections: list[str] = []
    pictures: dict[str, bytes] = {}
    for name in names:
        picture, (kind, draw) = gallery.out / f"{name}.svg", figure_of(name)
        passed = {field.name for field in fields(kind)} & {field.name for field in fields(Gallery)}
        options = {field: getattr(gallery, field) for field in passed - {"out"}}
        options = {field: value for field, value in options.items() if value is not None}
        words = ["scripts/figures", name, *(["--small"] if gallery.small else [])]
        command = " ".join(
            [*words, *(f"--{field.replace('_', '-')} {value}" for field, value in options.items())]
        )
        record = record_of(picture) if gallery.keep and picture.exists() else {}
        if record.get("command") != command:
            config = kind(picture, **{**(kind.SMALL if gallery.small else {}), **options})
            record = draw_recorded(draw, config, command)
        texts = [
            escape(text) if isinstance(text, str) else table(text["header"], text["rows"])
            for text in record["shown"]
        ]
        heading = f"## {FIGURES[name]}\n\n`{command}` ({record['cpu_seconds']} s of CPU time)"
        sections.append("\n\n".join([heading, f"![{FIGURES[name]}]({picture.name})", *texts]))
        pictures[picture.name] = picture.read_bytes()
        _write_index(gallery.out, sections, pictures)
        print(f"{len(sections)} of {len(names)}: {picture}")


def _write_index(folder: Path, sections: list[str], pictures: dict[str, bytes]) -> None:
    from experiments.results.render import Page, document

    title = "Figures of the papers"
    page = document(Page(title, "\n\n".join([f"# {title}", *sections, OF_RUNS]), pictures))
    write_atomically(folder / INDEX, lambda file: file.write(page.encode()))
