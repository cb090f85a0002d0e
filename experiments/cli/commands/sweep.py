"""`dpsgd sweep`: many runs from one file, and what they show together."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from experiments.cli.console import Console

if TYPE_CHECKING:
    from experiments.results.views import View
    from experiments.sweeps.config import Sweep

DEVICES = (1, 2, 4, 8, 64)
"""Counts for which `--dry-run` says the hours."""


@dataclass(frozen=True)
class SweepConfig:
    """Carry out every run that a file asks for; write their table and figure.

    Started again, it resumes: no finished run is repeated. The guarantees are those of
    single runs; a choice among them is not covered. The file is TOML:

        title = "AUC over the noise multiplier"
        repetitions = 3               # each from entropy of its own

        [task]                        # what is trained: by default the clicks
        name = "clicks"               # or another, or your own as "module:object"
        model = "small"               # and its settings, as `dpsgd train` has them

        [run]                         # what else all runs share, likewise
        target_delta = 1e-6
        calibration = "platt"         # by default none; private runs alone have it

        [[grid]]                      # one or more; each is a panel of the figure
        x = "noise_multiplier"        # the axis of the panel
        sampler = ["shuffle", { name = "poisson", overflow = "accumulate" }]
        noise_multiplier = [0.3, 1.0, 3.0]
        non_private = true            # and once more without clipping and noise
        epochs = 5

    A grid's axes are noise_multiplier or target_epsilon, batch_size, epochs, learning_rate,
    l2_clip_norm, bands (over which noise is correlated: of use with optimizer = "sgd" in [run])
    and other options of a run, each with one value or a list: its runs are all combinations.
    With `tune = "learning_rate"`, or several axes in a list, each point shows the values that are
    best together on the validation rows. Grids with the same title share a panel.
    Figure and tables show the task's own metric first; the top of the file names another one by
    headline = "test_log_loss" and better = "lower".

    With --private, one model is released and nothing else: the best of a random number of trials,
    each a random candidate of the grids, with the guarantee of the whole. Then the top of the file
    has target_epsilon, which is of the whole, and, where the defaults will not do, mean_trials
    (10), trials_shape (0), and score (by default the headline on the validation rows); a [[grid]]
    has any settings of a run, each with one value or a list; and there are no repetitions. How many
    trials there are is a secret, and so is how long they take: do not show the times, nor the
    folder before it is finished.
    """

    config: tyro.conf.Positional[Path]
    """Sweep file, or a shipped sweep: criteo-display-paper, criteo-display-small,
    criteo-search-paper, criteo-search-small, defaults, episodes, equal-noise-millions,
    equal-privacy, fixed-guarantee; with --private: private-selection."""
    data: tyro.conf.Positional[Path | None] = None
    """Data of the task, such as a store (see `dpsgd prepare`). Omit it for a task with data of its
    own."""
    out: Path | None = field(default=None, kw_only=True)
    """Folder of the sweep; an existing sweep is resumed."""
    headline: str | None = None
    """Metric to show. Default: the file's or the task's own."""
    better: Literal["higher", "lower"] | None = None
    """Direction in which the headline metric improves."""
    private: bool = False
    """Release only the best of a random number of trials, and price the selection."""
    dry_run: bool = False
    """Train nothing; print runs, steps, and hours estimated from a few timed steps."""
    workers: int | None = None
    """Number of runs at once, each with its share of the cores. Default: one per core on a CPU,
    else 1."""


def run(config: SweepConfig) -> None:
    """Runs `dpsgd sweep`."""
    if config.private:
        return _select(config)
    from experiments.sweeps.config import Sweep, file_of

    file = file_of(config.config)
    asked = file.read_bytes()
    sweep = Sweep.parse(asked, str(file))
    if config.out is None and not config.dry_run:
        raise ValueError("--out is missing: name the folder of the sweep, or give --dry-run")
    with Console() as console:
        console.progress("starting")
        from experiments.sweeps.engine import run_sweep, write

        if config.out is None or config.dry_run:
            return _forecast(config, sweep, console)

        summary = run_sweep(
            sweep,
            config.data,
            config.out,
            where=str(config.config),
            workers=config.workers,
            progress=console.progress,
        ).showing(config.headline, config.better)
        written = write(summary, config.out, asked)
        console.line(summary.setting)
        for view in summary.views:
            if view.title:
                console.line(f"\n{view.title}")
            show_view(console, view)
        console.line("")
        for statement in summary.statements:
            console.line(f"- {statement}")
        console.line(f"written: {', '.join(map(str, written))}")


def _forecast(config: SweepConfig, sweep: Sweep, console: Console) -> None:
    """Prints what a sweep is going to take."""
    from experiments.sweeps.engine import forecast

    where, workers = str(config.config), config.workers
    how: dict[str, Any] = {"where": where, "workers": workers, "progress": console.progress}
    found, device = forecast(sweep, config.data, **how)
    header = ["", "runs", "steps", *(f"hours on {count}" for count in DEVICES)]
    console.table(
        header,
        [
            [part.title, f"{part.runs:,}", f"{part.steps:,}"]
            + [f"{part.hours(count):.3g}" for count in DEVICES]
            for part in found
        ],
    )
    console.line(
        f"Hours of training on so many devices like the one that was timed, {device}, each with a "
        "run at a time; compiling, audits and evaluations come on top."
    )


def show_view(console: Console, view: View) -> None:
    """Prints the tables of a view of runs, and which line is best."""
    for title, table in view.tables().items():
        console.line(f"\n{title}")
        console.table(*table)
    for verdict in view.verdicts():
        console.line(f"best {verdict}")


def _select(config: SweepConfig) -> None:
    """Runs `dpsgd sweep --private`."""
    if config.out is None or config.dry_run:
        raise ValueError("--private needs --out, and has no --dry-run: its trials are random")
    for option in ("headline", "better", "workers"):
        if getattr(config, option) is not None:
            why = "trials run one after another" if option == "workers" else "the file has a score"
            raise ValueError(f"--{option} does not go with --private: {why}")
    from experiments.sweeps import private
    from experiments.sweeps.config import file_of

    where = str(config.config)
    asked = file_of(config.config, private.SHIPPED).read_bytes()
    sweep = private.PrivateSweep.parse(asked, where)
    with Console(timed=False) as console:  # how long it takes tells how many trials there are
        console.progress("starting")
        import dpsgd
        from dpsgd.files import write_atomically
        from experiments.cli.commands.train import show
        from experiments.sweeps.engine import ASKED, task_of

        task = task_of(sweep, config.data, where)
        score, better = sweep.scored(task, where)
        record = dpsgd.select(
            task,
            sweep.candidates(where),
            config.out,
            score=score,
            better=better,
            count=sweep.count,
            name=sweep.task_name,
            progress=console.progress,
        )
        write_atomically(config.out / ASKED, lambda file: file.write(asked))
        show(console, config.out, record)
