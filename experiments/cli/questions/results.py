"""Questions about many runs: `dpsgd results`, `report` and `sweep`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from accounting.records import Count, Ge, Lt
from experiments.cli import outputs
from experiments.cli.options import PLACE
from experiments.cli.questions import Drawn, Question, ReadsLedgers
from experiments.cli.questions.models import Split

TABLES = (".csv", ".parquet")
"""File endings of tables, which choose the format."""

MARKDOWN = "report.md"

Better = Literal["higher", "lower"]


@dataclass(frozen=True, kw_only=True)
class Results(ReadsLedgers, Drawn):
    """Print, export and draw the table of finished runs.

    A row is a run; columns are its settings, its guarantee, its metrics, its times and its digests.
    With --x and --y, one column is shown over another, as mean and standard error over the runs
    with equal values of all other settings, or of the settings that --by names. Each guarantee
    covers one run, and no choice among runs by this table.

    Attributes:
      runs: Run directories, folders of sweeps, folders that contain these, or .parquet tables that
        --out wrote.
      out: File for the whole table: .csv or .parquet.
      columns: Further columns to print, such as test_log_loss or examples_per_second.
      x: Column of the horizontal axis, such as noise_multiplier or epsilon_upper.
      y: Numerical column of the vertical axis. Default: the task's headline metric.
      by: Settings that distinguish lines. Default: all settings that differ, except x and seeds.
      plot: Figure to draw (.png, .pdf or .svg): --y over --x, or, without --x, the panels of
        sweeps.
      better: Direction in which --y improves, if it is not the task's headline metric.
    """

    runs: Annotated[tuple[Path, ...], PLACE]
    out: Path | None = None
    columns: tuple[str, ...] = ()
    x: str | None = None
    y: str | None = None
    by: tuple[str, ...] = ()
    better: Better | None = None

    def check(self) -> None:
        """Refuses unwritable files and a missing axis."""
        super().check()
        if self.out is not None:
            outputs.check(self.out, TABLES, "--out", overwrite=self.overwrite)
        if self.x is None and self.by:
            raise ValueError("--by needs --x, its axis")


@dataclass(frozen=True, kw_only=True)
class Shown(Question):
    """Base of questions whose results have a headline metric.

    Attributes:
      headline: Metric to show first. Default: the metric of the sweep file, or the task's own.
      better: Direction in which the headline metric improves.
    """

    headline: str | None = None
    better: Better | None = None


@dataclass(frozen=True, kw_only=True)
class Report(ReadsLedgers, Shown):
    """Write one self-contained HTML page about finished runs and sweeps.

    Figures, guarantees with their intervals and exclusions, the commands that repeat the runs,
    versions and hardware.

    Attributes:
      runs: Run directories and folders of sweeps.
      out: Page to write.
      markdown: Folder for a Markdown version of the page with its figures.
      overwrite: Replace existing files.
      title: Heading of the page.
      data: Labelled rows, a store or a raw file, on which the calibration of click models is shown.
        The guarantees do not cover these rows.
      split: Split of a store to use.
      by: Also show predicted and observed positives for the largest categories of this column.
      against: Non-private run of the same model (dpsgd train --non-private) to compare with.
    """

    runs: Annotated[tuple[Path, ...], PLACE]
    out: Path = Path("report.html")
    markdown: Path | None = None
    overwrite: bool = False
    title: str = ""
    data: Path | None = None
    split: Split = "test"
    by: str | None = None
    against: Path | None = None

    def check(self) -> None:
        """Refuses unwritable files and options without their rows."""
        super().check()
        outputs.check(self.out, (".html",), "--out", overwrite=self.overwrite)
        folder = self.markdown
        for file in folder.iterdir() if folder and folder.is_dir() else ():
            ours = file.name == MARKDOWN or file.suffix == ".svg"
            if not (ours and self.overwrite):
                raise FileExistsError(
                    f"{folder} holds {file.name}: name another --markdown"
                    f"{', or give --overwrite' if ours else ''}"
                )
        for option, value in (("--by", self.by), ("--against", self.against)):
            if value is not None and self.data is None:
                raise ValueError(f"{option} is about labelled rows: name them with --data")


@dataclass(frozen=True, kw_only=True)
class Sweep(Shown):
    """Train every run of a sweep file; write their table and figure.

    Started again, it resumes: no finished run is repeated. Each guarantee covers one run, and no
    choice among runs. The file is TOML:

        title = "AUC over the noise multiplier"
        repetitions = 3               # each from fresh entropy

        [task]                        # clicks by default
        name = "clicks"               # or another, or your own as "module:object"
        model = "small"               # and its settings, as `dpsgd train` has them

        [run]                         # other options that all runs share
        target_delta = 1e-6
        calibration = "platt"         # by default none; private runs alone have it

        [[grid]]                      # one or more; each is a panel of the figure
        x = "noise_multiplier"        # the axis of the panel
        sampler = ["shuffle", { name = "poisson", overflow = "accumulate" }]
        noise_multiplier = [0.3, 1.0, 3.0]
        non_private = true            # and once more without clipping and noise
        epochs = 5

    docs/how-to/sweeps.md has all keys, and docs/how-to/private-selection.md those of a file for
    --private, which releases one model and nothing else: the best of a random number of trials,
    with the guarantee of the whole.

    Attributes:
      config: Sweep file, or a shipped sweep: criteo-display-paper, criteo-display-small,
        criteo-search-paper, criteo-search-small, defaults, episodes, equal-noise-millions,
        equal-privacy, fixed-guarantee; with --private: private-selection.
      data: Data of the task, such as a store (see `dpsgd prepare`). Omit it for a task with data of
        its own.
      out: Folder of the sweep; an existing sweep is resumed.
      private: Release only the best of a random number of trials, and price the selection. Keep
        secret how long it takes, and the folder until it is finished.
      dry_run: Train nothing; print runs, steps, and hours estimated from a few timed steps; with
        --private also the guarantee, and the hours of a mean number of trials.
      insecure_seed: Make every run reproducible to the bit: repetition k has this seed plus k. No
        run has a guarantee. Default: fresh noise and draws from the operating system.
      workers: Number of runs at once, each with its share of the cores. Default: one per core on a
        CPU, else 1.
    """

    config: Annotated[Path, PLACE]
    data: Annotated[Path | None, PLACE] = None
    out: Path | None = None
    private: bool = False
    dry_run: bool = False
    insecure_seed: Annotated[int | None, Ge(0), Lt(2**32)] = None
    workers: Count | None = None

    def check(self) -> None:
        """Refuses a missing folder and options without --private selection."""
        if self.out is None and not self.dry_run:
            raise ValueError("--out is missing: name the folder of the sweep, or give --dry-run")
        if not self.private:
            return
        reasons = {
            "headline": "the file has a score",
            "better": "the file has a score",
            "insecure_seed": "its trials are secret",
            "workers": "trials run one after another",
        }
        for option, why in reasons.items():
            if getattr(self, option) is not None:
                flag = option.replace("_", "-")
                raise ValueError(f"--{flag} does not go with --private: {why}")
