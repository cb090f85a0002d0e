"""Questions about privacy costs: `dpsgd epsilon`, `calibrate` and `compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from accounting.records import Count, Ge, Gt, Positive
from dpsgd.runs.spec import OWN, RunSpec
from experiments.cli.options import Option
from experiments.cli.questions import Drawn
from experiments.cli.questions.about_runs import (
    OfSizes,
    read_options_of_run,
    run_options,
    with_options_of_run,
)
from experiments.cli.tasks import DEFAULT, find_task, load_kind
from samplers import Population
from samplers.settings import SETTINGS, settings_of


@dataclass(frozen=True, kw_only=True)
class Epsilon(OfSizes):
    """Print the certified epsilon of a run, as [lower, upper].

    Attributes:
      mean_trials: Mean number of runs of a private random search, which releases the best of a
        random number of such runs. Also prints the cost of the search.
      trials_shape: Shape of the distribution of the number of trials: 0 is logarithmic (cheapest),
        1 geometric.
      peer: Also print the epsilon that this library computes for the same sampler and noise.
    """

    mean_trials: Annotated[float | None, Gt(1)] = None
    trials_shape: Annotated[float, Ge(0)] = 0.0
    peer: Literal["dp_accounting"] | None = None

    @classmethod
    def offered(cls) -> dict[str, Any]:
        """Returns the run options that determine its cost."""
        return run_options("target_delta", "noise", noise_multiplier=MISSING, calibration="none")

    def check(self) -> None:
        """Refuses a shape of trials without a mean."""
        if self.mean_trials is None and self.trials_shape:
            raise ValueError("--trials-shape needs --mean-trials, the mean number of trials")


@dataclass(frozen=True, kw_only=True)
class Calibrate(OfSizes):
    """Print the smallest noise multiplier that certifies the wanted epsilon."""

    @classmethod
    def offered(cls) -> dict[str, Any]:
        """Returns the run options that determine its noise."""
        return run_options("target_delta", "noise", target_epsilon=MISSING, calibration="none")


@dataclass(frozen=True, kw_only=True)
class Compare(Drawn):
    """Print and draw the certified epsilon of every sampler over the noise multiplier.

    With --target-epsilon, print the noise multiplier that each sampler needs. With --train, also
    train models at this noise, and print their metric with its standard error.

    Attributes:
      num_examples: Number of training examples (public). Default: the training rows of --train.
      batch_size: Expected batch size.
      epochs: Number of passes over the examples.
      target_delta: Delta of the guarantee. Default: min(1e-5, n^-1.1) for n examples, rounded down
        to one digit.
      noise_multiplier: Noise multipliers to evaluate.
      target_epsilon: Epsilons to reach, in place of noise multipliers. Each result is an
        interval: its upper end is proved to suffice, and its lower end is proved to be too little.
      sampler: Samplers to compare, your own as module:Class.
      train: Store of clicks (see `dpsgd prepare`) on which models are also trained. With
        --target-epsilon, a sampler with a wide noise interval, such as shuffle, trains at both
        ends.
      out: Folder of the runs of --train, a sweep; the same command resumes it.
      repetitions: Runs of --train at each point.
    """

    num_examples: Count | None = None
    batch_size: Count = 1024
    epochs: Count = 1
    target_delta: Positive | None = None
    noise_multiplier: tuple[Positive, ...] = (0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0)
    target_epsilon: tuple[Positive, ...] = ()
    sampler: tuple[str, ...] = ("deterministic", "shuffle", "poisson", "balls-and-bins")
    train: Path | None = None
    out: Path | None = None
    repetitions: Count = 3
    run_settings: Mapping[str, Any]

    MADE: ClassVar[tuple[str, ...]] = ("run_settings",)
    ABOUT_RUN: ClassVar[bool] = True

    @classmethod
    def options(cls, words: Sequence[str]) -> list[Option]:
        """Returns the options of the command and of the parts of its runs."""
        return with_options_of_run(super().options(words), cls._offered(), words)

    @classmethod
    def build(cls, values: Mapping[str, Any], **others: Any) -> Any:
        """Builds the question from option values."""
        defaults = cls._offered()
        changed_options = {
            name: value
            for name, value in read_options_of_run(defaults, values).items()
            if value != defaults[name]
        }
        return super().build(values, run_settings=changed_options, **others)

    @classmethod
    def _offered(cls) -> dict[str, Any]:
        return run_options(*OWN, "learning_rate")

    def check(self) -> None:
        """Refuses impossible runs and figures."""
        super().check()
        if self.train is None and self.num_examples is None:
            raise ValueError("dpsgd compare needs --num-examples INT, or --train STORE")
        if (self.train is None) != (self.out is None):
            raise ValueError("--train STORE and --out FOLDER belong together; pass both or neither")
        if self.num_examples not in (None, self.rows):
            raise ValueError(
                f"--num-examples {self.num_examples} differs from the {self.rows:,} training rows "
                f"of {self.train}; leave it out"
            )
        if not self.noise_multiplier:
            raise ValueError("--noise-multiplier needs at least one number")
        if self.target_epsilon and self.noise_multiplier != type(self).noise_multiplier:
            raise ValueError("give --noise-multiplier or --target-epsilon, not both")
        unpriced = self.run_settings.keys() - {"noise"}
        if self.train is None and (flag := min(unpriced, default="")):
            raise ValueError(
                f"--{flag.replace('_', '-')} changes no privacy cost; leave it out, or pass "
                "--train STORE"
            )
        for name in self.sampler:
            settings_of(load_kind("sampler", name))
        self.spec.sampler.build(Population(self.rows), self.delta)

    @cached_property
    def rows(self) -> int:
        """Number of training examples, counted in a store to train on."""
        if self.train is None:
            assert self.num_examples is not None, "checked"
            return self.num_examples
        return find_task(DEFAULT)(self.train).num_examples

    @cached_property
    def spec(self) -> RunSpec:
        """Run of the shuffle sampler; each compared sampler replaces it."""
        sampler = SETTINGS["shuffle"](batch_size=self.batch_size, epochs=self.epochs)
        delta = self.target_delta
        return RunSpec.of(sampler, noise_multiplier=1.0, target_delta=delta, **self.run_settings)

    @property
    def delta(self) -> float:
        """Delta of the guarantee."""
        return self.spec.delta_of(Population(self.rows))
