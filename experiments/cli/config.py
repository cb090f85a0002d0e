"""What a user asks for: typed, frozen, and the help of a command line that is not needed here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from dpsgd.runs.sampling import BallsAndBins, Deterministic, Poisson, Shuffle  # noqa: F401
from experiments.cli.errors import naming_options
from experiments.tasks.clicks.sizes import PRESETS, ModelConfig
from samplers import BatchSampler, Population, TreeShape, UnitTree
from samplers.settings import SETTINGS as SAMPLERS
from samplers.settings import SamplerSettings

_T = TypeVar("_T")


def check_default_batch_size(batch_size: int, num_examples: int) -> None:
    """Raises ValueError if the default is a larger batch than there are examples."""
    if 1 <= num_examples < batch_size == SAMPLERS["poisson"].batch_size:
        raise ValueError(
            f"--batch-size is {batch_size} by default, which is more than the {num_examples} "
            "training examples: give a smaller one"
        )


def check_noise(noise_multiplier: float) -> None:
    """Raises ValueError, as the command line names it, for noise that has no price."""
    if not 0 < noise_multiplier < float("inf"):
        raise ValueError(
            f"--noise-multiplier must be finite and > 0, got {noise_multiplier}; without noise "
            "there is no guarantee"
        )


def _given(value: _T | None, default: _T) -> _T:
    return default if value is None else value


@dataclass(frozen=True)
class TrainConfig:
    """The whole of a run: which data, which sampler, what noise, which model."""

    data: Path
    """Store of prepared examples (see `dpsgd prepare`)."""
    sampler: SamplerSettings
    """How batches are drawn; this decides what the run costs in privacy."""
    out: Path
    """Run directory to create; an existing one is never touched."""
    noise_multiplier: float | None = None
    """Noise standard deviation over l2_clip_norm; give this or target_epsilon."""
    target_epsilon: float | None = None
    """Choose the smallest noise multiplier whose certified epsilon is at most this."""
    target_delta: float | None = None
    """Delta of the guarantee; by default 1 / number of training examples."""
    non_private: bool = False
    """Train without clipping and noise: no guarantee."""
    l2_clip_norm: float = 4.0
    """Bound on the L2 norm of one example's gradient."""
    secure_noise: bool = False
    """Exact integer sums and exact noise from a cryptographic generator: the guarantee then holds
    for the floating-point program too. Slower: each example's gradient is formed by itself."""
    learning_rate: float = 3e-3
    """Peak step size of Adam, decayed to zero by a cosine."""
    model: Literal["small", "paper"] = "small"
    """Preset of model sizes: for a CPU, or the papers' (about 85 million parameters)."""
    embedding_dim: int | None = None
    """Override the preset's embedding length."""
    max_buckets: int | None = None
    """Override the preset's hash buckets per feature; a power of two."""
    hidden: tuple[int, ...] | None = None
    """Override the preset's hidden layers."""
    microbatch_size: int | None = None
    """Examples whose gradients are formed together; by default as many as fit in 2 GiB."""
    checkpoint_seconds: float = 120.0
    """Time between checkpoints, from which `dpsgd resume` goes on."""
    data_on: Literal["device", "host"] | None = None
    """Where the training rows lie; on the host, those of a block of steps travel with it. By
    default on the device, unless they would take more than half of its free memory."""
    init_seed: int = 0
    """Seed of the initial parameters, which are public."""
    insecure_seed: int | None = None
    """Reproducible sampling and noise from this number, for debugging: voids the guarantee."""
    audit: bool = True
    """Check first, on generated rows, that the step and the sampler keep what the price assumes
    (seconds); refuse to train where they do not."""

    def check(self) -> None:
        """Raises ValueError, as the command line names them, for values that cannot be run."""
        asked = [self.noise_multiplier is not None, self.target_epsilon is not None]
        if sum(asked) + self.non_private != 1:
            raise ValueError(
                "give exactly one of --noise-multiplier, --target-epsilon and --non-private"
            )
        if self.noise_multiplier is not None and not 0 < self.noise_multiplier < float("inf"):
            raise ValueError(
                f"--noise-multiplier must be finite and > 0, got {self.noise_multiplier}; "
                "a run without noise has no guarantee and must be asked for by --non-private"
            )
        if self.non_private and self.secure_noise:
            raise ValueError("--secure-noise makes the noise exact, and --non-private has none")
        if self.target_epsilon is not None and not 0 < self.target_epsilon < float("inf"):
            raise ValueError(f"--target-epsilon must be finite and > 0, got {self.target_epsilon}")
        if self.target_delta is not None and not 0 < self.target_delta < 1:
            raise ValueError(f"--target-delta must lie in (0, 1), got {self.target_delta}")
        if self.microbatch_size is not None and self.microbatch_size < 1:
            raise ValueError(f"--microbatch-size must be at least 1, got {self.microbatch_size}")
        if not 0 <= self.init_seed < 2**32:
            raise ValueError(f"--init-seed must lie in [0, 2^32), got {self.init_seed}")
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"--learning-rate must be finite and > 0, got {self.learning_rate}")
        if self.insecure_seed is not None and not 0 <= self.insecure_seed < 2**64:
            raise ValueError(f"--insecure-seed must lie in [0, 2^64), got {self.insecure_seed}")
        if not self.checkpoint_seconds >= 0:
            raise ValueError(f"--checkpoint-seconds must be >= 0, got {self.checkpoint_seconds}")
        self.model_config()

    def model_config(self) -> ModelConfig:
        """Returns the model's sizes: the preset with the overrides that were given."""
        preset = PRESETS[self.model]
        return ModelConfig(
            embedding_dim=_given(self.embedding_dim, preset.embedding_dim),
            max_buckets=_given(self.max_buckets, preset.max_buckets),
            hidden=_given(self.hidden, preset.hidden),
        )


