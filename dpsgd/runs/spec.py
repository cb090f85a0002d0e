"""What a run is asked for: nested frozen values, each of which refuses what is wrong with itself.

None, "auto" and `Auto` leave a choice open, which `dpsgd.runs.resolve` makes. Every setting has one
name, its option, by which commands, the files of sweeps and records spell it: `RunSpec.of` and
`RunSpec.options` are all there is between them and the values here.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from accounting import check_guarantee_delta, default_delta
from dpsgd.engine.lazy.gaps import LARGEST
from dpsgd.noise.base import Independent, Noise, Secure
from dpsgd.noise.buffered import BufferedToeplitz
from dpsgd.noise.correlated import BandedToeplitz
from dpsgd.runs.records import build, checked, field_types, plain
from dpsgd.sizes import bytes_of
from samplers import Population
from samplers.settings import SamplerSettings, kind_of, name_of, settings_of

_INDEPENDENT = Independent()


def _option(name: str = "", *, open: bool = False) -> dict[str, Any]:
    """Returns the metadata of a field: its option's name, and whether None leaves it open."""
    return {"option": name, "open": open}


def _refuse_unless(holds: bool, name: str, must: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"{name} must {must}, got {value!r}")


@dataclass(frozen=True)
class NoiseMultiplier:
    """Noise of a given size."""

    noise_multiplier: float
    """Noise standard deviation over l2_clip_norm; give this, target_epsilon or target_advantage."""

    def __post_init__(self) -> None:
        if not 0 < self.noise_multiplier < math.inf:
            raise ValueError(
                f"noise_multiplier must be finite and > 0, got {self.noise_multiplier}; "
                "a run without noise has no guarantee and must be asked for by non_private"
            )


@dataclass(frozen=True)
class TargetEpsilon:
    """The smallest noise for an epsilon."""

    epsilon: float = field(metadata=_option("target_epsilon"))
    """Choose the smallest noise multiplier whose certified epsilon is at most this."""

    def __post_init__(self) -> None:
        finite = 0 < self.epsilon < math.inf
        _refuse_unless(finite, "target_epsilon", "be finite and > 0", self.epsilon)


@dataclass(frozen=True)
class TargetAdvantage:
    """The smallest noise for the advantage of a membership attack."""

    advantage: float = field(metadata=_option("target_advantage"))
    """Choose the smallest one at which the certified advantage of a membership attack (its true
    positive rate minus its false positive rate) is at most this: with a fair prior it is then right
    with probability (1 + this) / 2 at most."""

    def __post_init__(self) -> None:
        within = 0 < self.advantage < 1
        _refuse_unless(within, "target_advantage", "lie in (0, 1)", self.advantage)


@dataclass(frozen=True)
class NonPrivate:
    """Train without clipping and noise: no guarantee."""


@dataclass(frozen=True)
class Banded:
    """Noise that is correlated over a few steps, see `dpsgd.BandedToeplitz`."""

    bands: int | Literal["auto"]
    """Steps b over which noise is correlated, so that it adds up to less in what SGD sums; as it
    asks for, the sampler's cycle_length becomes b. auto: what disturbs the iterates least at the
    guarantee that is wanted, which may be 1, and for Adam is. By default noise is independent."""
    memory: str = field(default="2GiB", metadata=_option("bands_memory"))
    """Most memory for the last b - 1 noise vectors that auto may choose, such as 8GB."""
    coefficients: tuple[float, ...] | None = None
    """Of banded noise, b numbers, see `dpsgd.BandedToeplitz`; by default those that disturb the
    iterates of SGD least."""

    def __post_init__(self) -> None:
        number = type(self.bands) is int and self.bands >= 1
        must = 'be an integer >= 1 or "auto"'
        _refuse_unless(number or self.bands == "auto", "bands", must, self.bands)
        bytes_of(self.memory, "bands_memory")
        if self.coefficients is not None:
            if len(self.coefficients) != self.bands:
                raise ValueError(
                    f"coefficients must be as many as bands, {self.bands}, got "
                    f"{len(self.coefficients)}"
                )
            BandedToeplitz(self.coefficients)  # refuses those that no noise has

    @property
    def law(self) -> Noise | None:
        """The noise; None while its numbers are open."""
        if self.coefficients is None:
            return Independent() if self.bands == 1 else None
        return BandedToeplitz(self.coefficients)


