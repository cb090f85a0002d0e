"""Questions about a run: `dpsgd train`, `audit`, `epsilon`, `calibrate` and `compare`."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from accounting.records import (
    Count,
    Ge,
    Gt,
    Positive,
    build,
    field_texts,
    field_types,
    near,
)
from dpsgd.files import check_writable
from dpsgd.gradients.rules import FLAT
from dpsgd.runs.spec import PARTS, Auto, Dense, RunSpec, known_options
from dpsgd.runs.support import check
from experiments.cli import outputs
from experiments.cli.options import (
    Option,
    look_in_the_current_folder,
    made,
    options_of,
    word_of,
)
from experiments.cli.questions import Question
from experiments.cli.questions.directories import Devices, LogTo
from experiments.cli.tasks import DEFAULT, find_task, needs_data
from samplers import Population, UnitTree
from samplers.settings import DEFAULTS, SETTINGS, SamplerSettings, kind_of, settings_of
from samplers.tree import TreeShape

FOR_PROGRAMS = {
    "checkpoint_seconds": "the default suits runs of any length",
    "clip_gamma": "the default suits gradients of any size",
    "clip_shares": "groups get equal shares",
    "coefficients": "--bands has the square root's",
    "flush_every": "it follows from the tables' size",
    "init_seed": "only repeated runs need several",
    "optimistic": "it serves studies of shuffling",
}
"""Options of a run that Python and sweeps have and `dpsgd train` has not, and why."""

ORDER = (
    *("options", "sampler options", "privacy options", "optimizer options", "task options"),
    *("run options", "clipping options", "average options", "noise options", "tables options"),
)
"""Groups of options, as the help shows them: what a newcomer needs first, and clusters last."""

_GROUPS = {"target_delta": "privacy", "l2_clip_norm": "optimizer"}
"""Where options of no part of `RunSpec` stand; all others stand in "run"."""


# --- Samplers and runs as options -----------------------------------------------------------------


def sampler_kind(name: str) -> type[SamplerSettings]:
    """Returns the settings of a sampler of the package, or of another module.

    Raises:
      ValueError: If there is no such sampler.
    """
    if ":" in name:
        look_in_the_current_folder()
        return settings_of(kind_of(name, execute=True))
    if name not in SETTINGS:
        raise ValueError(f"--sampler {name}{near(name, SETTINGS)} (your own: module:Class)")
    return SETTINGS[name]


def sampler_options(name: str | None) -> list[Option]:
    """Returns the option of a sampler's name and its settings; those of all if none is named."""
    names = ", ".join(SETTINGS)
    text = f"Sampler, also as sampler:NAME: {names}, or your own as module:Class. "
    text += "balls-and-bins and poisson need the least noise."
    found = {"sampler": Option("sampler", str, MISSING, text)}
    kinds = [sampler_kind(name)] if name else list(SETTINGS.values())
    owners: dict[str, list[str]] = {}
    for kind in kinds:
        texts = field_texts(kind.sampler)
        for one in dataclasses.fields(kind):
            text, default = texts.get(one.name, ""), one.default
            if one.name in DEFAULTS:
                chosen = f"chosen by the task in `dpsgd train`, else {DEFAULTS[one.name]}"
                text = f"{text.rstrip('.')}. Default: {chosen}."
            if not name and default is MISSING:
                default = None
            hint = field_types(kind)[one.name]
            option = Option(one.name, hint, default, with_names(text), "sampler options")
            found.setdefault(one.name, option)
            owners.setdefault(one.name, []).append(kind.name)
    for option_name, having in owners.items():
        if len(having) < len(kinds):
            text = f"{found[option_name].text} (Of {', '.join(having)}.)"
            found[option_name] = dataclasses.replace(found[option_name], text=text)
    return list(found.values())


def run_options(*names: str, **defaults: Any) -> dict[str, Any]:
    """Returns options of a run with their defaults, or others; MISSING of one that is required.

    >>> run_options("target_delta", calibration="none")
    {'target_delta': None, 'calibration': 'none'}
    """
    return {**{name: known_options()[name].default for name in names}, **defaults}


def options_of_run(defaults: Mapping[str, Any]) -> list[Option]:
    """Returns options of a run, each in the group of its part of `RunSpec`."""
    found = []
    for name, default in defaults.items():
        option = known_options()[name]
        kinds = (part for part, kinds in PARTS.items() if option.owner in kinds.values())
        part = name if name in PARTS else next(kinds, _GROUPS.get(name, "run"))
        about = (option.owner.__doc__ or "").partition("\n")[0]
        text = with_names(field_texts(option.owner).get(option.field, about))
        found.append(Option(name, option.type, default, text, f"{part} options"))
    return found


