"""What a run is asked for, as JSON values in its directory, and back."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accounting import check_guarantee_delta, default_delta
from dpsgd.runs import correlation, tables
from dpsgd.runs.calibration import platt, privacy_with
from dpsgd.runs.records import build, checked, plain
from dpsgd.runs.settings import open_settings
from samplers import BatchSampler, Population
from samplers.settings import SamplerSettings, kind_of, name_of, settings_of

if TYPE_CHECKING:
    from dpsgd.core.mechanism import Mechanism
    from dpsgd.core.queries import FullSums
    from dpsgd.noise.base import Noise


@dataclass(frozen=True)
class RunConfig:
    """How a task is trained: which sampler, what noise, and where the rest is decided."""

    sampler: Any  # SamplerSettings, or a BatchSampler of the data's own size
    """How batches are drawn; this decides what the run costs in privacy."""
    noise_multiplier: float | None = None
    """Noise standard deviation over l2_clip_norm; give this, target_epsilon or target_advantage."""
    target_epsilon: float | None = None
    """Choose the smallest noise multiplier whose certified epsilon is at most this."""
    target_advantage: float | None = None
    """Choose the smallest one at which the certified advantage of a membership attack (its true
    positive rate minus its false positive rate) is at most this: with a fair prior it is then right
    with probability (1 + this) / 2 at most."""
    target_delta: float | Literal["1/n"] | None = None
    """Delta of the guarantee; by default min(1e-5, n^-1.1) for n protected units, rounded down to
    one digit. 1/n, which papers take, is no safe choice: to publish one unit at random has it."""
    non_private: bool = False
    """Train without clipping and noise: no guarantee."""
    l2_clip_norm: float | None = None
    """Bound on the L2 norm of one example's gradient; by default the task's rule chooses it, 4 if
    it has none."""
    calibration: Literal["none", "platt"] | None = None
    """After training, fit a scale and a shift of the model's logit to noisy sums over all training
    rows (Platt scaling): clipping bends predicted probabilities, and this mends them. Epsilon is
    for training and calibration together. By default platt, where the task offers it
    and there are rows enough; none without privacy, where nothing is clipped."""
    secure_noise: bool = False
    """Exact integer sums and exact noise from a cryptographic generator: the guarantee then holds
    for the floating-point program too. Slower: each example's gradient is formed by itself."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """What makes steps of private gradients; their sizes fall to zero by a cosine."""
    learning_rate: float | None = None
    """Peak step size; by default the task's rule chooses it. If it has none, it is 3e-3 of Adam,
    and (1 - momentum) of SGD."""
    momentum: float = 0.0
    """Of SGD, in [0, 1): v = momentum v + gradient, and a step is by -v times its size."""
    bands: int | Literal["auto"] | None = None
    """Steps b over which noise is correlated, so that it adds up to less in what SGD sums; as it
    asks for, the sampler's cycle_length becomes b. auto: what disturbs the iterates least at the
    guarantee that is wanted, which may be 1, and for Adam is. By default noise is independent."""
    bands_memory: str = "2GiB"
    """Most memory for the last b - 1 noise vectors that auto may choose, such as 8GB."""
    coefficients: tuple[float, ...] | None = None
    """Of correlated noise, b numbers, see `dpsgd.BandedToeplitz`; by default those that disturb the
    iterates of SGD least."""
    buffers: int | None = None
    """In place of bands, in an order that is fixed: the vectors that noise keeps which is
    correlated over all steps (BLT); 2 to 4 do."""
    weights: tuple[float, ...] | None = None
    """Of buffers, see `dpsgd.BufferedToeplitz`; by default, as decays, those that disturb the
    iterates of SGD least."""
    decays: tuple[float, ...] | None = None
    """Of buffers."""
    tables: Literal["dense", "lazy", "auto"] = "dense"
    """How parameters are trained of which the model only looks rows up. dense: by the optimizer,
    with noise in every row at every step. lazy: by SGD with settings of their own; a row's noise
    comes when the row is next read, with the same law and so the same guarantee, and a step costs
    what its batch reads. auto: lazy where the tables are much larger than a batch."""
    tables_learning_rate: float | None = None
    """Of lazy tables: peak step size; by default the task's rule chooses it."""
    tables_momentum: float | None = None
    """Of lazy tables, in [0, 1); by default the task's rule chooses it, 0 if it has none."""
    tables_weight_decay: float = 0.0
    """Of lazy tables: this times the parameters is added to their gradient."""
    flush_every: int | None = None
    """Of lazy tables: steps after which all noise that is due is drawn, and a checkpoint written
    from which a run goes on also where steps cannot be repeated bit for bit. By default so many
    that it takes a twentieth of the time or less."""
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
    """Check first, on generated rows, that the program that trains and the sampler keep what the
    guarantee assumes (seconds); refuse to train where they do not."""

    def check(self) -> None:
        """Raises ValueError, which names the setting, for values that cannot be run."""
        self.check_sizes()
        given = (self.noise_multiplier, self.target_epsilon, self.target_advantage)
        if sum(value is not None for value in given) + self.non_private != 1:
            raise ValueError(
                "give exactly one of noise_multiplier, target_epsilon, target_advantage and "
                "non_private"
            )
        if self.noise_multiplier is not None and not 0 < self.noise_multiplier < float("inf"):
            raise ValueError(
                f"noise_multiplier must be finite and > 0, got {self.noise_multiplier}; "
                "a run without noise has no guarantee and must be asked for by non_private"
            )
        if self.non_private and self.secure_noise:
            raise ValueError("secure_noise makes the noise exact, and non_private has none")
        if self.target_epsilon is not None and not 0 < self.target_epsilon < float("inf"):
            raise ValueError(f"target_epsilon must be finite and > 0, got {self.target_epsilon}")
        if self.target_advantage is not None and not 0 < self.target_advantage < 1:
            raise ValueError(f"target_advantage must lie in (0, 1), got {self.target_advantage}")
        if isinstance(self.target_delta, str):
            if self.target_delta != "1/n":
                raise ValueError(f"target_delta must be a number or 1/n, got {self.target_delta!a}")
        elif self.target_delta is not None:
            check_guarantee_delta(self.target_delta, "target_delta")
        if self.microbatch_size is not None and self.microbatch_size < 1:
            raise ValueError(f"microbatch_size must be at least 1, got {self.microbatch_size}")
        if not 0 <= self.init_seed < 2**32:
            raise ValueError(f"init_seed must lie in [0, 2^32), got {self.init_seed}")
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate must be finite and > 0, got {self.learning_rate}")
        if self.optimizer not in ("adam", "sgd"):
            raise ValueError(f'optimizer must be "adam" or "sgd", got {self.optimizer!r}')
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError("momentum is a setting of SGD: give optimizer sgd, or leave it out")
        correlation.check(self)
        tables.check(self)
        if self.insecure_seed is not None and not 0 <= self.insecure_seed < 2**64:
            raise ValueError(f"insecure_seed must lie in [0, 2^64), got {self.insecure_seed}")
        if not self.checkpoint_seconds >= 0:
            raise ValueError(f"checkpoint_seconds must be >= 0, got {self.checkpoint_seconds}")

    def delta(self, population: Population) -> float:
        """Returns the delta of the guarantee of a run on these data.

        Raises:
          ValueError: if it is 1 / n, of so few units that this is no delta of a guarantee.
        """
        if isinstance(self.target_delta, float | int):
            return self.target_delta
        sampler = self.sampler
        if isinstance(sampler, SamplerSettings):
            num_units = sampler.num_units(population)
        else:
            num_units = sampler.num_units
        if self.target_delta is None:
            return default_delta(num_units)
        return check_guarantee_delta(1 / num_units, "target_delta")

    def check_sizes(self, num_examples: int | None = None) -> None:
        """Raises ValueError, which names the setting, for sizes that these rows do not allow."""
        if isinstance(self.sampler, SamplerSettings):
            self.sampler.check_sizes(num_examples)

    def mechanism(self, population: Population) -> Mechanism:
        """Returns the mechanism of a run on these data, of which nothing is left open.

        Raises:
          ValueError: for a sampler that does not fit the data, or a target out of reach.
        """
        from dpsgd.core.mechanism import Mechanism

        sampler = self.build_sampler(population)
        if self.non_private:
            return Mechanism(sampler, noise_multiplier=0.0, l2_clip_norm=float("inf"))
        delta = self.delta(population)
        sums = self.full_sums(sampler, delta) if self.calibration == "platt" else None
        noise, sigma = self.noise(), self.noise_multiplier
        if self.target_epsilon is not None:
            sigma = _calibrated(sampler, noise, sums, self.target_epsilon, delta)
        if self.target_advantage is not None:
            sigma = _calibrated_advantage(sampler, noise, sums, self.target_advantage)
        assert sigma is not None, "check() admits exactly one of the four"
        assert self.l2_clip_norm is not None, "`choose` leaves nothing open"
        return Mechanism(sampler, sigma, self.l2_clip_norm, noise, sums)

    def noise(self) -> Noise:
        """Returns the law of the noise, of which nothing is left open."""
        from dpsgd.noise.base import Independent, Secure
        from dpsgd.noise.buffered import BufferedToeplitz
        from dpsgd.noise.correlated import BandedToeplitz

        if self.weights is not None and self.decays is not None:
            return BufferedToeplitz(self.weights, self.decays)
        assert self.buffers is None, "`correlation.decided` leaves nothing open"
        if self.coefficients is not None:
            return BandedToeplitz(self.coefficients)
        assert self.bands in (None, 1), "`correlation.decided` leaves nothing open"
        return Secure() if self.secure_noise else Independent()

    def full_sums(self, sampler: BatchSampler, delta: float) -> FullSums:
        """Returns the sums over all rows that a calibration of the run takes.

        Raises:
          ValueError: if it cannot be calibrated.
        """
        return platt(
            sampler,
            delta,
            noise_multiplier=self.noise_multiplier,
            target_epsilon=self.target_epsilon,
            target_advantage=self.target_advantage,
        )

    def build_sampler(self, population: Population) -> BatchSampler:
        """Returns the sampler of a run on these data.

        Raises:
          ValueError: if it does not fit them.
        """
        with correlation.apart(self.sampler, self.bands) as sampler:
            if isinstance(sampler, SamplerSettings):
                sampler = sampler.build(population, self.delta(population))
            else:
                sampler = sampler.of(population)
        correlation.check_apart(sampler, self.bands)
        correlation.check_order(sampler, self.buffers)
        return sampler

    def record(self) -> dict[str, Any]:
        """Returns the configuration as JSON values, from which `from_record` makes it again."""
        fields = {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(RunConfig)}
        sampler = self.sampler
        if isinstance(sampler, SamplerSettings):
            return {**fields, "sampler": plain(sampler.record())}
        terms = {"name": name_of(type(sampler)), **sampler.terms()}
        return {**fields, "sampler": {"of_these_data": True, **plain(terms)}}

    @classmethod
    def from_record(
        cls, record: Mapping[str, Any], where: str, *, execute: bool = False
    ) -> RunConfig:
        """Returns the configuration that `record` recorded, whatever else is recorded with it.

        Args:
          record: What `config.json` holds.
          where: Begins the line of an error.
          execute: Whether to import the module of a sampler from outside the package, which
            executes its code: to go on with one's own run, and not to read somebody else's.

        Raises:
          ValueError: if it is not the record of a configuration.
        """
        name = sampler_name(record, where)
        fields = {key: value for key, value in record["sampler"].items() if key != "name"}
        whole = checked(fields.pop("of_these_data", False), bool, f"{where}: sampler")
        sampler: Any
        try:
            kind = kind_of(name, execute=execute)
            sampler = kind.from_terms(fields) if whole else None
        except (TypeError, LookupError, ValueError) as error:
            raise ValueError(f"{where}: sampler: {error}") from None
        sampler = sampler or build(settings_of(kind), fields, f"{where}: sampler")
        known = {field.name for field in dataclasses.fields(RunConfig)}
        given = {name: value for name, value in record.items() if name in known}
        config = build(RunConfig, {**given, "sampler": sampler}, where)
        try:
            config.check()
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if names := open_settings(config):
            raise ValueError(f"{where}: {names[0]} is left open")
        if config.bands not in (None, 1) and config.coefficients is None:
            raise ValueError(f"{where}: coefficients are missing, and bands are {config.bands}")
        if config.buffers is not None and config.weights is None:
            raise ValueError(f"{where}: weights are missing, and buffers are {config.buffers}")
        return config


