"""What a run is trained by where its user leaves it open: chosen once, before it begins.

All that a choice goes by is public: the number of rows, the guarantee that is wanted, and how long
a step takes on generated rows. `config.json` records plain numbers, and no resumed run chooses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpsgd.runs.step_sizes import of_lazy_tables
from samplers import Population
from samplers.settings import DEFAULTS, SamplerSettings

if TYPE_CHECKING:
    from dpsgd.runs.config import RunConfig


@dataclass(frozen=True)
class Settings:
    """What a run is trained by. The defaults are those of a task that recommends nothing."""

    batch_size: int = DEFAULTS["batch_size"]
    """Expected number of rows in a batch."""
    epochs: int = DEFAULTS["epochs"]
    """Passes over the rows."""
    l2_clip_norm: float = 4.0
    """Bound on the L2 norm of what is clipped as one, which without privacy nothing is."""
    learning_rate: float = 3e-3
    """Peak step size, here of Adam."""
    tables_learning_rate: float | None = None
    """Peak step size of lazy tables; None for that of `step_sizes.of_lazy_tables`."""
    tables_momentum: float = 0.0
    """Of lazy tables."""


@dataclass(frozen=True)
class Aim:
    """What settings are chosen for, all of it public."""

    num_examples: int
    """Training rows n."""
    target_delta: float
    """Delta of the guarantee."""
    noise_multiplier: float | None = None
    """Given; this, one of the targets, or none of the three: without privacy."""
    target_epsilon: float | None = None
    """To be certified of the whole run."""
    target_advantage: float | None = None
    """The same of the advantage of a membership attack, in (0, 1)."""
    batch_size: int | None = None
    """Given, if it is."""
    epochs: int | None = None
    """Given, if they are."""
    l2_clip_norm: float | None = None
    """Given, if it is."""
    most_epochs: int | None = None
    """For which there is time; None if nobody said how much."""
    optimizer: str = "adam"
    """Which it is: adam or sgd."""
    momentum: float = 0.0
    """Of SGD."""
    bands: int | str | None = None
    """Steps over which noise is correlated, "auto" if they are chosen later; None for one."""
    tables: str = "dense"
    """How tables are trained: dense, by the optimizer as all else, or lazy, by SGD of their own."""
    tables_momentum: float | None = None
    """Of lazy tables, if it is given."""

    @property
    def private(self) -> bool:
        """Whether there is any noise."""
        given = (self.noise_multiplier, self.target_epsilon, self.target_advantage)
        return any(value is not None for value in given)


def generic(aim: Aim) -> Settings:
    """Returns the settings for a task that recommends none.

    >>> few = generic(Aim(500, 1e-3, most_epochs=4))
    >>> few.batch_size, few.epochs  # no larger batches than there are rows
    (500, 4)
    """
    epochs = DEFAULTS["epochs"]
    return Settings(
        batch_size=min(DEFAULTS["batch_size"], aim.num_examples),
        epochs=epochs if aim.most_epochs is None else min(epochs, aim.most_epochs),
        learning_rate=default_rate(aim.optimizer, aim.momentum),
    )


def default_rate(optimizer: str, momentum: float) -> float:
    """Returns the peak step size where nobody chooses it.

    A gradient moves the parameters of SGD by 1 / (1 - momentum) times the step size in all.

    >>> default_rate("adam", 0.0), default_rate("sgd", 0.9)
    (0.003, 0.1)
    """
    return Settings.learning_rate if optimizer == "adam" else float(f"{1 - momentum:.6g}")


def open_settings(config: RunConfig) -> list[str]:
    """Returns the names of the settings that a configuration leaves open."""
    sampler = config.sampler
    sizes = sampler.open_sizes() if isinstance(sampler, SamplerSettings) else []
    names = ["l2_clip_norm", "learning_rate"]
    if config.tables == "auto":
        sizes = ["tables", *sizes]
    if config.tables == "lazy":
        names += ["tables_learning_rate", "tables_momentum", "flush_every"]
    return [*sizes, *(name for name in names if getattr(config, name) is None)]


def any_noise(config: RunConfig) -> RunConfig:
    """Returns a configuration of the same training, with noise that need not be found."""
    if config.non_private:
        return config
    if isinstance(bands := config.bands, int) and bands > 1 and config.coefficients is None:
        from dpsgd.noise.strategies import banded_square_root

        coefficients = tuple(banded_square_root(bands).coefficients)
        config = dataclasses.replace(config, coefficients=coefficients)
    if config.buffers is not None and config.weights is None:
        some = (0.5 / config.buffers,) * config.buffers
        config = dataclasses.replace(config, weights=some, decays=some)
    return dataclasses.replace(
        config,
        bands=None if bands == "auto" else bands,
        noise_multiplier=1.0,
        target_epsilon=None,
        target_advantage=None,
        calibration="none",
    )


def values(config: RunConfig, names: Iterable[str]) -> dict[str, Any]:
    """Returns settings of a configuration by name, of the sampler or its own."""
    return {name: getattr(config.sampler if name in DEFAULTS else config, name) for name in names}


_WORDS = {
    "batch_size": "batch size",
    "epochs": "epochs",
    "l2_clip_norm": "clipping norm",
    "learning_rate": "learning rate",
    "tables_learning_rate": "learning rate of tables",
    "tables_momentum": "momentum of tables",
    "flush_every": "steps between flushes",
}


def sentence(chosen: Mapping[str, Any]) -> str:
    """Returns what a run chose for people.

    Args:
      chosen: As `config.json` records it: "settings" by name, what the "noise" became if bands
        were asked for and what "tables" if that was left to the run, and, where time was limited,
        "budget_minutes" and "epoch_seconds".

    >>> sentence({"settings": {"batch_size": 1024, "learning_rate": 3e-3}})
    'chosen: batch size 1,024, learning rate 0.003'
    """
    found = [
        f"{_WORDS[name]} {value:{',' if isinstance(value, int) else 'g'}}"
        for name, value in chosen.get("settings", {}).items()
    ]
    if tables := chosen.get("tables"):
        found.append(f"tables {tables['tables']}, as {tables['why']}")
    if noise := chosen.get("noise"):
        bands, sigma = noise.get("bands", 1), noise["noise_multiplier"]
        of = f"of {bands:,} bands" if bands > 1 else "independent"
        if "buffers" in noise:
            of = f"of {noise['buffers']} buffers"
        why = f", as {noise['why']}" if "why" in noise else ""
        found.append(f"noise {of}, sigma {sigma:.4g}{why}")
    line = f"chosen: {', '.join(found)}"
    if "budget_minutes" in chosen:
        minutes, seconds = chosen["budget_minutes"], chosen["epoch_seconds"]
        line += f" (for {minutes:g} minutes, in which an epoch takes {seconds:.3g} s here)"
    return line


def choose(
    task: Any, config: RunConfig, population: Population, *, most_epochs: int | None = None
) -> RunConfig:
    """Returns a configuration that leaves nothing open; what is given stays as it is.

    Args:
      task: Recommends settings, if it has a method `recommend` (see `dpsgd.runs.task.Task`).
      config: As it was asked for; of tables it says whether they are lazy, and how often they are
        flushed is not chosen here (`dpsgd.runs.tables`).
      population: What is public of the training rows.
      most_epochs: For which there is time.

    Raises:
      ValueError: if what the task recommends are no settings, or cannot be run.
    """
    if not (names := open_settings(config)):
        return config
    sampler = config.sampler
    if isinstance(sampler, SamplerSettings) and hasattr(sampler, "batch_size"):
        batch_size, epochs = sampler.batch_size, getattr(sampler, "epochs", None)
    else:  # its sizes are decided otherwise
        built = config.build_sampler(population)
        batch_size, epochs = max(1, round(built.expected_batch_size)), built.epochs
    aim = Aim(
        num_examples=population.num_examples,
        target_delta=config.delta(population),
        noise_multiplier=config.noise_multiplier,
        target_epsilon=config.target_epsilon,
        target_advantage=config.target_advantage,
        batch_size=batch_size,
        epochs=epochs,
        l2_clip_norm=config.l2_clip_norm,
        most_epochs=most_epochs,
        optimizer=config.optimizer,
        momentum=config.momentum,
        bands=config.bands,
        tables=config.tables,
        tables_momentum=config.tables_momentum,
    )
    recommend = getattr(task, "recommend", None)
    settings = recommend(aim) if callable(recommend) else generic(aim)
    if not isinstance(settings, Settings):
        raise ValueError(
            f"recommend() of the task must return dpsgd.Settings, got {type(settings).__name__}"
        )
    sizes = {name: getattr(settings, name) for name in names if name in DEFAULTS}
    own = {field.name for field in dataclasses.fields(Settings)} - DEFAULTS.keys()
    others = {name: getattr(settings, name) for name in names if name in own}
    if others.get("tables_learning_rate", 0.0) is None:
        others["tables_learning_rate"] = of_lazy_tables(aim, settings)
    if sizes:
        sampler = dataclasses.replace(sampler, **sizes)
    chosen = dataclasses.replace(config, sampler=sampler, **others)
    chosen.check()
    return chosen
