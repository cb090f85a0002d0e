"""Settings of a run: nested frozen dataclasses that check their values.

None, "auto" and `Auto` leave a choice open for `dpsgd.runs.resolve`. Each setting has one option
name in commands, sweep files and records. `RunSpec.of` converts options to the classes here, and
`RunSpec.options` converts them back.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from accounting import default_delta
from accounting.checks import check_guarantee_delta
from accounting.records import (
    Count,
    Ge,
    Gt,
    Le,
    Lt,
    Must,
    Named,
    Positive,
    Record,
    Seed,
    field_types,
    named,
    read,
)
from dpsgd.core.noise import Independent, Noise
from dpsgd.engine.lazy.gaps import LARGEST
from dpsgd.gradients.rules import FLAT, RULES, ClippingRule
from dpsgd.noise.correlated import BandedToeplitz, banded_square_root
from dpsgd.noise.registry import NOISES
from dpsgd.removed import removal_notice
from dpsgd.runs.records import build, checked, near, to_json
from samplers import BatchSampler, Population
from samplers.registry import Registry
from samplers.settings import SAMPLERS, SamplerSettings, settings_of

if TYPE_CHECKING:
    import optax

_INDEPENDENT = Independent()
_FIELDS = "__dataclass_fields__"
_OPEN = "open"
"""Mark of a field whose None leaves a choice to `dpsgd.runs.resolve`."""

Rate = Annotated[float | None, Gt(0), _OPEN]
Share = Annotated[float, Ge(0), Lt(1)]


def _is_pattern(text: str | None) -> bool:
    try:
        return text is None or bool(re.compile(text))
    except re.error:
        return False


@dataclass(frozen=True)
class NoiseMultiplier(Record):
    """Given noise multiplier.

    Attributes:
      noise_multiplier: Standard deviation of the noise divided by l2_clip_norm.
    """

    noise_multiplier: Positive


@dataclass(frozen=True)
class TargetEpsilon(Record):
    """Smallest noise multiplier that certifies an epsilon.

    Attributes:
      epsilon: Largest epsilon; the run uses the smallest noise multiplier that certifies it.
      optimistic: Calibrate the lower end of the certified interval to target_epsilon. The guarantee
        stays the upper end, which may exceed target_epsilon. For studies of shuffling, whose two
        ends are far apart.
    """

    epsilon: Annotated[Positive, Named("target_epsilon")]
    optimistic: bool = False


@dataclass(frozen=True)
class NonPrivate:
    """Train without clipping or noise; the run has no guarantee."""


@dataclass(frozen=True)
class Banded(Record):
    """Noise correlated over consecutive steps, see `dpsgd.BandedToeplitz`.

    >>> Banded(2, coefficients=(1.0, 0.5)).law.bands
    2

    Attributes:
      bands: Number of steps b over which noise is correlated, so that more of it cancels in SGD's
        iterates. Sets the sampler's cycle_length to b. auto: the power of two with the least error
        in SGD's iterates at the same guarantee (always 1 with Adam). Default: independent noise.
      coefficients: The b coefficients of banded noise, see `dpsgd.BandedToeplitz`. Default: the
        first b coefficients of the power series of (1 - x)^(-1/2).
    """

    bands: Count | Literal["auto"]
    coefficients: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coefficients is not None and len(self.coefficients) != self.bands:
            raise ValueError(
                f"coefficients must have {self.bands} entries, one per band, got "
                f"{len(self.coefficients)}"
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
class _TableSettings(Record):
    """Settings of tables that have a separate learning rate.

    Attributes:
      learning_rate: Peak learning rate of lazy tables. Default: chosen by the task.
      momentum: Momentum of lazy tables, in [0, 1). Default: chosen by the task, else 0.
      flush_every: Steps between flushes of lazy tables: all deferred noise is drawn and a
        checkpoint is written. Default: flushes take at most 5 % of the time.
    """

    learning_rate: Annotated[Rate, Le(LARGEST), Named("tables_learning_rate")] = None
    momentum: Annotated[Share | None, _OPEN, Named("tables_momentum")] = None
    flush_every: Annotated[Count | None, _OPEN] = None


@dataclass(frozen=True)
class Lazy(_TableSettings):
    """Embedding tables with deferred noise, trained by SGD at a separate learning rate."""


@dataclass(frozen=True)
class Auto(_TableSettings):
    """`Lazy` if the tables are much larger than a batch, else `Dense`."""


@dataclass(frozen=True)
class Optimizer(Record, abc.ABC):
    """Base of a run's optimizers, frozen dataclasses of their settings.

    Runs whose optimizers differ in the learning rate alone share a compiled program.

    Attributes:
      learning_rate: Peak learning rate. Default: chosen by the task, else 3e-3 for Adam and 1 -
        momentum for SGD. Your own optimizer needs one.
      schedule: Learning rate schedule; a cosine falls to zero at the last step.
    """

    learning_rate: Rate = None
    schedule: Literal["cosine", "constant"] = field(default="cosine", kw_only=True)

    @property
    def numbers(self) -> dict[str, float]:
        """Further settings that are arguments of the compiled program, by name."""
        return {}

    @abc.abstractmethod
    def transformation(self, step_size: Any) -> optax.GradientTransformation:
        """Returns the update rule, which reads the private mean gradient alone.

        Args:
          step_size: Learning rate, a traced number or a function of the step.
        """


class _OfOptax(Optimizer):
    """Base of optimizers that have the same name in optax."""

    @property
    def numbers(self) -> dict[str, float]:
        """Settings except learning rate and schedule; empty for a subclass from outside."""
        excluded = vars(self) if OPTIMIZERS.is_own(self) else ("learning_rate", "schedule")
        return {name: x for name, x in vars(self).items() if name not in excluded}

    def transformation(self, step_size: Any, **numbers: Any) -> optax.GradientTransformation:
        """Returns the update rule.

        Args:
          step_size: Learning rate, a traced number or a function of the step.
          **numbers: Traced numbers in place of those in `numbers`.
        """
        import optax

        return getattr(optax, type(self).__name__.lower())(step_size, **(self.numbers | numbers))


@dataclass(frozen=True)
class Adam(_OfOptax):
    """Adam with the usual betas and epsilon."""


@dataclass(frozen=True)
class AdamW(_OfOptax):
    """Adam with decoupled weight decay, as `optax.adamw`.

    Each step also subtracts step size times decay times parameter, from every trained parameter but
    lazy tables: a function of released parameters, which costs no privacy.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.

    Attributes:
      weight_decay: Decay of AdamW, relative to the step size.
    """

    weight_decay: Annotated[float, Ge(0)] = 1e-4


@dataclass(frozen=True)
class SGD(_OfOptax):
    """Stochastic gradient descent with optional momentum.

    Attributes:
      momentum: SGD momentum, in [0, 1).
    """

    momentum: Share = 0.0


@dataclass(frozen=True)
class LastStep:
    """Release the parameters of the last step."""


@dataclass(frozen=True)
class TailAverage(Record):
    """Release the mean of the parameters over the last steps.

    Attributes:
      tail: Release the mean of the parameters over this final share of the steps. Costs no privacy;
        works best with a constant schedule.
    """

    tail: Annotated[float, Gt(0), Le(1), Named("average_tail")]


@dataclass(frozen=True)
class MovingAverage(Record):
    """Release an exponential moving average of the parameters.

    Attributes:
      decay: Release the exponential moving average of the parameters with this decay, such as 0.99.
    """

    decay: Annotated[float, Ge(0), Le(0.999999), Named("average_decay")]


@dataclass(frozen=True)
class RunSpec(Record):
    """Settings of a training run; a task's rule chooses those left open.

    >>> from samplers.settings import SETTINGS
    >>> spec = RunSpec(SETTINGS["poisson"](), TargetEpsilon(3.0), optimizer=SGD(momentum=0.9))
    >>> spec == RunSpec.of(
    ...     sampler=SETTINGS["poisson"](), target_epsilon=3.0, optimizer="sgd", momentum=0.9
    ... )
    True

    Raises:
      ValueError: if a value is out of range; the message names the option.

    Attributes:
      sampler: Sampler that draws the batches and determines the privacy cost.
      privacy: Noise multiplier, given or calibrated to a target epsilon.
      noise: Noise of the steps: independent, or your own as module:Class.
      tables: How embedding tables are trained. dense: by the optimizer, with noise in every row at
        every step. lazy: by SGD; the noise of a row is drawn when the row is next read. The
        guarantee is the same, and the time of a step does not depend on the size of the tables.
        auto: lazy if the tables are much larger than a batch.
      optimizer: Optimizer of the private gradients: adam, adamw, sgd, or your own as module:Class.
      average: Released parameters: last step, tail average or moving average.
      clipping: How per-example gradients are clipped to l2_clip_norm. flat: the whole gradient.
        per-layer: each group of parameters to its own norm; the squares of these norms add up to
        l2_clip_norm squared. automatic: every gradient is scaled to about l2_clip_norm. Your own
        rule is module:Class. The privacy cost is the same.
      delta: Delta of the guarantee. Default: min(1e-5, n^-1.1) for n protected units, rounded down
        to one digit. 1/n is unsafe: publishing one random row satisfies it.
      l2_clip_norm: L2 norm to which each per-example gradient is clipped. Default: chosen by the
        task, else 4.
      calibration: Recalibrate predictions after training, from noisy sums over all training rows,
        because clipping biases them. platt: scale and shift of the logit; temperature: scale of the
        logits of several classes; affine: scale and shift of a predicted number. Epsilon covers
        training and calibration together. Default: the task's calibration if there are enough rows;
        none without privacy.
      microbatch_size: Examples whose gradients are computed together. Default: as many as fit in 2
        GiB, on a CPU at most 2048.
      compute: Floating-point type of the parameters inside the loss. Clipping, noise and the stored
        parameters stay in float32.
      checkpoint_seconds: Seconds between checkpoints, from which `dpsgd resume` continues.
      data_on: Memory that holds the training rows; from the host, rows are copied for each block of
        steps. Default: device, or host if the rows need more than half of the device's free memory.
      train: Train only the parameters whose names (such as dense.kernel) match this regular
        expression, for example 'logit|hidden'. The others keep their initial values, get no noise
        and do not count in the clipping norm.
      init_seed: Public seed of the initial parameters.
      init_from: Start from the parameters of a finished run, an exported model or a file .npz in
        place of fresh ones. The printed epsilon holds for rows that did not train that model; the
        guarantee's sentence also states the epsilon of rows that did.
      insecure_seed: Seed that makes sampling and noise reproducible, for debugging. Voids the
        guarantee.
      audit: Before training, check on generated rows that the compiled program and the sampler do
        what the guarantee assumes, and refuse to train otherwise. Takes seconds.
    """

    sampler: Any  # SamplerSettings, or a BatchSampler of the data's own size
    privacy: NoiseMultiplier | TargetEpsilon | NonPrivate
    noise: Noise | Banded = _INDEPENDENT
    tables: Dense | Lazy | Auto = Dense()
    optimizer: Optimizer = Adam()
    average: LastStep | TailAverage | MovingAverage = LastStep()
    clipping: ClippingRule = FLAT
    delta: Annotated[float | Literal["1/n"] | None, Named("target_delta")] = None
    l2_clip_norm: Rate = None
    calibration: Annotated[Literal["none", "platt", "temperature", "affine"] | None, _OPEN] = None
    microbatch_size: Count | None = None
    compute: Literal["float32", "bfloat16"] = "float32"
    checkpoint_seconds: Annotated[float, Ge(0)] = 120.0
    data_on: Literal["device", "host"] | None = None
    train: Annotated[str | None, Must("a regular expression", _is_pattern)] = None
    init_seed: Annotated[int, Ge(0), Lt(2**32)] = 0
    init_from: str | None = None
    insecure_seed: Seed | None = None
    audit: bool = True

    def __post_init__(self) -> None:
        for name, kinds in PARTS.items():
            choice = getattr(self, name)
            if name in OWN and isinstance(choice, OWN[name].base):
                OWN[name].check(type(choice))
            elif type(choice) not in kinds.values():
                named = ", ".join(kind.__name__ for kind in kinds.values())
                raise ValueError(f"{name} must be one of {named}, got {choice!r}")
        super().__post_init__()
        if not isinstance(self.sampler, SamplerSettings | BatchSampler):
            raise ValueError(
                'sampler must be settings, such as samplers.settings.SETTINGS["poisson"](), or a '
                f"BatchSampler, got {self.sampler!r:.80}"
            )
        if self.delta is not None and self.delta != "1/n":
            check_guarantee_delta(self.delta, "target_delta")

    @property
    def private(self) -> bool:
        """True if the run has noise."""
        return not isinstance(self.privacy, NonPrivate)

    @property
    def open(self) -> list[str]:
        """Names of the options that are left open for `resolve`."""
        sampler, noise = self.sampler, self.noise
        names = ["tables"] if isinstance(self.tables, Auto) else []
        names += sampler.open_sizes() if isinstance(sampler, SamplerSettings) else []
        for record in (self, self.optimizer, self.tables):
            hints, attributes = field_types(type(record)), named(type(record))
            names += [
                name
                for name, attribute in attributes.items()
                if _OPEN in getattr(hints[attribute], "__metadata__", ())
                and getattr(record, attribute) is None
            ]
        if isinstance(noise, Banded) and noise.law is None:
            names.append("bands")
        return names

    @classmethod
    def of(cls, sampler: Any, **options: Any) -> RunSpec:
        """Returns the spec for options of a command or file.

        Args:
          sampler: Sampler, or its settings.
          **options: Values by the names of `known_options`. None and default values are ignored;
            all other options must go together.

        Raises:
          ValueError: if an option is unknown, of another type, impossible, or belongs to a choice
            that was not made.

        >>> from samplers.settings import SETTINGS
        >>> RunSpec.of(SETTINGS["poisson"](), target_epsilon=3.0).privacy
        TargetEpsilon(epsilon=3.0, optimistic=False)
        """
        options_by_name, values = known_options(), dict[str, Any]()
        for name, value in options.items():
            if notice := removal_notice(name, value):
                raise ValueError(f"{name}={value} was {notice}")
            if name not in options_by_name:
                raise ValueError(f"{name} is unknown{near(name, options_by_name)}")
            value = tuple(value) if isinstance(value, list) else value
            if value is None or value == options_by_name[name].default:
                continue
            if name in OWN:
                values[name] = OWN[name].read(value, (name,))
            else:
                values[name] = read(options_by_name[name].type, value, (name,))
        sections = {}
        for section, kinds in PARTS.items():
            choices = [values.pop(section)] if section in values else []
            choices += [choice for choice in kinds if choice in values]
            (choice, *surplus) = choices or [next(iter(kinds))]
            if surplus or not (choices or "" in kinds or section in options_by_name):
                number = "at most" if "" in kinds else "exactly"
                names = [section] if section in options_by_name else []
                *names, last = filter(None, [*names, *kinds])
                raise ValueError(f"give {number} one of {', '.join(names)} and {last}")
            kind: Any = kinds[choice] if isinstance(choice, str) else type(choice)
            if isinstance(choice, str) and not dataclasses.fields(kind):
                values.pop(choice, None)
            attributes = part_options(kind)
            fields = {attributes[name]: values.pop(name) for name in attributes.keys() & values}
            make = kind if isinstance(choice, str) else functools.partial(replace, choice)
            sections[section] = make(**fields)
        own_attributes = named(cls)
        for name in values:
            if name not in own_attributes:
                raise ValueError(f"{name} goes with {_chooser(name)}: give it, or leave out {name}")
        return cls(
            sampler, **sections, **{own_attributes[name]: value for name, value in values.items()}
        )

    def options(self) -> dict[str, Any]:
        """Returns the options that make this spec.

        Defaults are included.

        >>> from samplers.settings import SETTINGS
        >>> RunSpec(SETTINGS["poisson"](), NonPrivate()).options()["optimizer"]
        'adam'
        """
        options: dict[str, Any] = {}
        for name, attribute in named(type(self)).items():
            value: Any = getattr(self, attribute)
            if name not in PARTS:
                options[name] = value
                continue
            choice = next((c for c, kind in PARTS[name].items() if kind is type(value)), None)
            attributes = part_options(type(value))
            if choice is None:  # shared options take their defaults
                defaults = {f.name: f.default for f in dataclasses.fields(value)}
                options[name] = replace(value, **{x: defaults[x] for x in attributes.values()})
            elif name in _NAMED:
                options[name] = choice
            elif choice and not dataclasses.fields(value):
                options[choice] = True
            options |= {key: getattr(value, x) for key, x in attributes.items()}
        return options

    def but(self, **options: Any) -> RunSpec:
        """Returns this spec with some options replaced.

        >>> from samplers.settings import SETTINGS
        >>> RunSpec(SETTINGS["poisson"](), NonPrivate()).but(average_tail=0.5).average
        TailAverage(tail=0.5)
        """
        return RunSpec.of(**{**self.options(), **options})

    def delta_of(self, population: Population) -> float:
        """Returns the delta of a run's guarantee for a population.

        Raises:
          ValueError: if delta is 1/n, and n is too small for a guarantee.
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
        """Returns the options as JSON values, which `from_record` reads back.

        The path `init_from` becomes absolute.
        """
        sampler = self.sampler
        if isinstance(sampler, SamplerSettings):
            terms = sampler.record()
        else:
            name = SAMPLERS.name_of(type(sampler))
            terms = {"of_these_data": True, "name": name, **sampler.terms()}
        options = {
            name: value if name not in OWN or isinstance(value, str) else _own_record(name, value)
            for name, value in self.options().items()
        }
        if self.init_from is not None:
            options["init_from"] = os.path.abspath(self.init_from)
        return to_json({**options, "sampler": terms})

    @classmethod
    def from_record(cls, record: Mapping[str, Any], where: str) -> RunSpec:
        """Returns the resolved spec in a record.

        The modules of parts from other packages must be imported (`samplers.registry`): reading
        a record executes no code.

        Args:
          record: Content of `config.json`.
          where: Prefix of error messages.

        Raises:
          ValueError: if the record is damaged, or leaves an option open.
        """
        fields = dict(checked(record.get("sampler"), Mapping[str, Any], f"{where}: sampler"))
        name = checked(fields.pop("name", None), str, f"{where}: sampler, name")
        try:
            is_built = checked(fields.pop("of_these_data", False), bool, "sampler")
            kind: Any = SAMPLERS.find(name)
            sampler = kind.from_terms(fields) if is_built else None
        except (TypeError, LookupError, ValueError) as error:
            raise ValueError(f"{where}: sampler: {error}") from None
        sampler = sampler or build(settings_of(kind), fields, f"{where}: sampler")
        options = {
            key: value
            for key, value in record.items()
            if key in known_options() or (value and removal_notice(key, value))  # `of` refuses it
        }
        try:
            spec = cls.of(**{**options, "sampler": sampler})
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if names := spec.open:
            raise ValueError(f"{where}: {names[0]} has no value")
        return spec


