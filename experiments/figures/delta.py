"""Delta over epsilon of every sampler, one epoch, by noise multiplier and batch size.

Chua et al., "Balls-and-Bins Sampling for DP-SGD" (AISTATS 2025), figure 2, at sizes of Criteo
Display Ads and Criteo Sponsored Search. Dotted is equation 6, below Monte Carlo by order statistics
(x; means +); the other bins' samples are ours, and so are the certified curves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from accounting import Bound
from experiments.figures import Options, comparison
from experiments.figures.comparison import TERMS
from experiments.figures.drawing import Layout
from experiments.papers.monte_carlo import MonteCarloProfile, geometric_ranks
from experiments.results.points import Job, ends

DP_ACCOUNTING = "poisson, dp_accounting"
ESTIMATORS: Mapping[str, Mapping[str, Any]] = {
    comparison.MONTE_CARLO: {"ranks": 1.05},
    "balls-and-bins, other bins": {"sampled": "other bins", "inequality": "bennett"},
}
"""Options of each `MonteCarloProfile`, by curve; `ranks` are a list, or their growth."""

RUNS = (
    ("Display, batch 1,024", 0.4, 35_938, 6.0),
    ("Display, batch 8,192", 0.5, 4_492, 5.0),
    ("Display, batch 65,536", 0.8, 562, 1.5),
    ("Search, batch 1,024", 0.4, 12_500, 6.0),
    ("Search, batch 8,192", 0.5, 1_563, 5.0),
    ("Search, batch 65,536", 0.8, 196, 1.5),
)
"""Name, noise multiplier, steps and last epsilon of each panel."""
NOTES = (f"delta over epsilon, one epoch ({TERMS}); of Monte Carlo, the bounds",)
AXES = {"": {"yscale": "log", "xlabel": "ε", "ylabel": f"δ ({TERMS})"}}
LAYOUT = Layout(
    size=(13, 9.2),
    columns=3,
    axes=AXES,
    title="one epoch",
    style=comparison.style,
    legend={"ncols": 4},
    shared=True,
    floor="balls-and-bins",
)


def panel_of(run: tuple[str, float, int, float], points: int) -> dict[str, Any]:
    """Returns the settings that all curves of a panel share.

    Args:
      run: Entry of `RUNS`.
      points: Number of values of epsilon.

    >>> panel_of(("Toy", 0.5, 100, 2.0), points=2)["epsilons"]
    [1.0, 2.0]
    """
    name, sigma, bins, last = run
    epsilons = [last * (i + 1) / points for i in range(points)]
    panel = f"{name}: σ = {sigma:g}, T = {bins:,}"
    return {"panel": panel, "sigma": sigma, "bins": bins, "epsilons": epsilons}


def jobs(options: Options) -> Iterator[Job]:
    """Yields a curve at a time."""
    points, num_samples = (6, 5_000) if options.small else (10, 20_000)
    # The other accountant's curve lies below the certified one, which hides it.
    accountant = [DP_ACCOUNTING] if find_spec("dp_accounting") else []
    for run in RUNS:
        panel = panel_of(run, points)
        for curve in ("deterministic", "shuffle", *accountant, "poisson", "balls-and-bins"):
            yield {**panel, "curve": curve}
        for curve, estimator in ESTIMATORS.items():
            yield {**panel, "curve": curve, "estimator": estimator, "num_samples": num_samples}


def compute(job: Job) -> list[dict[str, Any]]:
    """Returns the points of a curve, certified or sampled.

    "value" is the mean of samples.
    """
    name, sigma, bins, xs = (job[key] for key in ("curve", "sigma", "bins", "epsilons"))
    means: list[float | None] = [None] * len(xs)
    if "estimator" in job:
        profile = _estimator(job)
        means, bounds = map(list, zip(*profile.estimates(xs), strict=True))
        name += f", {profile.num_samples:,} samples" if "seconds" in job else ""
    elif name == DP_ACCOUNTING:
        bounds = _dp_accounting(sigma, bins, xs)
    else:
        certified = comparison.all_samplers(bins, 1, epochs=1)[name].privacy(sigma)
        bounds = [certified.delta(epsilon) for epsilon in xs]
    return [
        {"panel": job["panel"], "curve": name, "x": x, "value": mean, **ends(bound)}
        for x, mean, bound in zip(xs, means, bounds, strict=True)
    ]


def _estimator(job: Job) -> MonteCarloProfile:
    """Returns the estimator of a job, with its number of samples or sized to its CPU seconds."""
    bins, options = job["bins"], dict(job["estimator"])
    ranks = options.pop("ranks", None)
    ranks = geometric_ranks(bins, ranks) if isinstance(ranks, float) else ranks
    profile = MonteCarloProfile(job["sigma"], bins, ranks=ranks, **options)
    if "seconds" not in job:
        return replace(profile, num_samples=job["num_samples"])
    pilot = replace(profile, num_samples=max(100, 2**18 // bins))
    began = time.process_time()
    list(pilot.estimates(job["epsilons"]))
    share = job["seconds"] / max(time.process_time() - began, 1e-3)
    return replace(profile, num_samples=max(100, int(pilot.num_samples * share)))


def _dp_accounting(sigma: float, bins: int, epsilons: list[float]) -> list[Bound]:
    from dp_accounting.pld import privacy_loss_distribution as pld

    deltas = []
    for pessimistic in (True, False):
        distribution = pld.from_gaussian_mechanism(
            sigma,
            sampling_prob=1.0 / bins,
            pessimistic_estimate=pessimistic,
            value_discretization_interval=1e-3,
            use_connect_dots=pessimistic,
        )
        deltas.append(distribution.self_compose(bins).get_delta_for_epsilon(epsilons))
    return [Bound(float(min(pair)), float(max(pair))) for pair in zip(*deltas, strict=True)]
