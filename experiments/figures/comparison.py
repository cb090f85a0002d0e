"""Bounds of samplers' privacy costs as points of curves, and the sweep that trains the samplers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
from matplotlib.figure import Figure

from accounting import Bound, PrivacyProfile, calibrate, epsilon
from dpsgd.core.guarantee import ADJACENCY
from dpsgd.core.noise import Independent, Noise
from dpsgd.runs.mechanism import LowerEnd, build_sampler
from dpsgd.runs.records import build
from dpsgd.runs.resolve import request_of
from dpsgd.runs.spec import RunSpec
from dpsgd.runs.task import settled
from experiments.cli.tasks import load_kind
from experiments.figures.drawing import Layout, draw_layout
from experiments.processes import each
from experiments.results.points import collect, ends
from experiments.tasks.clicks.task import Clicks
from samplers import BatchSampler, Population
from samplers.settings import SETTINGS, settings_of

MONTE_CARLO = "balls-and-bins, Monte Carlo"

TERMS = f"{ADJACENCY} adjacency, unit: one example"
"""Adjacency and unit of every guarantee here."""

_LEAST_STEP = 5e-5
"""First relative step down from a calibrated noise multiplier to one that misses its epsilon."""
_LEAST_NOISE = 1e-3
"""Least share of the calibrated noise multiplier that is tried."""

Profiles = Callable[[float], PrivacyProfile]
"""Profile of a run as a function of its noise multiplier; pickled, such as a sampler's method."""


_INDEPENDENT = Independent()

SAMPLERS = ("deterministic", "shuffle", "poisson", "balls-and-bins")
"""Samplers that are compared by default."""


def all_samplers(
    num_examples: int,
    batch_size: int,
    epochs: int,
    names: Sequence[str] = SAMPLERS,
    noise: Noise = _INDEPENDENT,
) -> dict[str, BatchSampler]:
    """Returns samplers, by name, for runs of equal sizes.

    Batches above the padded size take several passes, so that figures compare the cost of sampling
    alone.

    Args:
      num_examples: Number of training examples.
      batch_size: Expected batch size.
      epochs: Number of passes over the examples.
      names: Names of samplers; "module:Class" for one outside the package, whose module is
        imported.
      noise: Noise of the runs, whose bands need a minimum separation.

    Raises:
      ValueError: If a sampler does not exist, or needs other settings.

    >>> list(all_samplers(1000, batch_size=10, epochs=1))
    ['deterministic', 'shuffle', 'poisson', 'balls-and-bins']
    """
    samplers = {}
    for name in names:
        kind = settings_of(load_kind("sampler", name))
        settings: dict[str, Any] = {"batch_size": batch_size, "epochs": epochs}
        if "overflow" in kind.__dataclass_fields__:
            settings["overflow"] = "accumulate"
        sampler = build(kind, settings, f"--sampler {name}")
        spec = RunSpec.of(sampler, noise_multiplier=1.0, noise=noise)
        samplers[name] = build_sampler(spec, Population(num_examples))
    return samplers


def epsilons(
    profiles: Mapping[str, Profiles], delta: float, noise_multiplier: float
) -> list[dict[str, Any]]:
    """Returns samplers' bounds on epsilon at one noise multiplier.

    Args:
      profiles: Profiles by the name of the sampler.
      delta: Delta of the guarantees.
      noise_multiplier: Noise multiplier sigma.

    >>> sampler = all_samplers(100, 10, 1, ["deterministic"])["deterministic"]
    >>> [row] = epsilons({"deterministic": sampler.privacy}, 1e-5, 1.0)
    >>> row["curve"], row["x"], round(row["upper"], 2)
    ('deterministic', 1.0, 4.38)
    """
    return [
        {"curve": name, "x": noise_multiplier, **ends(epsilon(profile(noise_multiplier), delta))}
        for name, profile in profiles.items()
    ]


def noise_multipliers(
    profiles: Mapping[str, Profiles], delta: float, target_epsilon: float
) -> list[dict[str, Any]]:
    """Returns bounds on the smallest noise multiplier of each sampler at one epsilon.

    The upper end certifies the epsilon. At the lower end and below it the sampler's cost is proved
    to be larger: more noise is post-processing, so that the true cost falls in the noise.

    Args:
      profiles: Profiles by the name of the sampler.
      delta: Delta of the guarantees.
      target_epsilon: Epsilon that the noise multipliers are to reach.
    """
    points = []
    for name, profile in profiles.items():
        upper = calibrate(profile, epsilon=target_epsilon, delta=delta)
        bound = Bound(_insufficient_noise(profile, delta, target_epsilon), upper)
        points.append({"curve": name, "x": target_epsilon, **ends(bound)})
    return points


def _insufficient_noise(profile: Profiles, delta: float, target_epsilon: float) -> float:
    """Estimates the largest noise multiplier proved to miss an epsilon; 0 if none is."""
    start = calibrate(lambda noise: LowerEnd(profile(noise)), epsilon=target_epsilon, delta=delta)
    noise_multiplier, step = start, _LEAST_STEP
    while noise_multiplier > _LEAST_NOISE * start:
        if profile(noise_multiplier).epsilon(delta).lower > target_epsilon:
            return noise_multiplier
        noise_multiplier, step = noise_multiplier * (1.0 - step), min(2.0 * step, 0.5)
    return 0.0