OPTIMIZERS = Registry("optimizer", Optimizer, {"adam": Adam, "adamw": AdamW, "sgd": SGD})
"""Optimizers by name."""

OWN: dict[str, Registry] = {"noise": NOISES, "optimizer": OPTIMIZERS, "clipping": RULES}
"""Registries of the parts of a spec that users may write, by option."""

REGISTRIES = {"sampler": SAMPLERS, **OWN}
"""Registries of all parts of a run that users may write, by option."""

PARTS: dict[str, Mapping[str, type]] = {
    "privacy": {
        "noise_multiplier": NoiseMultiplier,
        "target_epsilon": TargetEpsilon,
        "non_private": NonPrivate,
    },
    "noise": {"": Independent, "bands": Banded},
    "tables": {"dense": Dense, "lazy": Lazy, "auto": Auto},
    "optimizer": OPTIMIZERS.built_in,
    "average": {"": LastStep, "average_tail": TailAverage, "average_decay": MovingAverage},
    "clipping": RULES.built_in,
}
"""Built-in classes of each part of a spec, by the option that chooses a class ("" needs none); for
`_NAMED` parts, by the value of the option of that name."""

_NAMED = ("tables", "optimizer", "clipping")


class Option(NamedTuple):
    """A setting of a run, as commands, files and records name it."""

    type: Any
    default: Any
    """Default value; None without a default."""
    owner: type
    """Class that has the field, and its help text in its docstring."""
    field: str
    """Name of the field; "" for the class itself."""


