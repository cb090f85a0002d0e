"""Sweep that trains the samplers of `dpsgd compare`: its file, made from public numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from dpsgd.runs.recommendation import RecommendationRequest
from dpsgd.runs.task import settled
from experiments.tasks.clicks.task import Clicks

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

    All runs have one model, learning rate and clipping norm: those that `dpsgd train` chooses for
    the number of rows and the largest epsilon, or epsilon 1 at given noise. At equal privacy,
    samplers whose noise is known between two bounds are trained at both.

    Args:
      store: Store of clicks to train on.
      points: Bounds by `comparison.curves`.
      grid: Axes of the grid, with "sampler" and the axis of the comparison first.
      delta: Delta of the guarantees.
      repetitions: Number of runs at each point.
    """
    axis, xs = next(iter(grid.items()))
    equal_privacy = axis == "target_epsilon"
    request = RecommendationRequest(
        Clicks(store).num_examples,
        delta,
        target_epsilon=max(xs) if equal_privacy else 1.0,
        batch_size=grid["batch_size"],
        epochs=grid["epochs"],
    )
    task, _ = settled(Clicks(store), request)
    settings = task.recommend(request)
    title = f"Samplers at equal {'privacy' if equal_privacy else 'noise'}"
    rates = {"learning_rate": settings.learning_rate, "l2_clip_norm": settings.l2_clip_norm}
    grids = [{"title": f"{title}, model {task.model}", "x": axis, **grid, **rates}]
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