@dataclass(frozen=True)
class Buffered:
    """Noise that is correlated over all steps of a fixed order (BLT)."""

    buffers: int
    """In place of bands, in an order that is fixed: the vectors that noise keeps which is
    correlated over all steps (BLT); 2 to 4 do."""
    weights: tuple[float, ...] | None = None
    """Of buffers, see `dpsgd.BufferedToeplitz`; by default, as decays, those that disturb the
    iterates of SGD least."""
    decays: tuple[float, ...] | None = None
    """Of buffers."""

    def __post_init__(self) -> None:
        _refuse_unless(self.buffers >= 1, "buffers", "be at least 1", self.buffers)
        given = [len(numbers) for numbers in (self.weights, self.decays) if numbers is not None]
        if given not in ([], [self.buffers] * 2):
            raise ValueError(
                f"weights and decays must be as many as buffers, {self.buffers}: give both"
            )
        _ = self.law  # refuses numbers that no noise has

    @property
    def law(self) -> Noise | None:
        """The noise; None while its numbers are open."""
        if self.weights is None or self.decays is None:
            return None
        return BufferedToeplitz(self.weights, self.decays)


@dataclass(frozen=True)
class Dense:
    """Tables like all other parameters: by the optimizer, with noise in every row at every step."""


@dataclass(frozen=True)
class _TableSettings:
    learning_rate: float | None = field(
        default=None, metadata=_option("tables_learning_rate", open=True)
    )
    """Of lazy tables: peak step size; by default the task's rule chooses it."""
    momentum: float | None = field(default=None, metadata=_option("tables_momentum", open=True))
    """Of lazy tables, in [0, 1); by default the task's rule chooses it, 0 if it has none."""
    weight_decay: float = field(default=0.0, metadata=_option("tables_weight_decay"))
    """Of lazy tables: this times the parameters is added to their gradient."""
    flush_every: int | None = field(default=None, metadata=_option(open=True))
    """Of lazy tables: steps after which all deferred noise is drawn, and a checkpoint written
    from which a run resumes also where steps cannot be repeated bit for bit. By default so many
    that it takes a twentieth of the time or less."""

    def __post_init__(self) -> None:
        rate, decay, prefix = self.learning_rate, self.weight_decay, "tables_"
        if rate is not None:
            most = f"be > 0 and at most {LARGEST:g}"
            _refuse_unless(0 < rate <= LARGEST, f"{prefix}learning_rate", most, rate)
        _check_momentum(f"{prefix}momentum", self.momentum or 0.0)
        finite = 0 <= decay < math.inf
        _refuse_unless(finite, f"{prefix}weight_decay", "be finite and >= 0", decay)
        if rate is not None and decay * rate > 1:
            raise ValueError(
                "tables_weight_decay times tables_learning_rate must be at most 1, or rows grow "
                f"that are not read: got {decay} times {rate}"
            )
        if self.flush_every is not None:
            _refuse_unless(self.flush_every >= 1, "flush_every", "be at least 1", self.flush_every)


@dataclass(frozen=True)
class Lazy(_TableSettings):
    """Tables with deferred noise, trained by SGD with settings of their own."""


@dataclass(frozen=True)
class Auto(_TableSettings):
    """`Lazy` where the tables are much larger than a batch, and `Dense` elsewhere."""


@dataclass(frozen=True)
class _StepSizes:
    learning_rate: float | None = field(default=None, metadata=_option(open=True))
    """Peak step size; by default the task's rule chooses it. If it has none, it is 3e-3 of Adam,
    and (1 - momentum) of SGD."""

    def __post_init__(self) -> None:
        if (rate := self.learning_rate) is not None:
            _refuse_unless(0 < rate < math.inf, "learning_rate", "be finite and > 0", rate)