@functools.cache
def known_options() -> dict[str, Option]:
    """Returns every option of a run by its name.

    >>> known_options()["momentum"].owner
    <class 'dpsgd.runs.spec.SGD'>
    """
    options: dict[str, Option] = {}

    def add(kind: type, name: str, attribute: str) -> None:
        bases = [base for base in kind.__mro__ if attribute in vars(base).get(_FIELDS, ())]
        owner = bases[-1]
        default = owner.__dataclass_fields__[attribute].default  # type: ignore[attr-defined]
        default = None if default is MISSING else default
        hint = field_types(owner)[attribute]
        hint = hint | None if default is None and hint is not Any else hint
        options.setdefault(name, Option(hint, default, owner, attribute))

    for name, attribute in named(RunSpec).items():
        if (kinds := PARTS.get(name)) is None:
            add(RunSpec, name, attribute)
            continue
        if name in _NAMED or name in OWN:
            choices = OWN[name].built_in if name in OWN else kinds
            names: Any = str if name in OWN else Literal[tuple(kinds)]
            options[name] = Option(names, next(iter(choices)), RunSpec, name)
        for choice, kind in kinds.items():
            if choice and not dataclasses.fields(kind) and name not in options:
                options[choice] = Option(bool, False, kind, "")
            for option, field_name in named(kind).items():
                add(kind, option, field_name)
    return options


