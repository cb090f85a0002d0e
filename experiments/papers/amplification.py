"""Limits of privacy amplification by subsampling.

With ε the cost of one release after amplification and c = ε/p, the noise of a mean over a sample is
up to c/log(1 + c) (Laplace) or about c/√log(1 + c²) (Gaussian, many releases) times that over all.
Proofs: docs/explanation/limits-of-amplification.md. Source: T. Steinke, Limits of Privacy
Amplification by Subsampling, DifferentialPrivacy.org, 2023.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from accounting.calibration import calibrate
from accounting.checks import check_count, check_epsilon, check_probability
from accounting.profiles.gaussian import GaussianProfile
from accounting.profiles.poisson import PoissonProfile

# Beyond this e^ε exceeds 1/ulp: the other form of each logarithm is exact, and e^ε may overflow.
_LARGE = 40.0


def amplify(epsilon: float, delta: float, sampling_prob: float) -> tuple[float, float]:
    """Returns the (ε, δ) of a mechanism on a Poisson sample.

    It is (log(1 + p(e^ε - 1)), pδ), for adjacency by adding, removing or zeroing out one example.

    Args:
      epsilon: ε >= 0 of the mechanism.
      delta: δ in [0, 1] of the mechanism.
      sampling_prob: p in (0, 1].

    Source: Theorem 1.

    >>> round(math.exp(amplify(math.log(3.0), 1e-5, 0.5)[0]), 12)
    2.0
    """
    check_epsilon(epsilon)
    check_probability("sampling_prob", sampling_prob)
    if not 0.0 <= delta <= 1.0:
        raise ValueError(f"delta must be in [0, 1], got {delta}")
    if epsilon <= _LARGE:
        amplified = math.log1p(sampling_prob * math.expm1(epsilon))
    else:
        correction = (1.0 - sampling_prob) / sampling_prob * math.exp(-epsilon)
        amplified = epsilon + math.log(sampling_prob) + math.log1p(correction)
    return amplified, sampling_prob * delta


def deamplify(epsilon: float, delta: float, sampling_prob: float) -> tuple[float, float]:
    """Returns the (ε, δ) that amplifies to a target guarantee.

    It is (ε_p, δ/p) with ε_p = log(1 + (e^ε - 1)/p): the inverse of `amplify`.

    Args:
      epsilon: Target ε >= 0 on a Poisson sample.
      delta: Target δ in [0, p].
      sampling_prob: p in (0, 1].

    Raises:
      ValueError: If δ exceeds p, as no mechanism then amplifies to exactly δ.

    Source: Theorem 1.

    >>> round(math.exp(deamplify(math.log(2.0), 0.0, 0.5)[0]), 12)
    3.0
    """
    check_epsilon(epsilon)
    check_probability("sampling_prob", sampling_prob)
    if not 0.0 <= delta <= sampling_prob:
        raise ValueError(f"delta must be in [0, sampling_prob = {sampling_prob}], got {delta}")
    if epsilon <= _LARGE:
        needed = math.log1p(math.expm1(epsilon) / sampling_prob)
    else:
        needed = epsilon - math.log(sampling_prob)
    return needed, delta / sampling_prob


def laplace_noise_scale(epsilon: float, num_examples: int, sampling_prob: float = 1.0) -> float:
    """Returns the Laplace scale 1/(ε_p p n) of an ε-DP sampled mean.

    The mean is the sum over a Poisson sample divided by pn, of n values within [0, 1] (or [-1, 1],
    zeroed out).

    >>> round(laplace_noise_scale(0.1, 1000) / laplace_noise_scale(0.1, 1000, 0.1), 3)
    0.719

    Args:
      epsilon: ε > 0 of the released mean.
      num_examples: Number n of values.
      sampling_prob: p in (0, 1]; 1 is the full mean.
    """
    check_count("num_examples", num_examples)
    _check_positive("epsilon", epsilon)
    return 1.0 / (deamplify(epsilon, 0.0, sampling_prob)[0] * sampling_prob * num_examples)


def laplace_noise_ratio(epsilon: float, sampling_prob: float) -> float:
    """Returns the Laplace noise ratio p ε_p / ε of full to sampled mean.

    Args:
      epsilon: ε > 0 of either mean.
      sampling_prob: p in (0, 1].
    """
    _check_positive("epsilon", epsilon)
    return min(1.0, sampling_prob * deamplify(epsilon, 0.0, sampling_prob)[0] / epsilon)


def mean_squared_error(values: ArrayLike, epsilon: float, sampling_probs: ArrayLike = 1.0) -> float:
    r"""Returns the mean squared error of an ε-DP sampled mean.

    .. math:: \frac{1}{n^2} \sum_i \frac{1 - p_i}{p_i} x_i^2
        + 2 \max_i \left(\frac{1}{ε_{p_i} p_i n}\right)^2

    is the error of the unbiased (1/n) Σ x_i/p_i over the sampled rows i, with Laplace noise. p ε_p
    rises in p: the row of the smallest p_i needs the most noise and pays ε; other rows pay less.

    Args:
      values: x_i in [-1, 1]; float[n].
      epsilon: ε > 0, the guarantee of every row.
      sampling_probs: p_i in (0, 1], of each row or of all; 1 is the full mean.

    Source: equations 1 and 2 (equal p_i).
    """
    x = np.asarray(values, np.float64)
    if not (x.ndim == 1 and x.size and np.abs(x).max() <= 1.0):
        raise ValueError("values must be a row of numbers in [-1, 1], and at least one")
    probs = np.broadcast_to(np.asarray(sampling_probs, np.float64), x.shape)
    scale = laplace_noise_scale(epsilon, x.size, float(probs.min()))
    return float(np.sum((1.0 - probs) / probs * x * x)) / x.size**2 + 2.0 * scale**2


def laplace_noise_penalty(epsilon_over_prob: float) -> float:
    """Returns the largest Laplace noise penalty c/log(1 + c) of sampling.

    It holds for ε <= c p, with c = `epsilon_over_prob` >= 0; it is 1 + c/2 for small c.

    >>> round(laplace_noise_penalty(1.0), 2)
    1.44
    """
    c = epsilon_over_prob
    if not 0.0 <= c < math.inf:
        raise ValueError(f"epsilon_over_prob must be finite and at least 0, got {c}")
    return c / math.log1p(c) if c > 0.0 else 1.0


def gaussian_noise_penalty_many_steps(epsilon_over_prob: float) -> float:
    """Estimates the Gaussian noise penalty c/√log(1 + c²) of many steps.

    No bound, but the limit of many steps, with c = `epsilon_over_prob` = 1/(pσ) >= 0; it is 1 +
    c²/4 for small c.

    Source: Z. Bu, J. Dong, Q. Long, W. Su, Deep Learning with Gaussian Differential Privacy,
    Harvard Data Science Review 2020, arXiv:1911.11607, Theorem 5.
    """
    c = epsilon_over_prob
    if not 0.0 <= c < 1e150:
        raise ValueError(f"epsilon_over_prob must be in [0, 1e150), got {c}")
    return c / math.sqrt(math.log1p(c * c)) if c * c > 0.0 else 1.0


def gaussian_noise_penalty(
    sampling_prob: float, steps: int, *, epsilon: float, delta: float
) -> float:
    """Returns the Gaussian noise ratio s/(pσ) of sampled to full mean.

    The noise multipliers s of Poisson samples and σ of full sums are the smallest that `calibrate`
    certifies to be (ε, δ)-DP over all steps.

    Args:
      sampling_prob: p in (0, 1].
      steps: Number of steps, at least 1.
      epsilon: ε > 0 of all steps together.
      delta: δ in (0, 1) of all steps together.
    """
    check_probability("sampling_prob", sampling_prob)
    sampled = calibrate(
        lambda noise: PoissonProfile(noise, sampling_prob, steps), epsilon=epsilon, delta=delta
    )
    return sampled / (sampling_prob * full_batch_noise(steps, epsilon=epsilon, delta=delta))


def full_batch_noise(steps: int, *, epsilon: float, delta: float) -> float:
    """Returns the smallest noise multiplier of full-batch releases.

    Args:
      steps: Number of releases of a sum over all examples.
      epsilon: ε > 0 of all releases together.
      delta: δ in (0, 1) of all releases together.
    """
    check_count("steps", steps)
    return calibrate(
        lambda noise: GaussianProfile(noise / math.sqrt(steps)), epsilon=epsilon, delta=delta
    )


def _check_positive(name: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value}")
