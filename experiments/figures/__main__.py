"""Draws one figure: `python -m experiments.figures NAME OUT`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import get_type_hints

from experiments.cli import outputs
from experiments.cli.errors import in_one_line
from experiments.figures import FIGURES

PROGRAM = "scripts/figures"


def main(argv: Sequence[str] | None = None) -> int:
    """Draws a figure; what a user can mend ends in one clear line and exit status 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    return in_one_line(PROGRAM, lambda: run(words))


def run(words: Sequence[str]) -> int:
    """Draws the figure that is named first.

    Raises:
      ValueError: if there is none of that name, or the picture has no known ending.
    """
    name, *rest = words or ["--help"]
    if name in ("--help", "-h"):
        print(f"usage: {PROGRAM} NAME OUT ...\n")
        print("\n".join(f"  {name:13}  {what}" for name, what in FIGURES.items()))
        return 0
    if name not in FIGURES:
        raise ValueError(f"there is no figure {name!r}; there are {', '.join(FIGURES)}")
    import tyro

    module = importlib.import_module(f"experiments.figures.{name}")
    kind = get_type_hints(module.draw)["config"]
    config = tyro.cli(kind, prog=f"{PROGRAM} {name}", description=FIGURES[name], args=rest)
    outputs.check(config.out, outputs.PICTURES, "OUT", overwrite=True)
    from experiments.cli.console import Console
    from experiments.figures.drawing import save

    with Console() as console:
        save(module.draw(config, console), config.out)
        console.line(f"drawn: {config.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
