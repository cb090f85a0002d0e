"""What an audit finds: its checks, its report, and the p-values of its tests of randomness.

Every p-value is exact, or proved to be valid: where nothing is wrong, it is at most x with
probability at most x. A check of several p-values corrects them by their number (Bonferroni), and
fails by chance with probability `FALSE_ALARM` at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import special

FALSE_ALARM = 1e-8
"""Probability, at most, that one check of randomness fails where nothing is wrong."""

FINE = 0.02
"""Part of the noise that may be missing unseen in an audit that does not say so."""

UNSEEN = (
    "Not seen: what a loss or an optimizer does with data that it holds in a closure in another "
    "shape than rows; and what happens only at steps, for values in rows, at coordinates of "
    "releases of more than 2^18 numbers, or in rows of large tables, that were not looked at"
)
"""What releases do not show: such a loss or optimizer brings the data along by itself. Of a long
run some steps are looked at, on synthetic rows; of a large release 2^18 or 2^19 coordinates, both
ends of each leaf among them; of a large table with deferred noise the rows that
these read, and some others."""

LAW = "the draws have the law that was claimed"
"""Name of the check that is left out where a sampler states no law."""


class CheckResult(NamedTuple):
    """One thing to look at."""

    name: str
    passed: bool
    detail: str
    made: bool = True
    """False where it was left out, as `detail` says; it then counts as passed."""
    pvalue: float | None = None
    """Of a check of randomness, in [0, 1]: already corrected, where several things were tested."""
    resolution: float = 0.0
    """Part of the noise that may be missing and not be seen."""

    @classmethod
    def skipped(cls, name: str, why: str) -> CheckResult:
        """Returns a check that was left out."""
        return cls(name, True, why, made=False)

    @classmethod
    def of(cls, name: str, pvalues: Any, detail: str = "") -> CheckResult:
        """Returns a check of randomness, of one p-value or several (`smallest`); NaN fails it.

        >>> CheckResult.of("coins are fair", 0.25, "60 of 100").detail
        '60 of 100; p = 0.25'
        """
        pvalue = smallest(pvalues)
        shown = f"p = {pvalue:.2g}"
        detail = f"{detail}; {shown}" if detail else shown
        return cls(name, bool(pvalue > FALSE_ALARM), detail, pvalue=pvalue)


@dataclass(frozen=True)
class AuditReport:
    """What the audit saw.

    Attributes:
      checks: In the order in which they were made.
    """

    checks: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """Whether every check did."""
        return all(check.passed for check in self.checks)

    @property
    def left_out(self) -> tuple[CheckResult, ...]:
        """The checks that were not made; their details say why."""
        return tuple(check for check in self.checks if not check.made)

    @property
    def reasons(self) -> dict[str, list[str]]:
        """The names of the checks that were not made, by reason."""
        found: dict[str, list[str]] = {}
        for check in self.left_out:
            found.setdefault(check.detail, []).append(check.name)
        return found

    @property
    def sampler_audited(self) -> bool:
        """Whether the sampler's draws were held against a law, which it must state."""
        return not any(check.name == LAW for check in self.left_out)

    @property
    def limits(self) -> str:
        """What the audit does not see, in sentences."""
        worst = max((check.resolution for check in self.checks), default=0.0)
        if worst <= FINE:
            return UNSEEN
        less = f"Noise that lacks less than {100 * worst:.2g} % of its scale is not told from sound"
        return f"{less}. {UNSEEN}"

    def lines(self) -> list[str]:
        """Returns one line a check, and the verdict."""
        width = max(len(check.name) for check in self.checks)
        lines = [
            f"{_verdict(check)}  {check.name:<{width}}  {check.detail}" for check in self.checks
        ]
        failed = sum(not check.passed for check in self.checks)
        verdict = f"VIOLATION: {failed} of {len(lines)} checks failed" if failed else "consistent"
        verdict += "" if self.sampler_audited else ", SAMPLER NOT AUDITED"
        return [*lines, self.limits, f"audit: {verdict}"]

    def require_passed(self) -> None:
        """Raises ValueError, naming the checks that failed, unless the audit passed.

        What the first found is told: the others mostly follow from it.
        """
        failed = [check for check in self.checks if not check.passed]
        if failed:
            first = failed[0]
            others = "".join(f", '{check.name}'" for check in failed[1:])
            raise ValueError(
                "the audit found that this run is not what its guarantee assumes; "
                f"{len(failed)} of {len(self.checks)} checks failed: '{first.name}' "
                f"({first.detail}){others}. A sound run fails by chance once in a million: "
                "do not train it"
            )


