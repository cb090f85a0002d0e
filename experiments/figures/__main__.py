"""Command that draws one or all figures: `python -m experiments.figures NAME OUT`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli import outputs
from experiments.cli.errors import in_one_line, require
from experiments.figures import FIGURES, figure_of

PROGRAM = "scripts/figures"
ALL = "all"


def main(argv: Sequence[str] | None = None) -> int:
    """Draws a figure; errors of use end in one line and exit status 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    return in_one_line(PROGRAM, lambda: run(words))


def run(words: Sequence[str]) -> int:
    """Draws the figure named by the first word.

    Raises:
      ValueError: If the name or the picture's suffix is unknown.
    """
    name, *options = words or ["--help"]
    if name in ("--help", "-h"):
        print(f"usage: {PROGRAM} NAME [--small] OUT ...\n")
        listed = {**FIGURES, ALL: "Every figure, into the folder OUT, with a page of them."}
        print("\n".join(f"  {name:13}  {description}" for name, description in listed.items()))
        return 0
    if name not in (*FIGURES, ALL):
        raise ValueError(f"unknown figure {name!r}; choose among {', '.join(FIGURES)}")
    require("matplotlib")
    import tyro

    if name == ALL:
        from experiments.figures.gallery import Gallery, draw_all

        draw_all(tyro.cli(Gallery, prog=f"{PROGRAM} {ALL}", args=options))
        return 0
    kind, draw = figure_of(name)
    small = {"default": kind(Path(), **kind.SMALL)} if "--small" in options else {}
    config = tyro.cli(
        kind,
        prog=f"{PROGRAM} {name}",
        description=f"{FIGURES[name]} With --small, a small version.",
        args=[word for word in options if word != "--small"],
        **small,
    )
    outputs.check(config.out, outputs.PICTURES, "OUT", overwrite=True)
    from experiments.figures.records import draw_recorded

    draw_recorded(draw, config, " ".join([PROGRAM, *words]))
    print(f"drawn: {config.out}, and what it says: {config.out}.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
