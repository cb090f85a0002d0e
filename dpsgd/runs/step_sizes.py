"""Step sizes of lazy tables where nobody chooses them, by the noise that they will get."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpsgd.runs.settings import Aim, Settings

MOST_NOISE = 0.2
"""Standard deviation of how far noise has moved a coordinate by the run's end, at most. So a rate
for ratings is 0.05 at epsilon 0.3, where 0.03 is best and 0.08 does harm; and 300 rows of ads at
epsilon 0.1 keep a log loss of 0.68 in place of 1.09."""


def of_lazy_tables(
    aim: Aim, settings: Settings, *, most: float = 10.0, without_noise: float = 1.0
) -> float:
    """Returns the peak step size of lazy tables, by how much noise they get.

    It is 2.1 (1 - mu) / (N r)^(2/3) for N steps with noise of standard deviation r = sigma C / b in
    the mean gradient of each. By the cosine's end gradients move a coordinate by N a / 2 times
    their mean, and noise by about 0.6 a r sqrt(N): the same movement takes rates that go with 1 /
    N, and the more noise there is for a movement, r / sqrt(N), the shorter is the best one. The
    power and the factor are those of the best rates on validation rows, from which it is less than
    twice off while r / sqrt(N) goes from 3e-5 to 1e-2: 88,000 and 8,800 rows of ads at epsilon
    0.5 to 16, C 2 and 4, and 40 to 3,440 steps; ratings by 762 users at epsilon 0.3 to 8, C 1 and
    4, and 10 and 180 steps.

    Args:
      aim: By which sigma is known, or about; what it gives comes before `settings`.
      settings: b, epochs, C and mu.
      most: At mu = 0 not to be exceeded, however little noise there is.
      without_noise: At mu = 0 where there is none. Ratings are best at 1 to 3, and diverge at 10.
    """
    batch_size = aim.batch_size or settings.batch_size
    steps = math.ceil(aim.num_examples / batch_size) * (aim.epochs or settings.epochs)
    rate = without_noise
    if aim.private:
        sigma = about_sigma(aim, batch_size, steps)
        noise = steps * sigma * (aim.l2_clip_norm or settings.l2_clip_norm) / batch_size
        rate = min(most, 2.1 / noise ** (2 / 3), MOST_NOISE / 0.6 * math.sqrt(steps) / noise)
    given = aim.tables_momentum
    return float(f"{rate * (1 - (settings.tables_momentum if given is None else given)):.2g}")


def about_sigma(aim: Aim, batch_size: int, steps: int) -> float:
    """Returns about the noise multiplier that the guarantee will take, if it is not given.

    It is that of a Gaussian mechanism of sensitivity mu, whose subsampled steps add up to mu^2 =
    q^2 N (exp(1 / sigma^2) - 1), q = b / n, in the limit of many (Bu et al. 2020, "Deep Learning
    with Gaussian Differential Privacy"); samplers that do not amplify take more. No guarantee is
    made of it.
    """
    if aim.noise_multiplier is not None:
        return aim.noise_multiplier
    normal = NormalDist()
    if aim.target_advantage is not None:
        mu = 2 * normal.inv_cdf((1 + aim.target_advantage) / 2)
    else:
        assert aim.target_epsilon is not None, "it is asked of runs with noise"
        tail = -normal.inv_cdf(min(0.5, aim.target_delta))  # epsilon = mu^2 / 2 + mu tail, about
        mu = 2 * aim.target_epsilon / (math.hypot(tail, math.sqrt(2 * aim.target_epsilon)) + tail)
    ratio = mu * aim.num_examples / batch_size / math.sqrt(steps)
    return 1 / math.sqrt(math.log1p(min(ratio, 1e150) ** 2))
