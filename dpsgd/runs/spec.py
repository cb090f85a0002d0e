"""What a run is asked for: nested frozen values, each of which refuses what is wrong with itself.

None, "auto" and `Auto` leave a choice open, which `dpsgd.runs.resolve` makes. Every setting has one
name, its option, by which commands, the files of sweeps and records spell it: `RunSpec.of` and
`RunSpec.options` are all there is between them and the values here.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Literal, NamedTuple

from accounting import default_delta
from accounting.checks import check_guarantee_delta
from dpsgd.engine.lazy.gaps import LARGEST
from dpsgd.gradients.rules import (
    FLAT,
    AutomaticClipping,
    FlatClipping,
    PerLayerClipping,
)
from dpsgd.noise.base import Independent, Noise
from dpsgd.noise.correlated import BandedToeplitz, banded_square_root
from dpsgd.removed import removal_notice
from dpsgd.runs.records import build, checked, field_types, near, to_json
from dpsgd.sizes import bytes_of
from samplers import BatchSampler, Population
from samplers.settings import SamplerSettings, kind_of, name_of, settings_of

_INDEPENDENT = Independent()

Must = tuple[Callable[[Any], bool], str]
"""What holds of a value, and the same in words."""

_POSITIVE: Must = (lambda x: 0 < x < math.inf, "be finite and > 0")
_DECAYING: Must = (lambda x: 0 <= x < 1, "be in [0, 1)")
_COUNT: Must = (lambda x: x >= 1, "be at least 1")
_NOISE: Must = (
    lambda x: 0 < x < math.inf,
    "be finite and > 0 (dpsgd train --non-private asks for no guarantee)",
)
_BANDS: Must = (
    lambda b: b == "auto" or (type(b) is int and b >= 1),
    'be an integer >= 1 or "auto"',
)
_TABLES_RATE: Must = (lambda x: 0 < x <= LARGEST, f"be > 0 and at most {LARGEST:g}")
_CALIBRATION: Must = (
    lambda x: x in ("none", "platt", "temperature", "affine"),
    "be none, platt, temperature or affine",
)
_SCHEDULE: Must = (lambda x: x in ("cosine", "constant"), "be cosine or constant")
_DATA_ON: Must = (lambda x: x in ("device", "host"), "be device or host")
_COMPUTE: Must = (lambda x: x in ("float32", "bfloat16"), "be float32 or bfloat16")
_DELTA: Must = (lambda x: isinstance(x, Real) or x == "1/n", "be a number or 1/n")


def _setting(
    default: Any = MISSING,
    *,
    name: str = "",
    open: bool = False,
    must: Must | None = None,
    kw_only: bool = False,
) -> Any:
    """Returns a field: `name` is that of its option, `open` whether None leaves a choice open."""
    metadata = {"option": name, "open": open, "must": must}
    return field(default=default, metadata=metadata, kw_only=kw_only)


def _name(one: dataclasses.Field) -> str:
    return one.metadata.get("option") or one.name


class _Checked:
    """Refuses values of which what they must be does not hold, by the names of their options."""

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):  # type: ignore[arg-type]  # of a dataclass
            value, must = getattr(self, one.name), one.metadata.get("must")
            if must and value is not None and not must[0](value):
                raise ValueError(f"{_name(one)} must {must[1]}, got {value!r}")


@dataclass(frozen=True)
class NoiseMultiplier(_Checked):
    """Given noise multiplier."""

    noise_multiplier: float = _setting(must=_NOISE)
    """Standard deviation of the noise divided by l2_clip_norm."""


@dataclass(frozen=True)
class TargetEpsilon(_Checked):
    """Smallest noise multiplier that certifies an epsilon."""

    epsilon: float = _setting(name="target_epsilon", must=_POSITIVE)
    """Largest epsilon; the run uses the smallest noise multiplier that certifies it."""
    optimistic: bool = False
    """Calibrate the lower end of the certified interval to target_epsilon. The guarantee stays
    the upper end, which may exceed target_epsilon. For studies of shuffling, whose two ends are
    far apart."""


@dataclass(frozen=True)
class NonPrivate:
    """Train without clipping or noise; the run has no guarantee."""


@dataclass(frozen=True)
class Banded(_Checked):
    """Noise correlated over consecutive steps, see `dpsgd.BandedToeplitz`."""

    bands: int | Literal["auto"] = _setting(must=_BANDS)
    """Number of steps b over which noise is correlated, so that more of it cancels in SGD's
    iterates. Sets the sampler's cycle_length to b. auto: the power of two with the least error
    in SGD's iterates at the same guarantee (always 1 with Adam). Default: independent noise."""
    memory: str = _setting("2GiB", name="bands_memory")
    """Memory limit for the b - 1 stored noise vectors when bands is auto, such as 8GB."""
    coefficients: tuple[float, ...] | None = None
    """The b coefficients of banded noise, see `dpsgd.BandedToeplitz`. Default: the first b
    coefficients of the power series of (1 - x)^(-1/2)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        bytes_of(self.memory, "bands_memory")
        if self.coefficients is not None and len(self.coefficients) != self.bands:
            raise ValueError(
                f"coefficients must be as many as bands, {self.bands}, got {len(self.coefficients)}"
            )
        _ = self.law  # refuses coefficients that no noise has

    @property
    def law(self) -> Noise | None:
        """The noise law; None while bands is auto."""
        if self.coefficients is not None:
            return BandedToeplitz(self.coefficients)
        if self.bands == "auto":
            return None
        return Independent() if self.bands == 1 else banded_square_root(self.bands)


@dataclass(frozen=True)
class Dense:
    """Embedding tables trained by the optimizer, with noise in every row at every step."""


@dataclass(frozen=True)
class _TableSettings(_Checked):
    learning_rate: float | None = _setting(
        None, name="tables_learning_rate", open=True, must=_TABLES_RATE
    )
    """Peak learning rate of lazy tables. Default: chosen by the task."""
    momentum: float | None = _setting(None, name="tables_momentum", open=True, must=_DECAYING)
    """Momentum of lazy tables, in [0, 1). Default: chosen by the task, else 0."""
    flush_every: int | None = _setting(None, open=True, must=_COUNT)
    """Steps between flushes of lazy tables: all deferred noise is drawn and a checkpoint is
    written. Default: flushes take at most 5 % of the time."""


@dataclass(frozen=True)
class Lazy(_TableSettings):
    """Embedding tables with deferred noise, trained by SGD at a learning rate of their own."""


@dataclass(frozen=True)
class Auto(_TableSettings):
    """`Lazy` if the tables are much larger than a batch, else `Dense`."""


@dataclass(frozen=True)
class _StepSizes(_Checked):
    learning_rate: float | None = _setting(None, open=True, must=_POSITIVE)
    """Peak learning rate. Default: chosen by the task, else 3e-3 for Adam and 1 - momentum for
    SGD."""
    schedule: Literal["cosine", "constant"] | None = _setting(None, must=_SCHEDULE, kw_only=True)
    """Learning rate schedule. Default: cosine (to zero at the last step); constant where the
    task's rule averages parameters."""

    @property
    def step_sizes(self) -> Literal["cosine", "constant"]:
        """The schedule; cosine by default."""
        return self.schedule or "cosine"


