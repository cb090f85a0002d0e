"""What a figure of ratings is asked for on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class RatingsFigure:
    """A picture of what ratings show."""

    out: tyro.conf.Positional[Path]
    """Picture to write, .png, .pdf or .svg."""
    ratings: Path | None = None
    """`u.data` of MovieLens 100K, gzipped or not; by default a synthetic population."""

    @classmethod
    def asked(cls, name: str, description: str) -> RatingsFigure:
        """Returns what the command line of `scripts/figures NAME` asks for."""
        return tyro.cli(cls, prog=f"scripts/figures {name}", description=description)
