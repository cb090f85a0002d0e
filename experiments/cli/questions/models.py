"""Questions about trained models: `dpsgd evaluate`, `score` and `export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from experiments.cli.options import PLACE
from experiments.cli.questions import OfRun, Question

OTHER_FORMATS = (".parquet", ".feather", ".arrow", ".json", ".jsonl", ".tsv", ".xlsx", ".zip")
"""File endings of formats other than CSV."""

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True, kw_only=True)
class OfModel(Question):
    """Base of questions about a model's predictions for rows.

    Attributes:
      model: Exported model, or directory of a finished run.
      data: Rows in the format of the model's task. For clicks: a raw file (or .gz) or a store.
      split: Split of a store. Default: all rows.
      task: Task of the model as module:object, if no installed package has it.
    """

    model: Annotated[Path, PLACE]
    data: Annotated[Path, PLACE]
    split: Split | None = None
    task: str | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluate(OfModel):
    """Compare the predictions of a model for labelled rows, raw or prepared, with their labels.

    Attributes:
      deciles: For a model of clicks, also print predicted and observed clicks per decile of the
        prediction.
      by: Also print predicted and observed clicks for the largest categories of this column.
      against: Non-private model (dpsgd train --non-private) to compare with.
    """

    deciles: bool = False
    by: str | None = None
    against: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Score(OfModel):
    """Write the predictions of a model for the rows of a file, in their order, as CSV.

    Attributes:
      out: File to create: a header, then one line per row; compressed if it ends in .gz.
      key: Column to copy beside each prediction, such as an identifier; it need not be a feature.
    """

    out: Path
    key: str | None = None

    def check(self) -> None:
        """Refuses file endings of other formats."""
        if self.out.suffix in OTHER_FORMATS:
            raise ValueError(
                f"--out {self.out}: predictions are written as CSV; end the name in .csv or .csv.gz"
            )


@dataclass(frozen=True, kw_only=True)
class Export(OfRun):
    """Write the model and the guarantee of a finished run, and nothing else, to a new folder.

    Attributes:
      out: Folder to create.
      task: Task of the run as module:object, if the run directory does not name it.
    """

    out: Annotated[Path, PLACE]
    task: str | None = None