def curves(
    profiles: Mapping[str, Profiles],
    xs: Sequence[float],
    delta: float,
    progress: Callable[[str], None],
    bounds: Callable[..., list[dict[str, Any]]] = epsilons,
) -> pl.DataFrame:
    """Returns the bounds of each sampler, computed on all processors.

    Args:
      profiles: Profiles by the name of the sampler.
      xs: Noise multipliers, or epsilons, of the curves.
      delta: Delta of the guarantees.
      progress: Function of one line of text.
      bounds: `epsilons` at equal noise, or `noise_multipliers` at equal privacy.
    """
    rows: list[dict[str, Any]] = []
    for points in each(partial(bounds, dict(profiles), delta), list(xs)):
        rows += points
        progress(f"{len(rows)} of {len(xs) * len(profiles)}")
    return collect(rows)


def style(point: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a broad line for deterministic batches.

    Their curve is also the upper bound of shuffling, which is drawn over it.

    >>> style({"curve": "deterministic"}), style({"curve": "poisson"})
    ({'lw': 5, 'alpha': 0.35}, {})
    """
    return {"lw": 5, "alpha": 0.35} if point["curve"] == "deterministic" else {}


LAYOUT = Layout(
    size=(11, 9),
    columns=2,
    axes={"": {"yscale": "log", "xlabel": "noise multiplier σ", "ylabel": f"ε ({TERMS})"}},
    style=style,
    legend={"title": "solid: upper bound\ndashed: lower bound"},
)
"""Layout of panels of epsilon over the noise multiplier."""


EQUAL_PRIVACY = {"yscale": "log", "xlabel": f"ε ({TERMS})", "ylabel": "noise multiplier σ"}
"""Axes of noise multipliers over epsilon."""


def draw(points: pl.DataFrame, title: str, *, equal_privacy: bool = False) -> Figure:
    """Returns a figure of one panel.

    Args:
      points: Rows of `experiments.results.points`.
      title: Title of the panel.
      equal_privacy: Whether x is epsilon and the bounds are noise multipliers.
    """
    layout = dataclasses.replace(LAYOUT, size=(7, 5), columns=1)
    if equal_privacy:
        layout = dataclasses.replace(layout, axes={"": EQUAL_PRIVACY})
    return draw_layout(points.with_columns(panel=pl.lit(title)), layout)


WIDE = 1.01
"""Ratio of the ends of a noise interval above which both ends are trained."""


def sampler_entries(samplers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns samplers as entries of a sweep file, see `comparison.all_samplers`.

    >>> from experiments.figures.comparison import all_samplers
    >>> sampler_entries(all_samplers(100, 10, 1, ["shuffle", "poisson"]))
    [{'name': 'shuffle'}, {'name': 'poisson', 'overflow': 'accumulate'}]
    """
    return [
        {"name": name, **({"overflow": value} if value == "accumulate" else {})}
        for name, sampler in samplers.items()
        for value in [getattr(sampler, "overflow", None)]
    ]


def sweep_file(
    store: Path, points: pl.DataFrame, grid: Mapping[str, Any], delta: float, repetitions: int
) -> bytes:
    """Returns the file of the sweep, as TOML.

    All runs share one model, learning rate and clipping norm, which `dpsgd train` chooses for the
    optimizer, the number of rows and the largest epsilon (epsilon 1 if the noise is given). A
    learning rate in `grid` takes precedence. At equal privacy, a sampler whose noise is only known
    to lie between two bounds is trained at both.

    Args:
      store: Store of clicks to train on.
      points: Bounds by `comparison.curves`.
      grid: Axes of the grid, with "sampler" and the axis of the comparison first.
      delta: Delta of the guarantees.
      repetitions: Number of runs at each point.
    """
    axis, xs = next(iter(grid.items()))
    equal_privacy = axis == "target_epsilon"
    sizes = {name: grid[name] for name in ("batch_size", "epochs")}
    options = {name: grid[name][0] for name in grid.keys() - {axis, "sampler", *sizes}}
    options["target_epsilon"] = max(xs) if equal_privacy else 1.0
    spec = RunSpec.of(SETTINGS["shuffle"](**sizes), target_delta=delta, **options)
    population = Population(Clicks(store).num_examples)
    request = dataclasses.replace(request_of(spec, population), **sizes)
    task, _ = settled(Clicks(store), request)
    settings = task.recommend(request)
    title = f"Samplers at equal {'privacy' if equal_privacy else 'noise'}"
    rates = {"learning_rate": settings.learning_rate, "l2_clip_norm": settings.l2_clip_norm}
    grids = [{"title": f"{title}, model {task.model}", "x": axis, **rates, **grid}]
    wide = set(points.filter(pl.col("upper") > WIDE * pl.col("lower"))["curve"])
    ambiguous = [entry for entry in grid["sampler"] if entry["name"] in wide]
    if equal_privacy and ambiguous:
        grids.append({**grids[0], "sampler": ambiguous, "optimistic": True})
    lines = [
        f"# Written by `dpsgd compare --train {store}`.",
        *_lines({"title": title, "repetitions": repetitions}),
        "\n[task]",
        *_lines({"name": "clicks", "model": task.model}),
        "\n[run]",
        *_lines({"target_delta": delta}),
    ]
    for table in grids:
        lines += ["\n[[grid]]", *_lines(table)]
    return "\n".join([*lines, ""]).encode()


def _lines(table: Mapping[str, Any]) -> Iterable[str]:
    return (f"{name} = {_toml(value)}" for name, value in table.items())


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(_lines(value))} }}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)
