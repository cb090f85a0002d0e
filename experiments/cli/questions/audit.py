"""Questions about evidence: `dpsgd audit`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, ClassVar

from accounting.records import Count
from dpsgd.gradients.rules import FLAT
from dpsgd.runs.spec import Adam, Auto, Dense
from experiments.cli.questions import Drawn
from experiments.cli.questions.about_runs import OfSizes, OfTask, run_options
from experiments.cli.tasks import load_kind


@dataclass(frozen=True, kw_only=True)
class Audit(OfSizes, OfTask, Drawn):
    """Look for evidence that a run costs more privacy than its guarantee says.

    Without --black-box, the audit takes seconds: it runs the training program on neighbouring
    batches with the same noise, and tests the distributions of the noise and of the sampler. With
    --black-box it takes minutes: it computes a lower bound on epsilon from many training runs. The
    exit status is 1 if a violation is found.

    The step of the task is audited on generated rows: no output depends on private rows, and only
    the columns of a store are read.

    Attributes:
      claim: Sampler whose guarantee the run is tested against; for example poisson, for shuffled
        batches. Default: the run's own sampler.
      black_box: Compute a lower bound on epsilon from the outputs of whole training runs.
      trials: Runs of the black-box audit, in each of its two worlds.
      plot: Figure of the black-box audit: .png, .pdf or .svg.
    """

    claim: str | None = None
    black_box: bool = False
    trials: Count = 200_000
    plot: Path | None = Path("audit.png")

    PLACED: ClassVar[bool] = False

    @classmethod
    def offered(cls) -> dict[str, Any]:
        """Returns run options that change the program or draws."""
        return run_options(
            *("noise", "bands", "tables", "clipping", "clip_groups", "optimizer"),
            *("train", "compute", "microbatch_size", "target_delta"),
            **{"noise_multiplier": MISSING, "l2_clip_norm": 1.0, "calibration": "none"},
        )

    def check(self) -> None:
        """Refuses runs that the audit does not support."""
        spec = self.spec
        if self.claim is not None:
            load_kind("sampler", self.claim, "claim")
        if isinstance(spec.tables, Auto):
            raise ValueError("--tables auto is resolved by the rows of a run; give dense or lazy")
        if not self.black_box:
            return
        for option, is_asked in {
            "calibration": spec.calibration != "none",
            "tables": not isinstance(spec.tables, Dense),
            "clipping": spec.clipping != FLAT,
            "optimizer": spec.optimizer != Adam(),
            "train": spec.train is not None,
            "compute": spec.compute != "float32",
        }.items():
            if is_asked:
                raise ValueError(
                    f"--black-box audits dense steps alone; leave out --{option}, or --black-box"
                )
        super().check()
