"""Tasks for tests: one with rows in a file, and one without metrics."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tiny_task import Line


@dataclass(frozen=True)
class Stored(Line):
    """The points of a line, kept in a file."""

    data: Path = field(kw_only=True)

    def columns(self):
        return dict(np.load(self.data))

    @staticmethod
    def write(path, seed):
        np.savez(path, **Line(seed=seed).columns())


@dataclass(frozen=True)
class Mute(Line):
    """A line without metrics and without a headline."""

    def metrics(self, params):
        return {}

    def describe(self):
        return {"width": self.width}
