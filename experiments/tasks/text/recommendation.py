"""Settings for models of phrases, by the number of rows and the guarantee that is wanted alone."""

from __future__ import annotations

import math
from typing import NamedTuple

from dpsgd.runs.recommendation import RecommendationRequest, Settings, default_rate
from experiments.tasks.text.model import Sizes


class Rule(NamedTuple):
    """Epochs, about how many steps they make, and Adam's rate times the root of these."""

    epochs: int
    steps: int
    distance: float


RULES = {
    ("bag", True): Rule(30, 270, 1.15),
    ("bag", False): Rule(20, 1380, 0.74),
    ("transformer", True): Rule(20, 345, 0.02),
    ("transformer", False): Rule(4, 1100, 0.033),
}
"""By model, and whether there is noise."""

L2_CLIP_NORM = {"bag": 0.7, "transformer": 1.0}
"""By model."""


def recommended(request: RecommendationRequest, sizes: Sizes) -> Settings:
    """Returns the settings of a run on phrases, alike for every epsilon.

    >>> bag = Sizes(8192, 32, 2, 64, 4, layers=0, bag=2**16)
    >>> found = recommended(RecommendationRequest(35_327, 1e-5, target_epsilon=3.0), bag)
    >>> found.batch_size, found.epochs, found.l2_clip_norm, found.learning_rate
    (4096, 30, 0.7, 0.07)
    """
    n, model = request.num_examples, "transformer" if sizes.layers else "bag"
    rule = RULES[model, request.private]
    epochs = request.epochs or max(1, min(rule.epochs, request.most_epochs or rule.epochs))
    batch_size = request.batch_size or min(
        n, 2 ** round(math.log2(max(1, n * epochs / rule.steps)))
    )
    rate = rule.distance / math.sqrt(math.ceil(n / batch_size) * epochs)
    if request.optimizer == "sgd":
        rate = default_rate(request.optimizer, request.momentum)
    return Settings(batch_size, epochs, L2_CLIP_NORM[model], float(f"{rate:.2g}"))