@dataclass(frozen=True)
class Adam(_StepSizes):
    """Adam, at the usual settings but for its step sizes."""


@dataclass(frozen=True)
class SGD(_StepSizes):
    """Stochastic gradient descent, with momentum if it is given."""

    momentum: float = 0.0
    """Of SGD, in [0, 1): v = momentum v + gradient, and a step is by -v times its size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_momentum("momentum", self.momentum)


def _check_momentum(name: str, momentum: float) -> None:
    _refuse_unless(0 <= momentum < 1, name, "be in [0, 1)", momentum)


@dataclass(frozen=True)
class RunSpec:
    """How a task is trained: which sampler, what noise, and which choices are left open.

    >>> from samplers.settings import SETTINGS
    >>> spec = RunSpec(SETTINGS["poisson"](), TargetEpsilon(3.0), optimizer=SGD(momentum=0.9))
    >>> spec == RunSpec.of(
    ...     sampler=SETTINGS["poisson"](), target_epsilon=3.0, optimizer="sgd", momentum=0.9
    ... )
    True

    Raises:
      ValueError: for a value that no run has; the line names its option.
    """

    sampler: Any  # SamplerSettings, or a BatchSampler of the data's own size
    """How batches are drawn; this decides what the run costs in privacy."""
    privacy: NoiseMultiplier | TargetEpsilon | TargetAdvantage | NonPrivate
    """How much noise: given, or the smallest that certifies a target."""
    noise: Independent | Secure | Banded | Buffered = _INDEPENDENT
    """The law of the noise over the steps."""
    tables: Dense | Lazy | Auto = Dense()
    """How parameters are trained of which the model only looks rows up. dense: by the optimizer,
    with noise in every row at every step. lazy: by SGD with settings of their own; a row's noise
    is deferred to when the row is next read, with the same law and so the same guarantee, and a
    step costs what its batch reads. auto: lazy where the tables are much larger than a batch."""
    optimizer: Adam | SGD = Adam()
    """What makes steps of private gradients; their sizes fall to zero by a cosine."""
    delta: float | Literal["1/n"] | None = field(default=None, metadata=_option("target_delta"))
    """Delta of the guarantee; by default min(1e-5, n^-1.1) for n protected units, rounded down to
    one digit. 1/n, which papers take, is no safe choice: to publish one unit at random has it."""
    l2_clip_norm: float | None = field(default=None, metadata=_option(open=True))
    """Bound on the L2 norm of one example's gradient; by default the task's rule chooses it, 4 if
    it has none."""
    calibration: Literal["none", "platt"] | None = field(default=None, metadata=_option(open=True))
    """After training, fit a scale and a shift of the model's logit to noisy sums over all training
    rows (Platt scaling): clipping bends predicted probabilities, and this mends them. Epsilon is
    for training and calibration together. By default platt, where the task offers it
    and there are rows enough; none without privacy, where nothing is clipped."""
    budget_minutes: float | None = None
    """Time for the whole run on this machine, audit and report included: of the epochs that the
    task's rule takes, as many as fit, found by timing a few steps on generated rows. By default the
    rule's own epochs."""
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

    def __post_init__(self) -> None:
        for name, members in _choices().items():
            if type(part := getattr(self, name)) not in members:
                named = ", ".join(member.__name__ for member in members)
                raise ValueError(f"{name} must be one of {named}, got {part!r}")
        if isinstance(self.sampler, SamplerSettings):
            self.sampler.check_sizes()
        if isinstance(self.delta, str):
            _refuse_unless(self.delta == "1/n", "target_delta", "be a number or 1/n", self.delta)
        elif self.delta is not None:
            check_guarantee_delta(self.delta, "target_delta")
        for name, least in (("microbatch_size", 1), ("checkpoint_seconds", 0)):
            value = getattr(self, name)
            _refuse_unless(value is None or value >= least, name, f"be at least {least}", value)
        for name in ("l2_clip_norm", "budget_minutes"):
            value = getattr(self, name)
            finite = value is None or 0 < value < math.inf
            _refuse_unless(finite, name, "be finite and > 0", value)
        for name, bits in (("init_seed", 32), ("insecure_seed", 64)):
            value = getattr(self, name)
            within = value is None or 0 <= value < 2**bits
            _refuse_unless(within, name, f"lie in [0, 2^{bits})", value)

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
        if isinstance(noise, Banded | Buffered) and noise.law is None:
            missing = "weights" if isinstance(noise, Buffered) else "coefficients"
            names.append("bands" if getattr(noise, "bands", None) == "auto" else missing)
        return names

    @classmethod
    def of(cls, sampler: Any, **options: Any) -> RunSpec:
        """Returns what options ask for: the one way in from commands, files and records.

        Args:
          sampler: How batches are drawn.
          **options: By the names of `known_options`. One that is None or has its default need not
            go with the others; of all others each must.

        Raises:
          ValueError: if one is unknown or impossible, or goes with a choice that was not made.
        """
        known = known_options()
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f": did you mean {near[0]}?" if near else ""
                raise ValueError(f"{name!a} is unknown{hint}")
        given = {k: v for k, v in options.items() if v is not None and v != known[k].default}
        parts = {name: _chosen(name, members, given) for name, members in _choices().items()}
        fields = {"sampler": sampler}
        for name, option in known.items():
            if option.part is None:
                if name in given:
                    fields[option.attribute] = given[name]
            elif name in given and not option.selects and parts[option.part] not in option.owners:
                raise ValueError(f"{name} goes with {option.chooser}: give it, or leave out {name}")
        for name, part in parts.items():
            values = {k: given[k] for k in given if part in known[k].owners}
            fields[name] = part(**{known[k].attribute: v for k, v in values.items()})
        return cls(**fields)

    def options(self) -> dict[str, Any]:
        """Returns the options that ask for this, with those of all choices that it makes."""
        found: dict[str, Any] = {}
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if one.name not in _choices():
                found[_name(one)] = value
                continue
            if one.name in _BY_NAME:
                found[one.name] = type(value).__name__.lower()
            elif type(value) in _FLAGS:
                found[_FLAGS[type(value)]] = True
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
        if isinstance(self.delta, float | int):
            return self.delta
        sampler = self.sampler
        if isinstance(sampler, SamplerSettings):
            num_units = sampler.num_units(population)
        else:
            num_units = sampler.num_units
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
        return {**plain({**self.options(), "sampler": None}), "sampler": plain(terms)}

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
        whole = checked(fields.pop("of_these_data", False), bool, f"{where}: sampler")
        sampler: Any
        try:
            kind = kind_of(name, execute=execute)
            sampler = kind.from_terms(fields) if whole else None
        except (TypeError, LookupError, ValueError) as error:
            raise ValueError(f"{where}: sampler: {error}") from None
        sampler = sampler or build(settings_of(kind), fields, f"{where}: sampler")
        known = known_options()
        given = {key: value for key, value in record.items() if key in known}
        spec = spec_of({**given, "sampler": sampler}, where)
        if names := spec.open:
            raise ValueError(f"{where}: {names[0]} is left open")
        return spec


