"""Demo: prepares data, trains with every sampler, compares the guarantees."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import dpsgd
from dpsgd.runs import report
from experiments.cli.console import Console
from experiments.cli.errors import in_one_line
from experiments.cli.help import asked_of
from experiments.cli.options import PLACE
from experiments.tasks.clicks.formats import DISPLAY
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.clicks.task import Clicks
from samplers.settings import SETTINGS

COMPARED = ("deterministic", "shuffle", "poisson", "balls-and-bins")
METRICS = ("test_auc", "test_log_loss", "test_predicted_over_observed")


@dataclass(frozen=True)
class Demo:
    """Train one click model with every sampler at equal noise; compare the guarantees.

    Attributes:
      source: Raw Criteo Display Ads file (train.txt or .gz). Default: synthetic rows.
      noise_multiplier: Noise multiplier of every run.
      batch_size: Expected batch size.
      epochs: Number of passes over the training rows.
      rows: Number of synthetic rows to generate.
      out: Folder for the store and the runs. Default: a new temporary folder, which is kept.
    """

    source: Annotated[Path | None, PLACE] = None
    noise_multiplier: float = 0.5
    batch_size: int = 1024
    epochs: int = 4
    rows: int = 120_000
    out: Path | None = None


def main(argv: list[str] | None = None) -> int:
    """Runs the demo; prints bad input's error in one line."""
    words = sys.argv[1:] if argv is None else argv
    return in_one_line("scripts/demo", lambda: run(asked_of(Demo, words, "scripts/demo")))


def run(demo: Demo) -> int:
    """Prepares data, trains with every sampler, prints a table."""
    out = demo.out or Path(tempfile.mkdtemp(prefix="dpsgd-demo-"))
    with Console() as console:
        rows = "the rows of your file" if demo.source else f"{demo.rows:,} synthetic rows"
        minutes = "" if demo.source else ": one to two minutes on two cores"
        console.line(
            f"trains one click model on {rows} with {len(COMPARED)} samplers at equal noise, each "
            f"audited first, and compares their guarantees{minutes}"
        )
        source = demo.source
        if source is None:
            source = out / "train.txt"
            console.progress(f"making {demo.rows:,} synthetic rows in Criteo's format")
            summary = synthetic.write_raw(source, demo.rows, seed=0)
            console.line(
                f"{summary.rows:,} synthetic rows in {source}; the best reachable AUC on them is "
                f"{summary.bayes_auc:.4f}"
            )
        console.progress("preparing the store")
        store = DISPLAY.prepare(source, out / "store")
        console.line(f"{store.num_rows:,} rows prepared in {out / 'store'}")
        task, records = Clicks(out / "store"), []
        for name in COMPARED:
            console.line(f"training with the {name} sampler")
            sampler = SETTINGS[name](batch_size=demo.batch_size, epochs=demo.epochs)
            # Only the samplers are compared, without calibration.
            noise = dpsgd.NoiseMultiplier(demo.noise_multiplier)
            spec = dpsgd.RunSpec(sampler, noise, calibration="none")
            records.append(dpsgd.run(task, spec, out / name, name="clicks", progress=console.tell))
        header, table_rows, caption = report.comparison(records, METRICS)
        console.table(header, table_rows)
        console.line(caption)
        console.line(choice(records))
        for note in dict.fromkeys(note for record in records for note in record["notes"]):
            console.line(f"- {note}")
        console.line(f"reports: {out}/*/report.md")
    return 0


def choice(records: Sequence[dict[str, Any]]) -> str:
    """Returns which sampler to choose, by the epsilon that is proved of each at equal noise."""
    proved = [record for record in records if record["epsilon_upper"] is not None]
    if not proved:
        return "No sampler has a guarantee at this noise: choose more of it."
    best = min(proved, key=lambda record: record["epsilon_upper"])
    return (
        f"Choose {best['sampler']}: at equal noise its proved epsilon is the smallest, "
        f"{report.guaranteed(best)}. The AUC of one run each differs by chance as well."
    )


if __name__ == "__main__":
    sys.exit(main())
