"""Epsilon over sigma for every sampler, on the sizes of two click data sets, one epoch.

Sizes of Criteo Display Ads and Criteo Sponsored Search, batches of 1,024 and 8,192, delta = 1 /
number of training examples. Balls-and-bins has a certified interval here; Monte Carlo bounds stand
beside it. The paper's own figure 2 is `delta`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from accounting.profile import format_delta
from experiments.figures import Options, comparison
from experiments.figures.comparison import TERMS
from experiments.papers.monte_carlo import MonteCarloProfile
from experiments.results.points import Job

STEPS = {
    ("Criteo Display Ads", 1024): 35_938,
    ("Criteo Display Ads", 8192): 4_492,
    ("Criteo Sponsored Search", 1024): 12_500,
    ("Criteo Sponsored Search", 8192): 1_563,
}
"""Steps of one epoch, by data set and batch size."""

NOISE_MULTIPLIERS = tuple(round(0.1 + 0.05 * i, 2) for i in range(9))
ESTIMATOR: dict[str, Any] = {"num_samples": 20_000, "sampled": "other bins"}
"""Options of a Monte Carlo bound, whose upper end holds with probability 0.999.

Bounds from sampled losses are infinite for delta below the inverse number of samples.
"""
NOTES = (f"epsilon over the noise multiplier ({TERMS})",)
LAYOUT = comparison.LAYOUT


def jobs(options: Options) -> Iterator[Job]:
    """Yields a panel and a noise multiplier at a time."""
    for (data_set, batch_size), steps in STEPS.items():
        for sigma in NOISE_MULTIPLIERS:
            panel = f"{data_set}: batch {batch_size:,}, T = {steps:,}"
            yield {"panel": panel, "steps": steps, "batch_size": batch_size, "sigma": sigma}


def compute(job: Job) -> list[dict[str, Any]]:
    """Returns the bound of each sampler at one noise multiplier."""
    num_examples = job["steps"] * job["batch_size"]
    samplers = comparison.all_samplers(num_examples, job["batch_size"], epochs=1)
    profiles: dict[str, comparison.Profiles] = {
        **{name: sampler.privacy for name, sampler in samplers.items()},
        comparison.MONTE_CARLO: partial(MonteCarloProfile, bins=job["steps"], **ESTIMATOR),
    }
    panel = f"{job['panel']}, δ = {format_delta(1 / num_examples)}"
    points = comparison.epsilons(profiles, 1 / num_examples, job["sigma"])
    return [{"panel": panel, **point} for point in points]