def _verdict(check: CheckResult) -> str:
    return "FAIL" if not check.passed else "pass" if check.made else "skip"


def smallest(pvalues: Any, count: int | None = None) -> float:
    """Returns the p-value of several: the smallest times their number (Bonferroni).

    In a list each one may be several, so that a few are not outweighed by many beside them.

    Args:
      pvalues: Of whatever dependence: a number, an array, or a list of such. NaN gives NaN, and
        none at all 1.
      count: Of the tests that were made, if `pvalues` are but those that hold the smallest.

    >>> smallest([0.02, np.array([0.5, 0.001, 0.3])])
    0.006
    """
    if isinstance(pvalues, list):
        pvalues = [smallest(np.asarray(one)) for one in pvalues]
    values = np.asarray(pvalues, np.float64)
    return float(np.minimum(1.0, max(1, count or values.size) * np.min(values, initial=1.0)))


def count_pvalue(count: Any, trials: Any, probability: Any) -> Any:
    """Returns twice Chernoff's bound on so rare a count, a valid two-sided p-value.

    With N trials that are independent or negatively associated, of mean probability p, Pr[count >=
    k] <= exp(-N KL(k/N || p)) for k >= N p, and likewise below (W. Hoeffding, 1963, Theorem 1).

    Args:
      count: k, an array or a number.
      trials: N > 0.
      probability: p.
    """
    share = np.asarray(count) / trials
    # A share beyond 1 cannot be: rounding of p near 0 and 1 must not make it likely.
    p = np.asarray(probability, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        divergence = special.rel_entr(share, p) + special.rel_entr(1 - share, 1 - p)
        return np.minimum(1.0, 2 * np.exp(-trials * np.maximum(0.0, divergence)))


def order_pvalue(count: Any, expected: Any) -> Any:
    """Returns Chatterjee's bound on a count X of entries of random orders, two-sided.

    Pr[|X - E X| >= t] <= 2 exp(-t^2 / (4 E X + 2 t)): docs/explanation/tests-of-sampled-batches.md.

    Args:
      count: X, an array or a number.
      expected: E X.
    """
    apart = np.abs(count - expected)
    return np.minimum(1.0, 2 * np.exp(-(apart**2) / np.maximum(4 * expected + 2 * apart, 1e-9)))


def variance_pvalue(square: Any, size: Any) -> Any:
    """Returns the exact two-sided p-value of a sum of squares of standard normals: chi-square.

    Args:
      square: The sum, an array or a number; infinity and NaN, which never happen, give 0.
      size: How many normals; none have the p-value 1.
    """
    square, half = np.asarray(square, np.float64), np.maximum(1, size) / 2
    finite = np.isfinite(square)
    some = np.where(finite, square, 0) / 2
    both = np.minimum(special.gammainc(half, some), special.gammaincc(half, some))
    return np.where(np.asarray(size) == 0, 1.0, np.where(finite, 2 * both, 0.0))


def correlation_pvalue(cosine: Any, size: Any) -> Any:
    """Returns the exact p-value of the uncentred correlation of normal draws of mean 0.

    For independent a and b, one of them of a spherical law on R^N, r = <a, b> / (|a| |b|) is the
    cosine between a fixed and a uniform direction, and r^2 has the law Beta(1/2, (N - 1)/2).

    Args:
      cosine: r, an array or a number; NaN, as of a zero vector, gives 0.
      size: N; with one coordinate nothing is seen, and the p-value is 1.
    """
    square = np.minimum(1.0, np.square(np.asarray(cosine, np.float64)))
    tail = special.betaincc(0.5, np.maximum(1, np.asarray(size) - 1) / 2, square)
    return np.where(np.isnan(square), 0.0, np.where(np.asarray(size) < 2, 1.0, tail))


def entropy_pvalue(entropy: Any, freedom: Any) -> Any:
    """Returns a bound on the probability of so much relative entropy between shares and a law.

    The sum G of N KL(shares || law) over independent tables, d the sum of their cells less 1, has
    Pr[G >= g] <= (g / d)^d e^(d - g) for g >= d: docs/explanation/tests-of-sampled-batches.md.

    Args:
      entropy: g, an array or a number; infinity where what cannot be has happened.
      freedom: d >= 0; without any, nothing is seen.
    """
    d = np.asarray(freedom, np.float64)
    g = np.maximum(np.asarray(entropy, np.float64), d)
    with np.errstate(divide="ignore", invalid="ignore"):
        bound = np.exp(d * np.log(g / d) + d - g)
    return np.where(d == 0, 1.0, np.where(np.isinf(g), 0.0, bound))