@dataclass(frozen=True)
class GuaranteeConfig:
    """The run that a guarantee is asked for, of data that are known by public sizes alone."""

    sampler: SamplerSettings
    """How batches are drawn."""
    num_examples: int
    """Training examples (public)."""
    delta: float | None = None
    """Delta of the guarantee; by default 1 / num_examples."""
    unit: Literal["example", "user"] = "example"
    """What one of the num_examples rows is: user, where it is all data of one, clipped as one."""
    max_contributions: int | None = None
    """Most examples of one user, for user-poisson."""
    sizes: tuple[int, ...] = ()
    """For samplers of units within units: how many children there are, level by level, on the path
    of the example that is drawn most often; of units of unequal sizes, the smallest."""
    units: tuple[str, ...] = ()
    """What the units of each level are, for the guarantee's words."""
    largest_unit: int | None = None
    """Examples of the largest unit; by default as many as of the smallest."""

    def check(self) -> None:
        """Raises ValueError, as the command line names them, for values that have no price."""
        if self.num_examples < 1:
            raise ValueError(f"--num-examples must be at least 1, got {self.num_examples}")
        if self.delta is not None and not 0 < self.delta < 1:
            raise ValueError(f"--delta must lie in (0, 1), got {self.delta}")
        levels = len(self.sizes) - 1
        if self.sizes and min(self.sizes) < 1:
            raise ValueError(f"--sizes needs a number >= 1 for each level, got {self.sizes}")
        if self.units and len(self.units) != levels:
            raise ValueError(
                f"--units needs {max(levels, 0)} names, one for each level of --sizes above the "
                f"examples, got {self.units}"
            )
        if self.sizes and self.unit != "example":
            raise ValueError(f"--unit {self.unit}: the rows of --sizes are examples")
        if self.largest_unit is not None and self.largest_unit < (*self.sizes, 1)[levels]:
            raise ValueError(f"--largest-unit is less than the smallest unit: {self.largest_unit}")
        needed = self.sampler.of_data()
        for name, given in (("tree", self.sizes), ("max_contributions", self.max_contributions)):
            option = {"tree": "--sizes", "max_contributions": "--max-contributions"}[name]
            if (name in needed) != bool(given):
                what = "needs" if name in needed else "takes no"
                raise ValueError(f"sampler:{self.sampler.name} {what} {option}")

    def population(self, *, drawn: bool = False) -> Population:
        """Returns what is drawn from.

        Args:
          drawn: Whether it is, in which case all units of a level have one size.
        """
        tree: UnitTree | TreeShape | None = None
        names = self.units or ("unit",) * (len(self.sizes) - 1)
        if self.sizes and drawn:
            if math.prod(self.sizes) != self.num_examples:
                raise ValueError(
                    f"--num-examples must be {math.prod(self.sizes)}, the product of --sizes: "
                    "units of one size are drawn"
                )
            tree = UnitTree.even(self.sizes, names)
        elif self.sizes:
            tree = TreeShape(
                digest="",
                names=names,
                num_leaves=self.num_examples,
                most_leaves=self.largest_unit or self.sizes[-1],
                mean_leaves=float(self.sizes[-1]),
                worst_paths=(self.sizes,),
            )
        return Population(self.num_examples, self.unit, self.max_contributions, tree)

    def build(self, *, drawn: bool = False) -> tuple[BatchSampler, float]:
        """Returns the sampler, and the delta at which it is priced."""
        self.check()
        with naming_options(type(self.sampler)):
            sampler = self.sampler.build(self.population(drawn=drawn), self.delta)
        return sampler, 1 / self.num_examples if self.delta is None else self.delta


@dataclass(frozen=True)
class AuditConfig(GuaranteeConfig):
    """The run that is audited, and how."""

    noise_multiplier: float = field(kw_only=True)
    """Noise standard deviation over the clipping norm."""
    l2_clip_norm: float = 1.0
    """Bound on the L2 norm of one example's gradient."""
    secure_noise: bool = False
    """Audit exact sums and exact noise, as of a run with --secure-noise."""
    claim: str | None = None
    """Hold the run to the price of this sampler, in place of its own: see what, for example,
    shuffling that is claimed to be Poisson really costs."""
    black_box: bool = False
    """Bound epsilon from below by the outputs of whole runs alone."""
    trials: int = 200_000
    """Runs of the black-box audit, in each of the two worlds."""
    plot: Path = Path("audit.png")
    """Figure that the black-box audit writes, .png, .pdf or .svg."""
    overwrite: bool = False
    """Replace a figure that is there under that name."""