def with_names(text: str) -> str:
    """Returns a text with names of options as a command has them."""
    of_samplers = (one.name for kind in SETTINGS.values() for one in dataclasses.fields(kind))
    known = {*known_options(), *of_samplers}
    return re.sub(
        r"\b[a-z0-9]+(_[a-z0-9]+)+\b",
        lambda found: f"--{found[0].replace('_', '-')}" if found[0] in known else found[0],
        text,
    )


@dataclass(frozen=True, kw_only=True)
class AboutRun(Question):
    """A run, by its sampler and its options."""

    sampler: SamplerSettings
    run_options: Mapping[str, Any]

    MADE: ClassVar[tuple[str, ...]] = ("sampler", "run_options", "settings")
    ABOUT_RUN: ClassVar[bool] = True

    @classmethod
    def offered(cls) -> dict[str, Any]:
        """Returns the options of a run that the command has, with their defaults."""
        raise NotImplementedError

    @classmethod
    def options(cls, words: Sequence[str]) -> list[Option]:
        """Returns the command's own options, the sampler's and the run's."""
        offered = cls.offered()
        drawn = sampler_options(word_of(words, "sampler"))
        # The length of a cycle follows from the bands.
        drawn = [one for one in drawn if one.name != "cycle_length" or "bands" not in offered]
        return joined_options([*options_of(cls), *drawn, *options_of_run(offered)], "sampler")

    @classmethod
    def elsewhere(cls, name: str) -> str:
        """Returns which sampler has an option, or that programs set it."""
        if name in known_options() and name not in cls.offered():
            return (
                f"Python and the files of sweeps have {name} ({FOR_PROGRAMS.get(name, 'RunSpec')})"
            )
        owners = [key for key, kind in SETTINGS.items() if name in kind.__dataclass_fields__]
        return f"it goes with sampler {' or '.join(owners)}" if owners else ""

    @classmethod
    def of(cls, values: Mapping[str, Any], **others: Any) -> Any:
        """Returns what is asked by values of the options."""
        kind = sampler_kind(values["sampler"])
        names = [one.name for one in dataclasses.fields(kind) if one.name in values]
        return super().of(
            values,
            sampler=build(kind, {name: values[name] for name in names}),
            run_options={name: values[name] for name in cls.offered()},
            **others,
        )

    def spec(self) -> RunSpec:
        """Returns the run that is asked about.

        Raises:
          ValueError: For choices that do not go together.
        """
        check(spec := RunSpec.of(self.sampler, **self.run_options))
        return spec


def joined_options(options: Sequence[Option], part: str) -> list[Option]:
    """Returns options by their groups, see `ORDER`.

    Raises:
      ValueError: If a setting of a sampler or a task is called as another option.
    """
    names = [option.name for option in options]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"--{part}: its setting {twice[0]} is called as one of the command's own: rename it"
        )
    last = len(ORDER)
    return sorted(options, key=lambda o: ORDER.index(o.group) if o.group in ORDER else last)


@dataclass(frozen=True, kw_only=True)
class OfTask(AboutRun):
    """A run of a task.

    Attributes:
      task: Task to train: clicks, images, ratings, or your own as module:object (imported from the
        current folder or Python's path). Its settings are further options.
    """

    task: str = DEFAULT
    settings: Mapping[str, Any]

    PLACED: ClassVar[bool] = True

    @classmethod
    def options(cls, words: Sequence[str]) -> list[Option]:
        """Returns the options of the command, with the settings of the task that words name."""
        found = super().options(words)
        kind = find_task(word_of(words, "task") or DEFAULT)
        for one in options_of(kind, "task options") if isinstance(kind, type) else ():
            if one.name == "data":
                default = None if one.default is MISSING and not cls.PLACED else one.default
                one = dataclasses.replace(one, place=cls.PLACED, default=default)
            found.append(one)
        return joined_options(found, "task")

    @classmethod
    def of(cls, values: Mapping[str, Any], **others: Any) -> Any:
        """Returns what is asked by values of the options."""
        kind = find_task(values["task"])
        names = [one.name for one in options_of(kind)] if isinstance(kind, type) else []
        settings = {name: values[name] for name in names}
        return super().of(values, settings=settings, **others)

    @cached_property
    def subject(self) -> Any:
        """Task that is asked for."""
        found = find_task(self.task)
        return made(found, self.settings) if isinstance(found, type) else found

    @property
    def lacks_data(self) -> bool:
        """Whether the task needs data, and none are given."""
        found = find_task(self.task)
        return isinstance(found, type) and needs_data(found) and self.settings["data"] is None


