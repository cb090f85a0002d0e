"""The law of the noise, which is all that the releases of empty batches consist of.

The checks are exact tests, each with a false-alarm probability of at most 1e-8.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from dpsgd.audit.checks import FALSE_ALARM, Check
from dpsgd.audit.step import CompiledStep
from dpsgd.noise.base import Noise

_NOISE_DRAWS = 2**15  # wanted of the law tests: resolves 3 % of sigma
_NOISE_STEPS = 64  # at most, however few coordinates there are
_MOST_DRAWS = 2**20  # read of one leaf and step: enough, and quick for a large model
_MATRIX_STEPS = 256  # of which M is looked at


def noise_checks(step: CompiledStep) -> list[Check]:
    """Checks the deviation of the noise, its law, its independence, and what its law costs."""
    stddev = float(step.scales.noise_stddev)
    size = sum(leaf.size for leaf in step([], step.scales))
    count = min(max(2, math.ceil(_NOISE_DRAWS / size)), _NOISE_STEPS)
    steps = [
        [leaf[:_MOST_DRAWS] for leaf in step([], step.scales, step=t, follows=t > 0)]
        for t in range(count)
    ]
    # What the noise says of its law: independent and standard normal, after whitening.
    noise = step.mechanism.noise
    raw = [np.stack(leaf).astype(np.float64) / stddev for leaf in zip(*steps, strict=True)]
    leaves = [noise.whiten(leaf) for leaf in raw]
    alls = np.concatenate([leaf.ravel() for leaf in leaves])

    # Sum of squares: chi-square with as many degrees of freedom as draws, for all and each leaf.
    samples = [alls, *leaves]
    pvalue = min(_variance_pvalue(sample) for sample in samples) * len(samples)
    ratio = math.sqrt(float(np.mean(alls**2)))
    resolution = 5.7 / math.sqrt(2 * alls.size)
    checks = [
        Check(
            "noise has standard deviation sigma C, in every leaf",
            pvalue > FALSE_ALARM,
            f"{ratio:.4g} sigma C over {alls.size:,} draws (resolves {100 * resolution:.2g} %)",
        ),
    ]
    checks.append(_matrix_check(noise, raw, leaves, step.mechanism.sampler.num_steps))
    pvalue = float(stats.kstest(alls[:_MOST_DRAWS], "norm").pvalue)
    checks.append(
        Check("noise is normal", pvalue > FALSE_ALARM, f"Kolmogorov-Smirnov p = {pvalue:.2g}")
    )

    pairs = {
        "steps": [(leaf[:-1], leaf[1:]) for leaf in leaves]
        + [(leaf[:1], leaf[-1:]) for leaf in leaves],
        "leaves": [_common(a, b) for i, a in enumerate(leaves) for b in leaves[i + 1 : i + 3]],
        "coordinates": [(leaf[:, 0::2], leaf[:, 1::2]) for leaf in leaves if leaf.shape[1] > 1],
    }
    for name, together in pairs.items():
        values = [_correlation_pvalue(*pair) for pair in together] or [1.0]
        pvalue = min(1.0, min(values) * len(values))
        checks.append(
            Check(
                f"noise of different {name} is independent",
                pvalue > FALSE_ALARM,
                f"correlation p = {pvalue:.2g}",
            )
        )
    return checks


def _matrix_check(
    noise: Noise, raw: list[np.ndarray], white: list[np.ndarray], num_steps: int
) -> Check:
    """Checks that what whitens the noise is a matrix M whose cost is the one that is priced.

    The noise says itself what whitens it: without this, half of the noise would be whitened by
    doubling it, and noise of two bands pass for independent noise.
    """
    matrix = noise.whiten(np.eye(max(len(raw[0]), min(num_steps, _MATRIX_STEPS))))
    longest = float(np.sqrt(np.max(np.sum(np.square(matrix), axis=0))))
    passed = (
        longest <= 1 + 1e-9
        and not np.triu(matrix, 1).any()
        and not np.tril(matrix, -noise.bands).any()
        and all(
            np.allclose(after, matrix[: len(before), : len(before)] @ before, atol=1e-6)
            for before, after in zip(raw, white, strict=True)
        )
    )
    reach = int(np.max(np.subtract(*np.nonzero(matrix)), initial=0)) + 1
    return Check(
        "noise has the bands and the columns that were claimed",
        bool(passed),
        f"{reach} of {noise.bands} bands, columns of norm {longest:.6g} of 1 allowed",
    )


def _common(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    size = min(a.shape[1], b.shape[1])
    return a[:, :size], b[:, :size]


def _variance_pvalue(draws: np.ndarray) -> float:
    square = float(np.sum(draws**2))
    below = float(stats.chi2.cdf(square, draws.size))
    above = float(stats.chi2.sf(square, draws.size))
    return 2 * min(below, above) if math.isfinite(square) else 0.0


def _correlation_pvalue(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the exact p-value of the uncentred correlation of normal draws of mean 0.

    For independent a and b, r = <a, b> / (|a| |b|) is the cosine between a fixed and a uniform
    direction of R^N: r sqrt((N - 1) / (1 - r^2)) has Student's law with N - 1 degrees of freedom.
    """
    size = min(a.size, b.size)
    a, b = a.ravel()[:size], b.ravel()[:size]
    norm = math.sqrt(float(np.sum(a * a)) * float(np.sum(b * b)))
    if size < 2:
        return 1.0
    if not 0 < norm < math.inf:
        return 0.0
    r = min(1.0, abs(float(np.sum(a * b))) / norm)
    if r == 1.0:
        return 0.0
    return 2 * float(stats.t.sf(r * math.sqrt((size - 1) / (1 - r * r)), size - 1))
