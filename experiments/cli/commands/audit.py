"""`dpsgd audit`: evidence against a claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dpsgd.gradients.rules import FLAT
from dpsgd.runs.spec import Auto, Dense
from experiments.cli import outputs, tasks
from experiments.cli.config import OfSizes
from experiments.cli.console import Console
from experiments.cli.options import naming, run_options
from samplers.settings import SETTINGS

if TYPE_CHECKING:
    from dpsgd.runs.resolve import ResolvedRun
    from samplers import BatchSampler


@dataclass(frozen=True, kw_only=True)
class Audit(tasks.OfTask, OfSizes):
    """Look for evidence that a run costs more privacy than its sampler's guarantee says.

    Without --black-box: seconds, the program that trains on neighbouring batches under equal noise,
    the noise's law and the sampler's. With it: minutes, a lower bound on epsilon from many whole
    runs.
    The exit status is 1 if a violation is found.

    --task NAME says whose step. Its rows are generated, so that nothing that is printed depends on
    private ones; a store is read for its columns alone.
    """

    claim: str | None = None
    """Test the run against the guarantee of this sampler in place of its own, for example shuffled
    batches against Poisson's guarantee."""
    black_box: bool = False
    """Compute a lower bound on epsilon from the outputs of whole training runs."""
    trials: int = 200_000
    """Runs of the black-box audit, in each of its two worlds."""
    plot: Path = Path("audit.png")
    """Figure of the black-box audit: .png, .pdf or .svg."""
    overwrite: bool = False
    """Replace an existing figure."""

    def claimed(self, run: ResolvedRun) -> BatchSampler | None:
        """Returns the sampler whose guarantee is claimed, if it is another one than the run's."""
        if self.claim is None:
            return None
        if self.claim not in SETTINGS:
            raise ValueError(f"--claim {self.claim}: there are {', '.join(SETTINGS)}")
        kind, drawn = SETTINGS[self.claim], run.spec.sampler
        both = {f.name for f in fields(kind)} & {f.name for f in fields(drawn)}
        both -= {"max_batch_size", "overflow"}  # chosen anew
        sampler = kind(**{name: getattr(drawn, name) for name in both})
        asked = replace(self, sampler=sampler)
        with naming(asked):
            return sampler.build(asked.population(drawn=True), run.delta)


def command(words: Sequence[str]) -> type:
    """Returns what can be asked of the task and the sampler that words name."""
    options = run_options(
        *("bands", "tables", "tables_momentum"),
        *("clipping", "clip_groups", "clip_shares", "clip_gamma"),
        *("train", "compute", "microbatch_size", "target_delta"),
        **{"noise_multiplier": MISSING, "l2_clip_norm": 1.0, "calibration": "none"},
    )
    return tasks.command(Audit, words, options=options, place=False)


def run(asked: Audit) -> int:
    """Runs `dpsgd audit`; the status is 1 if a violation was found."""
    spec, population = asked.spec(), asked.population(drawn=True)
    if isinstance(spec.tables, Auto):
        raise ValueError("--tables auto is what a run resolves by its rows: give dense or lazy")
    if asked.black_box:
        for option, is_asked in {
            "calibration": spec.calibration != "none",
            "tables": not isinstance(spec.tables, Dense),
            "clipping": spec.clipping != FLAT,
            "train": spec.train is not None,
            "compute": spec.compute != "float32",
        }.items():
            if is_asked:
                raise ValueError(
                    f"--black-box looks at dense steps alone: leave out --{option}, which the "
                    "audit without it looks at"
                )
        outputs.check(asked.plot, outputs.PICTURES, "--plot", overwrite=asked.overwrite)
    with Console() as console:
        console.progress("starting")
        from dpsgd.runs.resolve import resolved, with_noise
        from experiments.cli import audit

        task = tasks.without_data(asked)
        with naming(asked):
            found = resolved(with_noise(spec, task, population)[0], population)
        claimed = asked.claimed(found)
        if not asked.black_box:
            report = audit.coupled(task, found, claimed, console.progress)
            for line in report.lines():
                console.line(line)
            return 0 if report.passed else 1
        bound = audit.black_box(found, claimed, trials=asked.trials, progress=console.progress)
        from experiments.figures import black_box
        from experiments.figures.drawing import save

        save(black_box.draw(bound), asked.plot)
        for line in (*bound.lines(), f"plot: {asked.plot}"):
            console.line(line)
        return 1 if bound.violation else 0