@dataclass(frozen=True, kw_only=True)
class OfSizes(AboutRun):
    """The run that is asked about, of data that are known by public sizes alone.

    Attributes:
      num_examples: Number of training examples (public).
      unit: Meaning of one row. user: all data of one user, clipped as one.
      max_contributions: Largest number of examples of one user, for user-poisson.
      num_users: Number of users, for the default delta of user-poisson.
      sizes: Children per unit on each level, for samplers of units within units: on the path of the
        example that is drawn most often, and the smallest where sizes differ.
      units: Name of the units on each level, for the guarantee's sentence.
      largest_unit: Examples of the largest unit. Default: all units are equally large.
    """

    num_examples: Count
    unit: Literal["example", "user"] = "example"
    max_contributions: Count | None = None
    num_users: Count | None = None
    sizes: tuple[Count, ...] = ()
    units: tuple[str, ...] = ()
    largest_unit: Count | None = None

    def population(self, *, drawn: bool = False) -> Population:
        """Returns what is drawn from.

        Args:
          drawn: Whether it is, in which case all units of a level have one size.

        Raises:
          ValueError: for sizes that no data have, or that the sampler does not go by.
        """
        levels, needed = len(self.sizes) - 1, self.sampler.of_data()
        for name, given in {
            "tree": self.sizes,
            "max_contributions": self.max_contributions,
            "num_users": self.num_users,
        }.items():
            option = "--sizes" if name == "tree" else f"--{name.replace('_', '-')}"
            if given and name not in needed:
                raise ValueError(f"sampler:{self.sampler.name} takes no {option}")
            if not given and name in needed and name != "num_users":
                raise ValueError(f"sampler:{self.sampler.name} needs {option}")
        if self.units and len(self.units) != levels:
            raise ValueError(
                f"--units needs {max(levels, 0)} names, one for each level of --sizes above the "
                f"examples, got {self.units}"
            )
        if self.sizes and self.unit != "example":
            raise ValueError(f"--unit {self.unit}: the rows of --sizes are examples")
        if self.largest_unit is not None and self.largest_unit < (*self.sizes, 1)[levels]:
            raise ValueError(f"--largest-unit is less than the smallest unit: {self.largest_unit}")
        tree: UnitTree | TreeShape | None = None
        names = self.units or ("unit",) * levels
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
        return Population(
            self.num_examples, self.unit, self.max_contributions, self.num_users, tree
        )


@dataclass(frozen=True, kw_only=True)
class Train(OfTask):
    """Train a task with differential privacy and write a run directory.

    With a sampler or a task, --help lists their options alone.

    Batch size, epochs, clipping norm and learning rate that you omit are chosen before the run from
    the number of rows and the guarantee, and recorded; the rule was found on public data. Choosing
    them by results on private rows costs privacy that the guarantee does not cover.

    Attributes:
      out: Run directory to create; must not exist.
      begin: Create the run directory and take no step, so that `dpsgd batches` can draw batches
        ahead; `dpsgd resume` then trains.
      dry_run: Print steps, padding, parameters, memory, measured seconds per step, hours and the
        guarantee. Uses generated rows; nothing is trained or written, and no private row is read.
      log_to: Also send the rows of training_log.csv (steps, epsilon so far, examples per second) to
        this program.
    """

    out: Path
    begin: bool = False
    dry_run: bool = False
    log_to: LogTo | None = None
    devices: Devices = field(default_factory=Devices)

    @classmethod
    def offered(cls) -> dict[str, Any]:
        """Returns all options of a run but those that the command leaves to programs."""
        known = known_options()
        return {n: known[n].default for n in known if n not in {"sampler", *FOR_PROGRAMS}}

    def check(self) -> None:
        """Refuses a run that cannot be, before anything that trains is imported."""
        if not self.dry_run:
            check_writable(self.out)
        check(self.spec(), getattr(self.subject, "num_examples", None))


