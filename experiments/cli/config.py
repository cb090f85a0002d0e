"""What a user asks for: typed, frozen, and the help of a command line that is not needed here.

Samplers are imported where they are built: whoever asks for help waits neither for NumPy nor SciPy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from dpsgd.runs.sampling import (  # noqa: F401
    SAMPLERS,
    BallsAndBins,
    Deterministic,
    Poisson,
    SamplerConfig,
    Shuffle,
    check_default_batch_size,
)
from experiments.tasks.clicks.sizes import PRESETS, ModelConfig

if TYPE_CHECKING:
    from samplers import BatchSampler

_T = TypeVar("_T")


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
    sampler: SamplerConfig
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
    """The run that a guarantee is asked for."""

    sampler: SamplerConfig
    """How batches are drawn."""
    num_examples: int
    """Training examples (public)."""
    delta: float | None = None
    """Delta of the guarantee; by default 1 / num_examples."""

    def check(self) -> None:
        """Raises ValueError, as the command line names them, for values that have no price."""
        if self.num_examples < 1:
            raise ValueError(f"--num-examples must be at least 1, got {self.num_examples}")
        if self.delta is not None and not 0 < self.delta < 1:
            raise ValueError(f"--delta must lie in (0, 1), got {self.delta}")

    def build(self) -> tuple[BatchSampler, float]:
        """Returns the sampler, and the delta at which it is priced."""
        self.check()
        sampler = self.sampler.build(self.num_examples, self.delta)
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
    claim: Literal["deterministic", "shuffle", "poisson", "balls-and-bins"] | None = None
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