def sampler_name(record: Mapping[str, Any], where: str) -> str:
    """Returns the name of the sampler in the record of a configuration.

    Raises:
      ValueError: if there is none; the line begins with `where`.
    """
    fields = checked(record.get("sampler"), Mapping[str, Any], f"{where}: sampler")
    return checked(fields.get("name"), str, f"{where}: sampler, name")


@functools.lru_cache
def _calibrated(
    sampler: BatchSampler, noise: Noise, sums: FullSums | None, epsilon: float, delta: float
) -> float:
    """Returns the smallest sufficient noise: once for all repetitions of a run in one process."""
    from accounting import calibrate

    return calibrate(privacy_with(sums, sampler, noise), epsilon=epsilon, delta=delta)


@functools.lru_cache
def _calibrated_advantage(
    sampler: BatchSampler, noise: Noise, sums: FullSums | None, advantage: float
) -> float:
    """Returns the smallest noise that keeps an attack's advantage: once for all repetitions."""
    from accounting import calibrate_advantage

    return calibrate_advantage(privacy_with(sums, sampler, noise), advantage=advantage)


def check_version(record: Mapping[str, Any], path: Path) -> None:
    """Raises ValueError if the configuration in the run directory `path` is of before tasks."""
    if "task" not in record and {"data", "model_sizes", "schema"} <= record.keys():
        raise ValueError(
            f"{path} was begun by an earlier version, whose runs knew no tasks: go on with it, or "
            "read it, with that version, or train anew"
        )


def config_digest(record: Mapping[str, Any]) -> str:
    """Returns a digest of what `config.json` holds, wherever the data lie."""
    return hashlib.sha256(json.dumps(_placeless(record), sort_keys=True).encode()).hexdigest()


def _placeless(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record without the place of the data: where they lie does not change them."""
    kept = dict(record)
    task = kept.get("task")
    if isinstance(task, dict) and isinstance(task.get("settings"), dict):
        settings = {name: value for name, value in task["settings"].items() if name != "data"}
        kept["task"] = {**task, "settings": settings}
    return kept