@dataclass(frozen=True)
class Adam(_StepSizes):
    """Adam with the usual betas and epsilon."""


@dataclass(frozen=True)
class SGD(_StepSizes):
    """Stochastic gradient descent with optional momentum."""

    momentum: float = _setting(0.0, must=_DECAYING)
    """SGD momentum, in [0, 1)."""


@dataclass(frozen=True)
class LastStep:
    """Release the parameters of the last step."""


@dataclass(frozen=True)
class TailAverage(_Checked):
    """Release the mean of the parameters over the last steps."""

    tail: float = _setting(name="average_tail", must=(lambda x: 0 < x <= 1, "lie in (0, 1]"))
    """Release the mean of the parameters over this final share of the steps. Costs no privacy;
    works best with a constant schedule."""


@dataclass(frozen=True)
class MovingAverage(_Checked):
    """Release an exponential moving average of the parameters."""

    decay: float = _setting(
        name="average_decay", must=(lambda x: 0 <= x <= 0.999999, "be in [0, 0.999999]")
    )
    """Release the exponential moving average of the parameters with this decay, such as 0.99."""


@dataclass(frozen=True)
class RunSpec(_Checked):
    """Settings of a training run; a task's rule chooses those left open.

    >>> from samplers.settings import SETTINGS
    >>> spec = RunSpec(SETTINGS["poisson"](), TargetEpsilon(3.0), optimizer=SGD(momentum=0.9))
    >>> spec == RunSpec.of(
    ...     sampler=SETTINGS["poisson"](), target_epsilon=3.0, optimizer="sgd", momentum=0.9
    ... )
    True

    Raises:
      ValueError: if a value is out of range; the message names the option.
    """

    sampler: Any  # SamplerSettings, or a BatchSampler of the data's own size
    """Sampler that draws the batches and determines the privacy cost."""
    privacy: NoiseMultiplier | TargetEpsilon | NonPrivate
    """Noise multiplier, given or calibrated to a target epsilon."""
    noise: Independent | Banded = _INDEPENDENT
    """Independent or correlated noise over the steps."""
    tables: Dense | Lazy | Auto = Dense()
    """How embedding tables are trained. dense: by the optimizer, with noise in every row at every
    step. lazy: by SGD; the noise of a row is drawn when the row is next read. The guarantee is the
    same, and the time of a step does not depend on the size of the tables. auto: lazy if the
    tables are much larger than a batch."""
    optimizer: Adam | SGD = Adam()
    """Optimizer that applies the private gradients."""
    average: LastStep | TailAverage | MovingAverage = LastStep()
    """Released parameters: last step, tail average or moving average."""
    clipping: FlatClipping | PerLayerClipping | AutomaticClipping = FLAT
    """How per-example gradients are clipped to l2_clip_norm. flat: the whole gradient. per-layer:
    each group of parameters to its own norm; their squares add up to l2_clip_norm squared.
    automatic: every gradient is scaled to about l2_clip_norm. The privacy cost is the same."""
    delta: float | Literal["1/n"] | None = _setting(None, name="target_delta", must=_DELTA)
    """Delta of the guarantee. Default: min(1e-5, n^-1.1) for n protected units, rounded down to
    one digit. 1/n is unsafe: publishing one random row satisfies it."""
    l2_clip_norm: float | None = _setting(None, open=True, must=_POSITIVE)
    """L2 norm to which each per-example gradient is clipped. Default: chosen by the task, else
    4."""
    calibration: Literal["none", "platt", "temperature", "affine"] | None = _setting(
        None, open=True, must=_CALIBRATION
    )
    """Recalibrate predictions after training, from noisy sums over all training rows, because
    clipping biases them. platt: scale and shift of the logit; temperature: scale of the logits of
    several classes; affine: scale and shift of a predicted number. Epsilon covers training and
    calibration together. Default: the task's calibration if there are enough rows; none without
    privacy."""
    microbatch_size: int | None = _setting(None, must=_COUNT)
    """Examples whose gradients are computed together. Default: as many as fit in 2 GiB."""
    compute: Literal["float32", "bfloat16"] = _setting("float32", must=_COMPUTE)
    """Floating-point type of the parameters inside the loss. Clipping, noise and the stored
    parameters stay in float32."""
    checkpoint_seconds: float = _setting(120.0, must=(lambda x: x >= 0, "be >= 0"))
    """Seconds between checkpoints, from which `dpsgd resume` continues."""
    data_on: Literal["device", "host"] | None = _setting(None, must=_DATA_ON)
    """Memory that holds the training rows; from the host, rows are copied for each block of steps.
    Default: device, or host if the rows need more than half of the device's free memory."""
    train: str | None = None
    """Train only the parameters whose names (such as dense.kernel) match this regular expression,
    for example 'logit|hidden'. The others keep their initial values, get no noise and do not count
    in the clipping norm."""
    init_seed: int = _setting(0, must=(lambda x: 0 <= x < 2**32, "lie in [0, 2^32)"))
    """Public seed of the initial parameters."""
    init_from: str | None = None
    """Start from the parameters of a finished run, an exported model or a file .npz in place of
    fresh ones. The guarantee's epsilon is for rows that did not train that model; the sentence
    also says what it is for rows that did."""
    insecure_seed: int | None = _setting(None, must=(lambda x: 0 <= x < 2**64, "lie in [0, 2^64)"))
    """Seed that makes sampling and noise reproducible, for debugging. Voids the guarantee."""
    audit: bool = True
    """Before training, check on generated rows that the compiled program and the sampler do what
    the guarantee assumes, and refuse to train otherwise. Takes seconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kinds in PARTS.items():
            if type(part := getattr(self, name)) not in kinds.values():
                named = ", ".join(kind.__name__ for kind in kinds.values())
                raise ValueError(f"{name} must be one of {named}, got {part!r}")
        if self.train is not None:
            try:
                re.compile(self.train)
            except re.error as error:
                raise ValueError(f"train: {self.train!r} is no pattern: {error}") from None
        if isinstance(self.sampler, SamplerSettings):
            self.sampler.check_sizes()
        elif not isinstance(self.sampler, BatchSampler):
            raise ValueError(
                'sampler must be settings, such as samplers.settings.SETTINGS["poisson"](), or a '
                f"BatchSampler, got {self.sampler!r:.80}"
            )
        if self.delta is not None and self.delta != "1/n":
            delta = check_guarantee_delta(float(self.delta), "target_delta")
            object.__setattr__(self, "delta", delta)  # NumPy's numbers too, as Python's

    @property
    def private(self) -> bool:
        """Whether there is any noise."""
        return not isinstance(self.privacy, NonPrivate)

    @property
    def open(self) -> list[str]:
        """The options that are left open for `resolve`, those of the sampler first."""
        sampler, noise = self.sampler, self.noise
        names = ["tables"] if isinstance(self.tables, Auto) else []
        names += sampler.open_sizes() if isinstance(sampler, SamplerSettings) else []
        for part in (self, self.optimizer, self.tables):
            fields = dataclasses.fields(part)
            left = (f for f in fields if f.metadata.get("open") and getattr(part, f.name) is None)
            names += map(_name, left)
        if isinstance(noise, Banded) and noise.law is None:
            names.append("bands")
        return names

    @classmethod
    def of(cls, sampler: Any, **options: Any) -> RunSpec:
        """Returns what options ask for: the one way in from commands, files and records.

        Args:
          sampler: How batches are drawn.
          **options: By the names of `known_options`. One that is None or has its default need not
            go with the others; of all others each must.

        Raises:
          ValueError: if one is unknown, of another type or impossible, or goes with a choice that
            was not made.
        """
        known, given = known_options(), dict[str, Any]()
        for name, value in options.items():
            if notice := removal_notice(name, value):
                raise ValueError(f"{name}={value} was {notice}")
            if name not in known:
                raise ValueError(f"{name!a} is unknown{near(name, known)}")
            value = tuple(value) if isinstance(value, list) else value
            if value is not None and value != known[name].default:
                given[name] = checked(value, known[name].type, name)
        parts = {}
        for part, kinds in PARTS.items():
            choices = [given.pop(part)] if part in given else [c for c in kinds if c in given]
            (choice, *others) = choices or [next(iter(kinds))]
            if others or choice not in kinds or not (choices or "" in kinds or part in known):
                number = "at most" if "" in kinds else "exactly"
                *names, last = filter(None, kinds)
                raise ValueError(f"give {number} one of {', '.join(names)} and {last}")
            kind = kinds[choice]
            if not dataclasses.fields(kind):
                given.pop(choice, None)
            of = {_name(one): one.name for one in dataclasses.fields(kind)}
            parts[part] = kind(**{of[name]: given.pop(name) for name in list(given) if name in of})
        own = {_name(one): one.name for one in dataclasses.fields(cls)}
        for name in given:
            if name not in own:
                raise ValueError(f"{name} goes with {_chooser(name)}: give it, or leave out {name}")
        return cls(sampler, **parts, **{own[name]: value for name, value in given.items()})

    def options(self) -> dict[str, Any]:
        """Returns the options that ask for this, with those of all choices that it makes."""
        found: dict[str, Any] = {}
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if one.name not in PARTS:
                found[_name(one)] = value
                continue
            choice = next(c for c, kind in PARTS[one.name].items() if kind is type(value))
            if one.name in known_options():
                found[one.name] = choice
            elif choice and not dataclasses.fields(value):
                found[choice] = True
            found |= {_name(f): getattr(value, f.name) for f in dataclasses.fields(value)}
        return found

    def but(self, **options: Any) -> RunSpec:
        """Returns the same with other options."""
        return RunSpec.of(**{**self.options(), **options})

    def delta_of(self, population: Population) -> float:
        """Returns the delta of the guarantee of a run on these data.

        Raises:
          ValueError: if it is 1 / n, of so few units that this is no delta of a guarantee.
        """
        if self.delta is not None and self.delta != "1/n":
            return self.delta
        num_units: Any = self.sampler.num_units
        if isinstance(self.sampler, SamplerSettings):
            num_units = num_units(population)
        if self.delta is None:
            return default_delta(num_units)
        return check_guarantee_delta(1 / num_units, "target_delta")

    def record(self) -> dict[str, Any]:
        """Returns the options as JSON values, from which `from_record` makes it again."""
        sampler = self.sampler
        if isinstance(sampler, SamplerSettings):
            terms = sampler.record()
        else:
            terms = {"of_these_data": True, "name": name_of(type(sampler)), **sampler.terms()}
        return {**to_json({**self.options(), "sampler": None}), "sampler": to_json(terms)}

    @classmethod
    def from_record(
        cls, record: Mapping[str, Any], where: str, *, execute: bool = False
    ) -> RunSpec:
        """Returns the resolved spec that `record` recorded, whatever else is recorded with it.

        Args:
          record: What `config.json` holds.
          where: Begins the line of an error.
          execute: Whether to import the module of a sampler from outside the package, which
            executes its code: to resume one's own run, and not to read somebody else's.

        Raises:
          ValueError: if it is not the record of a spec of which nothing is left open.
        """
        name = sampler_name(record, where)
        fields = {key: value for key, value in record["sampler"].items() if key != "name"}
        try:
            whole = checked(fields.pop("of_these_data", False), bool, "sampler")
            kind: Any = kind_of(name, execute=execute)
            sampler = kind.from_terms(fields) if whole else None
        except (TypeError, LookupError, ValueError) as error:
            raise ValueError(f"{where}: sampler: {error}") from None
        sampler = sampler or build(settings_of(kind), fields, f"{where}: sampler")
        given = {
            key: value
            for key, value in record.items()
            if key in known_options() or (value and removal_notice(key, value))  # `of` refuses it
        }
        try:
            spec = cls.of(**{**given, "sampler": sampler})
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if names := spec.open:
            raise ValueError(f"{where}: {names[0]} is left open")
        return spec


PARTS: dict[str, dict[str, type]] = {
    "privacy": {
        "noise_multiplier": NoiseMultiplier,
        "target_epsilon": TargetEpsilon,
        "non_private": NonPrivate,
    },
    "noise": {"": Independent, "bands": Banded},
    "tables": {"dense": Dense, "lazy": Lazy, "auto": Auto},
    "optimizer": {"adam": Adam, "sgd": SGD},
    "average": {"": LastStep, "average_tail": TailAverage, "average_decay": MovingAverage},
    "clipping": {
        "flat": FlatClipping,
        "per-layer": PerLayerClipping,
        "automatic": AutomaticClipping,
    },
}
"""The classes of each part of a spec, by the option that chooses one ("" needs none), or, of
tables, optimizers and clipping, by the value of the option of that name."""


class Option(NamedTuple):
    """One setting of a run by the name that commands, files and records have for it."""

    type: Any
    default: Any
    """None where it has none."""
    owner: type
    """Class below whose field its help stands."""
    field: str
    """That field; "" for the class itself."""


@functools.cache
def known_options() -> dict[str, Option]:
    """Returns every option of a run by its name."""
    found: dict[str, Option] = {}

    def add(owner: type, one: dataclasses.Field) -> None:
        default = None if one.default is MISSING else one.default
        hint = field_types(owner)[one.name]
        hint = hint | None if default is None and hint is not Any else hint
        found.setdefault(_name(one), Option(hint, default, owner, one.name))

    for own in dataclasses.fields(RunSpec):
        if (kinds := PARTS.get(own.name)) is None:
            add(RunSpec, own)
            continue
        if own.name in ("tables", "optimizer", "clipping"):
            names: Any = Literal[tuple(kinds)]
            found[own.name] = Option(names, next(iter(kinds)), RunSpec, own.name)
        for choice, kind in kinds.items():
            if choice and not dataclasses.fields(kind) and own.name not in found:
                found[choice] = Option(bool, False, kind, "")
            for one in dataclasses.fields(kind):
                add(kind, one)
    return found


def _chooser(name: str) -> str:
    """Returns what chooses a class that has an option, in words."""
    for part, kinds in PARTS.items():
        has = [c for c, k in kinds.items() if name in map(_name, dataclasses.fields(k))]
        if has:
            return " ".join([*([part] if part in known_options() else []), " or ".join(has)])
    return "nothing"


def sampler_name(record: Mapping[str, Any], where: str) -> str:
    """Returns the name of the sampler in the record of a spec, or refuses it at `where`."""
    fields = checked(record.get("sampler"), Mapping[str, Any], f"{where}: sampler")
    return checked(fields.get("name"), str, f"{where}: sampler, name")


def check_version(record: Mapping[str, Any], path: Path) -> None:
    """Raises ValueError if the configuration in the run directory `path` is of before tasks."""
    if "task" not in record and {"data", "model_sizes", "schema"} <= record.keys():
        raise ValueError(
            f"{path} was begun by an earlier version, whose runs knew no tasks: resume it, or "
            "read it, with that version, or train anew"
        )


def config_digest(record: Mapping[str, Any]) -> str:
    """Returns a digest of what `config.json` holds, wherever data and an earlier model lie."""
    kept = dict(record)
    task = kept.get("task")
    if isinstance(task, dict) and isinstance(task.get("settings"), dict):
        settings = {name: value for name, value in task["settings"].items() if name != "data"}
        kept["task"] = {**task, "settings": settings}
    if "init_from" in kept:  # a ledger knows the parameters by their digest
        kept["init_from"] = kept["init_from"] is not None
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
