"""Few-shot training: the cost of episodes, and their accuracy on new classes.

A step draws tasks, classes of each task, and images of each class; the one gradient of a task's
episode is clipped (Snell, Swersky, Zemel, "Prototypical Networks", NeurIPS 2017, by the sampler of
Tombs, Kotevska, Young, CEUR Vol-3318, 2022). Left: epsilon of one image, proved and by the
published Theorem 3, which is NOT sound. Right: accuracy on classes without training images, from
five images each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optax

from accounting import MultistageProfile, epsilon
from accounting.profile import format_delta
from dpsgd import Mechanism, dpsgd, train
from experiments.figures import Options
from experiments.figures.drawing import BELOW, Layout
from experiments.papers.episodic import PublishedTheorem3
from experiments.results.points import Job, ends
from experiments.tasks.images.task import Images
from experiments.tasks.splits import blocks_of
from samplers import Multistage

NOISE_MULTIPLIERS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Standard deviations of the noise, in units of the clipping norm."""
NEW_CLASSES, CHANNELS = 3, (8, 16)
CLASSES, IMAGES = 5, 4
"""Classes drawn from each drawn task, and images from each of these classes."""
OF_CLASS = 14
"""Approximate images of each class in a task."""
DRAWN = 5
"""Tasks per drawn task."""
STEPS, LEARNING_RATE, CLIP = 120, 0.01, 1.0
DELTA = 1e-5
NOTES = (
    f"delta {format_delta(DELTA)}, zero-out; classes are public",
    "Theorem 3 as published is not sound for sums: an estimate, NO GUARANTEE",
    "the runs' noise is seeded, to be repeated: the epsilons are those of fresh noise",
)
COST, ACCURACY = "cost", "accuracy: mean ± standard error over seeds"
UNSOUND = "one image, published Theorem 3: NOT sound"
STYLES: Mapping[str, dict[str, Any]] = {
    "one image": {"marker": "o", "color": "#0072B2"},
    UNSOUND: {"marker": "x", "ls": "--", "color": "#D55E00"},
    "trained": {"marker": "o", "color": "black"},
    "without noise": {"ls": "--", "color": "gray"},
    "untrained": {"ls": ":", "color": "gray"},
}
_AXES = {"xscale": "log", "xlabel": "noise multiplier σ"}
LAYOUT = Layout(
    size=(11, 5.2),
    columns=2,
    axes={
        COST: {**_AXES, "yscale": "log",
               "ylabel": f"ε at δ = {format_delta(DELTA)} (zero-out adjacency)"},
        ACCURACY: {**_AXES, "ylabel": f"accuracy on {NEW_CLASSES} new classes,\n"
                                      "five images of each known"},
    },
    style=lambda point: STYLES.get(point["curve"], {}),
    legend=BELOW,
)  # fmt: skip


def jobs(options: Options) -> Iterator[Job]:
    """Yields costs and runs by noise multiplier."""
    sigmas = (0.5, 2.0) if options.small else NOISE_MULTIPLIERS
    shared = {"images": options.images, "num_classes": options.num_classes, "steps": STEPS}
    for sigma in sigmas:
        yield {**shared, "panel": COST, "sigma": sigma}
    for curve in ("trained", "without noise", "untrained"):
        runs = {**shared, "panel": ACCURACY, "curve": curve, "seeds": options.num_seeds}
        for sigma in sigmas if curve == "trained" else [0.0]:
            yield {**runs, "sigma": sigma, "over": [sigma] if sigma else [sigmas[0], sigmas[-1]]}


@functools.cache
def _setup(images: Path | None, num_classes: int | None, steps: int) -> tuple[Any, Any, Multistage]:
    """Returns the task, its data, and the sampler of episodes."""
    task = Images(images, CHANNELS, NEW_CLASSES, num_classes=num_classes)
    smallest = int(np.unique(task.source.splits["train"]["label"], return_counts=True)[1].min())
    task = replace(task, tasks=max(2, smallest // OF_CLASS))
    data = task.columns()
    assert data.population.tree is not None
    draws = max(1, task.tasks // DRAWN), CLASSES, IMAGES
    return task, data, Multistage(data.population.tree, draws, steps=steps, clipped_level=1)


def compute(job: Job) -> list[dict[str, Any]]:
    """Returns a noise multiplier's costs or mean accuracy."""
    task, data, sampler = _setup(job["images"], job["num_classes"], job["steps"])
    if job["panel"] == COST:
        return [
            {"panel": COST, "x": job["sigma"], **point} for point in _costs(sampler, job["sigma"])
        ]
    test, accuracies = task.source.rows("test"), []
    for seed in range(job["seeds"]):
        params = task.init(seed)
        if job["curve"] != "untrained":
            schedule = optax.cosine_decay_schedule(LEARNING_RATE, job["steps"])
            params = train(
                dpsgd(task.loss, optax.adam(schedule)),
                Mechanism(sampler, job["sigma"], CLIP),
                params,
                data,
                insecure_seed=seed,
                audit=False,
            ).params
        accuracies.append(task.evaluate(params, blocks_of(test))["accuracy"])
    error = float(np.std(accuracies, ddof=1)) / math.sqrt(len(accuracies))
    point = {"curve": job["curve"], "value": float(np.mean(accuracies)), "standard_error": error}
    return [{"panel": ACCURACY, "x": x, **point} for x in job["over"]]


def _costs(sampler: Multistage, sigma: float) -> Iterator[dict[str, Any]]:
    """Yields bounds on epsilon of an image, a task and a class, and the published estimate."""
    [path] = {tuple(map(min, zip(*sampler.tree.shape.worst_paths, strict=True)))}
    steps, draws = sampler.steps, tuple(sampler.draws)
    yield {"curve": "one image", **ends(epsilon(sampler.privacy(sigma), DELTA))}
    theorem = PublishedTheorem3(sigma, steps, draws, path).estimate_epsilon(DELTA)
    yield {"curve": UNSOUND, "value": theorem.value}
    task_profile = replace(sampler, protected_level=1).privacy(sigma)
    yield {"curve": "a task", **ends(epsilon(task_profile, DELTA))}
    one_class = MultistageProfile(sigma, steps, draws[1:2], path[1:2], clipped_level=0)
    lower = epsilon(one_class, DELTA).lower
    yield {"curve": "a class, of one task: at least", "value": lower}