def spec_of(options: Mapping[str, Any], where: str) -> RunSpec:
    """Returns `RunSpec.of` options as a file has them, each checked against its type.

    Raises:
      ValueError: as for `RunSpec.of`, or for a value of another type; the line begins with `where`.
    """
    known, given = known_options(), dict(options)
    for name, value in given.items():
        if name in known and value is not None:
            value = tuple(value) if isinstance(value, list) else value
            given[name] = checked(value, known[name].type, f"{where}, {name}")
    try:
        return RunSpec.of(**given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


@dataclass(frozen=True)
class Option:
    """One setting of a run by the name that commands, files and records have for it."""

    type: Any
    default: Any
    """None where it has none."""
    help: tuple[type, str]
    """The class, and its field, below which its help stands; of a flag, the class and ""."""
    attribute: str = ""
    """Field that it sets."""
    part: str | None = None
    """Field of `RunSpec` whose choice it is of; None for one of its own."""
    owners: tuple[type, ...] = ()
    """Classes that have it."""
    selects: bool = False
    """Whether it says which class it is."""
    chooser: str = ""
    """Option that chooses one that has it, in words."""


_BY_NAME = ("tables", "optimizer")
"""Fields of `RunSpec` whose class an option of that name names; others are chosen by what it has
to be told, or by its flag."""

_FLAGS: dict[type, str] = {NonPrivate: "non_private", Secure: "secure_noise"}


@functools.cache
def _choices() -> dict[str, tuple[type, ...]]:
    """Returns the fields of `RunSpec` that hold one of several classes, with these."""
    parts = {name: get_args(hint) for name, hint in field_types(RunSpec).items()}
    return {
        name: kinds
        for name, kinds in parts.items()
        if kinds and all(map(dataclasses.is_dataclass, kinds))
    }


def _name(one: dataclasses.Field) -> str:
    return one.metadata.get("option") or one.name


def _choosing(member: type) -> list[str]:
    """Returns the options by which a class is chosen that no name chooses."""
    needed = [f for f in dataclasses.fields(member) if f.default is MISSING]
    return [_FLAGS[member]] if member in _FLAGS else list(map(_name, needed))


@functools.cache
def known_options() -> dict[str, Option]:
    """Returns every option of a run by its name."""
    found: dict[str, Option] = {}
    hints = field_types(RunSpec)
    for own in dataclasses.fields(RunSpec):
        part = own.name
        if part not in _choices():
            default = None if own.default is MISSING else own.default
            found[_name(own)] = Option(hints[part], default, (RunSpec, part), part)
            continue
        members = _choices()[part]
        if part in _BY_NAME:
            names = tuple(member.__name__.lower() for member in members)
            named, place = type(own.default).__name__.lower(), (RunSpec, part)
            found[part] = Option(Literal[names], named, place, part=part, selects=True)
        for member in members:
            if member in _FLAGS:
                found[_FLAGS[member]] = Option(bool, False, (member, ""), part=part, selects=True)
            types = field_types(member)
            for one in dataclasses.fields(member):
                before = found.get(_name(one))
                owners = (*(before.owners if before else ()), member)
                chooser = " or ".join(_choosing(member))
                if part in _BY_NAME:
                    chooser = f"{part} {' or '.join(owner.__name__.lower() for owner in owners)}"
                default = None if one.default is MISSING else one.default
                kind = types[one.name] | None if default is None else types[one.name]
                help = before.help if before else (member, one.name)
                found[_name(one)] = Option(
                    kind, default, help, one.name, part, owners, chooser=chooser
                )
    return found


def _chosen(name: str, members: tuple[type, ...], given: Mapping[str, Any]) -> type:
    """Returns the class that options choose for a field of `RunSpec`."""
    default = next(f.default for f in dataclasses.fields(RunSpec) if f.name == name)
    if name in _BY_NAME:
        by_name = {member.__name__.lower(): member for member in members}
        chosen = given.get(name, type(default).__name__.lower())
        _refuse_unless(chosen in by_name, name, f"be one of {', '.join(by_name)}", chosen)
        return by_name[chosen]
    choosing = {option: member for member in members for option in _choosing(member)}
    found = [member for option, member in choosing.items() if option in given]
    if len(found) == 1 or (not found and default is not MISSING):
        return found[0] if found else type(default)
    *names, last = choosing
    number = "exactly" if default is MISSING else "at most"
    raise ValueError(f"give {number} one of {', '.join(names)} and {last}")


def sampler_name(record: Mapping[str, Any], where: str) -> str:
    """Returns the name of the sampler in the record of a spec.

    Raises:
      ValueError: if there is none; the line begins with `where`.
    """
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
    """Returns a digest of what `config.json` holds, wherever the data lie."""
    kept = dict(record)
    task = kept.get("task")
    if isinstance(task, dict) and isinstance(task.get("settings"), dict):
        settings = {name: value for name, value in task["settings"].items() if name != "data"}
        kept["task"] = {**task, "settings": settings}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
