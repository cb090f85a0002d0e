"""The digits that the papers' texts still have, beside ours.

Each row is ours; its bar is what a paper has, and holds if ours is that to the digits given. What
is refuted or corrected has no bar to hold: `theirs` and `ours` are rows of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx

from accounting import MultistageProfile
from experiments.benchmarks.case import Row, cases, figure
from experiments.papers.amplification import laplace_noise_ratio
from experiments.papers.contribution import (
    num_heavy_users,
    privacy_excess,
    sum_error,
    sum_sweet_spot,
)
from experiments.papers.episodic import PublishedTheorem3, add_remove_profile
from experiments.tasks.clicks.criteo import display, search
from experiments.tasks.clicks.model import ClickModel
from experiments.tasks.clicks.sizes import ModelConfig
from experiments.tasks.ratings import ratings

MILLION = 1e6


def beside(name: str, ours: float, theirs: float, within: float, unit: str = "") -> Row:
    """Returns our figure beside a paper's, which it is held to within so much."""
    return Row(name, ours, unit, f"= {theirs:g}", abs(ours - theirs) <= within)


def models() -> Iterator[Row]:
    """Balls-and-Bins Sampling for DP-SGD, appendix C."""
    for format_, theirs, width in ((display, 85, 14), (search, 57, 17)):
        schema = format_.FORMAT.schema
        config = ModelConfig(width, 2**20, (598, 598, 598))
        model = nnx.eval_shape(lambda c=config, s=schema: ClickModel(c, s, nnx.Rngs(0)))
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
        yield beside(
            f"{schema.name}, parameters (vectors of {width})", count / MILLION, theirs, 1.0,
            "million",
        )  # fmt: skip
    yield beside("criteo-display, categories", len(display.FORMAT.schema.categories), 26, 0)


def contributions() -> Iterator[Row]:
    """Bounding User Contributions, section 3 and lemma 1, on generated ratings."""
    counts = np.unique(ratings.synthetic(0).user, return_counts=True)[1]
    rule = sum_sweet_spot(counts, 0.02)
    caps = np.arange(1, counts.max() + 1)
    least = caps[np.argmin([sum_error(counts, float(cap), 0.02) for cap in caps])]
    yield figure("cap at epsilon 0.02, theirs: the ceil(1/epsilon)-th largest", rule, "ratings")
    yield figure("cap at epsilon 0.02, ours: of least expected error", float(least), "ratings")
    yield figure("lemma 1, over tau / (n_tau eps) ((d+1) log 3 + log 1/delta), theirs", 8.0)
    log_size = 4 * math.log(3)  # d = 3
    ours = privacy_excess(20.0, 0.5, log_size, failure=0.1) * 20.0 * 0.5 / (log_size + math.log(10))
    yield figure("lemma 1, over the same, ours", ours)
    heavy = num_heavy_users([0.1] * 10, 0.1, 10**6, failure=0.1)
    yield figure("n = 10^6, N = n^(1/6) equal users, K(1/N), theirs", 10.0, "users")
    yield figure("n = 10^6, N = n^(1/6) equal users, K(1/N), ours: read strictly", heavy, "users")


def episodes() -> Iterator[Row]:
    """Privacy Amplification for Episodic Training Methods, theorem 3: refuted for sums."""
    one = 1.0, 1, (10,), (100,)
    theirs = PublishedTheorem3(*one).estimate_delta(1.85).value
    yield beside("10 of 100, sigma 1, delta at 1.85: their theorem", theirs, 4.7e-6, 0.05e-6)
    proved = MultistageProfile(*one).delta(1.85)
    yield figure("10 of 100, sigma 1, delta at 1.85: ours, proved from below", proved.lower)
    removed = add_remove_profile(*one).delta(1.85).upper
    yield beside("10 of 100, sigma 1, delta at 1.85: add or remove", removed, 8.5e-3, 0.05e-3)
    many = 1.0, 1000, (1,), (100,)
    theirs = PublishedTheorem3(*many).estimate_epsilon(1e-5).value
    yield beside(
        "1 of 100, sigma 1, 1000 steps, epsilon at 1e-5: their theorem", theirs, 1.83, 5e-3
    )
    proved = MultistageProfile(*many).epsilon(1e-5)
    yield figure("1 of 100, sigma 1, 1000 steps, epsilon at 1e-5: ours, from below", proved.lower)
    yield figure("1 of 100, sigma 1, 1000 steps, epsilon at 1e-5: ours, from above", proved.upper)


def amplification() -> Iterator[Row]:
    """Limits of Privacy Amplification by Subsampling, theorem 1 and its corollary at eps = c p."""
    for c in (0.1, 1.0, 10.0):
        ratio = laplace_noise_ratio(c * 1e-6, 1e-6)
        name = f"p eps_p / eps at eps = {c:g} p and p = 1e-6: log(1 + c) / c"
        yield beside(name, ratio, math.log1p(c) / c, 1e-4)


CASES = [
    *cases(models, "balls-and-bins: models", quick={}, seconds=5, exact=True),
    *cases(contributions, "user contributions", quick={}, seconds=2, exact=True),
    *cases(episodes, "episodes", quick={}, seconds=5, exact=True),
    *cases(amplification, "limits of amplification", quick={}, seconds=1, exact=True),
]