def part_options(kind: type) -> dict[str, str]:
    """Returns the attributes of a part that options of a run set, by option.

    Other fields of a part from another package are its settings.
    """
    options, attributes = known_options(), named(kind) if dataclasses.is_dataclass(kind) else {}
    return {
        name: attribute
        for name, attribute in attributes.items()
        if name in options and issubclass(kind, options[name].owner)
    }


def _own_record(name: str, part: Any) -> dict[str, Any]:
    """Returns the record of a part from another package, without run options."""
    shared = part_options(type(part)).values()
    return {key: x for key, x in OWN[name].record(part).items() if key not in shared}


def _chooser(name: str) -> str:
    """Returns the choice, in words, that an option belongs to."""
    for section, kinds in PARTS.items():
        has = [choice for choice, kind in kinds.items() if name in named(kind)]
        if has:
            return " ".join([*([section] if section in _NAMED else []), " or ".join(has)])
    return "nothing"


def config_digest(record: Mapping[str, Any]) -> str:
    """Returns a digest of a configuration, without paths and requested options.

    >>> config_digest({"init_from": "a"}) == config_digest({"init_from": "b"})
    True
    """
    content = {name: value for name, value in record.items() if name != "requested"}
    task = content.get("task")
    if isinstance(task, dict) and isinstance(task.get("settings"), dict):
        settings = {name: value for name, value in task["settings"].items() if name != "data"}
        content["task"] = {**task, "settings": settings}
    if "init_from" in content:  # a ledger knows the parameters by their digest
        content["init_from"] = content["init_from"] is not None
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