@dataclass(frozen=True, kw_only=True)
class Audit(OfSizes, OfTask):
    """Look for evidence that a run costs more privacy than its sampler's guarantee says.

    Without --black-box: seconds, the program that trains on neighbouring batches under equal noise,
    the noise's law and the sampler's. With it: minutes, a lower bound on epsilon from many whole
    runs.
    The exit status is 1 if a violation is found.

    --task NAME says whose step. Its rows are generated, so that nothing that is printed depends on
    private ones; a store is read for its columns alone.

    Attributes:
      claim: Test the run against the guarantee of this sampler in place of its own, for example
        shuffled batches against Poisson's guarantee.
      black_box: Compute a lower bound on epsilon from the outputs of whole training runs.
      trials: Runs of the black-box audit, in each of its two worlds.
      plot: Figure of the black-box audit: .png, .pdf or .svg.
      overwrite: Replace an existing figure.
    """

    claim: str | None = None
    black_box: bool = False
    trials: Count = 200_000
    plot: Path = Path("audit.png")
    overwrite: bool = False

    PLACED: ClassVar[bool] = False

    @classmethod
    def offered(cls) -> dict[str, Any]:
        """Returns options of a run that change its program or its draws."""
        return run_options(
            *("bands", "tables", "clipping", "clip_groups"),
            *("train", "compute", "microbatch_size", "target_delta"),
            **{"noise_multiplier": MISSING, "l2_clip_norm": 1.0, "calibration": "none"},
        )

    def check(self) -> None:
        """Refuses what neither audit looks at."""
        spec = self.spec()
        if self.claim is not None and self.claim not in SETTINGS:
            raise ValueError(f"--claim must be one of {', '.join(SETTINGS)}, got {self.claim}")
        if isinstance(spec.tables, Auto):
            raise ValueError("--tables auto is what a run resolves by its rows: give dense or lazy")
        if not self.black_box:
            return
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
        outputs.check(self.plot, outputs.PICTURES, "--plot", overwrite=self.overwrite)


@dataclass(frozen=True, kw_only=True)
class Epsilon(OfSizes):
    """Print the certified epsilon of a run, as [lower, upper].

    Attributes:
      mean_trials: Also price private random search: the best of a random number of such runs is
        released, and this is the mean of that number.
      trials_shape: Shape of the distribution of the number of trials: 0 is logarithmic (cheapest),
        1 geometric.
    """

    mean_trials: Annotated[float | None, Gt(1)] = None
    trials_shape: Annotated[float, Ge(0)] = 0.0

    @classmethod
    def offered(cls) -> dict[str, Any]:
        """Returns options of a run that its cost depends on."""
        return run_options("target_delta", noise_multiplier=MISSING, calibration="none")

    def check(self) -> None:
        """Refuses a shape without the search that it is of."""
        if self.mean_trials is None and self.trials_shape:
            raise ValueError("--trials-shape is of the search of --mean-trials: give both")


@dataclass(frozen=True, kw_only=True)
class Calibrate(OfSizes):
    """Print the smallest noise multiplier that certifies the wanted epsilon."""

    @classmethod
    def offered(cls) -> dict[str, Any]:
        """Returns options of a run that its noise depends on."""
        return run_options("target_delta", target_epsilon=MISSING, calibration="none")


@dataclass(frozen=True, kw_only=True)
class Compare(Question):
    """Print and draw the certified epsilon of every sampler over the noise multiplier.

    Attributes:
      num_examples: Number of training examples (public).
      batch_size: Expected batch size.
      epochs: Number of passes over the examples.
      target_delta: Delta of the guarantee. Default: min(1e-5, n^-1.1) for n examples, rounded down
        to one digit.
      noise_multiplier: Noise multipliers to evaluate.
      plot: Figure to draw: .png, .pdf or .svg.
      overwrite: Replace an existing figure.
    """

    num_examples: Count
    batch_size: Count = 1024
    epochs: Count = 1
    target_delta: Positive | None = None
    noise_multiplier: tuple[Positive, ...] = (0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0)
    plot: Path | None = None
    overwrite: bool = False

    ABOUT_RUN: ClassVar[bool] = True

    def check(self) -> None:
        """Refuses a run that no sampler draws, and a figure that cannot be written."""
        if self.plot is not None:
            outputs.check(self.plot, outputs.PICTURES, "--plot", overwrite=self.overwrite)
        if not self.noise_multiplier:
            raise ValueError("--noise-multiplier needs at least one number")
        sampler = SETTINGS["shuffle"](batch_size=self.batch_size, epochs=self.epochs)
        sampler.build(Population(self.num_examples), self.delta)

    @property
    def delta(self) -> float:
        """Delta of the guarantee."""
        sampler = SETTINGS["shuffle"](batch_size=self.batch_size, epochs=self.epochs)
        spec = RunSpec.of(sampler, non_private=True, target_delta=self.target_delta)
        return spec.delta_of(Population(self.num_examples))
