"""Holds the results of an audit: checks, and the report on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

UNSEEN = (
    "The audit samples: it can miss faults at steps, values or parameters it did not test, and "
    "data held in closures"
)
"""Limits of an audit, in one sentence."""

LAW = "the sampler states the law of its draws"
"""Name of the check that is skipped for a sampler without a stated law."""


class CheckResult(NamedTuple):
    """Result of one check.

    Attributes:
      name: Statement that holds if the check passes.
      passed: True if the statement holds, or the check was skipped.
      detail: Measured values, the first fault, or the reason for skipping the check.
      performed: False if the check was skipped.
    """

    name: str
    passed: bool
    detail: str
    performed: bool = True

    @classmethod
    def skipped(cls, name: str, why: str) -> CheckResult:
        """Returns a skipped check."""
        return cls(name, True, why, performed=False)


@dataclass(frozen=True)
class AuditReport:
    """Report of an audit.

    Attributes:
      checks: Results, in the order of the checks.

    >>> AuditReport((CheckResult("noise is fresh", True, "in 3 steps"),)).lines()[-1]
    'audit: passed 1 checks, 0 skipped'
    """

    checks: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """True if every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def left_out(self) -> tuple[CheckResult, ...]:
        """Skipped checks; their details give the reasons."""
        return tuple(check for check in self.checks if not check.performed)

    @property
    def reasons(self) -> dict[str, list[str]]:
        """Names of the skipped checks, by reason."""
        names_by_reason: dict[str, list[str]] = {}
        for check in self.left_out:
            names_by_reason.setdefault(check.detail, []).append(check.name)
        return names_by_reason

    @property
    def sampler_audited(self) -> bool:
        """True if the draws were compared with a stated law."""
        return not any(check.name == LAW for check in self.left_out)

    def lines(self) -> list[str]:
        """Returns the report as lines of text, the verdict last."""
        width = max(len(check.name) for check in self.checks)
        lines = [
            f"{_verdict(check)}  {check.name:<{width}}  {check.detail}" for check in self.checks
        ]
        failed, skipped = sum(not check.passed for check in self.checks), len(self.left_out)
        verdict = f"VIOLATION: {failed} of {len(lines)} checks failed"
        if not failed:
            verdict = f"passed {len(lines) - skipped} checks, {skipped} skipped"
        verdict += "" if self.sampler_audited else ", SAMPLER NOT AUDITED"
        return [*lines, UNSEEN, f"audit: {verdict}"]

    def require_passed(self) -> None:
        """Raises ValueError that names the failed checks, if any."""
        failed = [check for check in self.checks if not check.passed]
        if failed:
            further = "".join(f", '{check.name}'" for check in failed[1:])
            raise ValueError(
                "the audit found that the guarantee does not hold for this run: the check "
                f"'{failed[0].name}' failed ({failed[0].detail}){further}; do not train it"
            )


def _verdict(check: CheckResult) -> str:
    return "FAIL" if not check.passed else "pass" if check.performed else "skip"
