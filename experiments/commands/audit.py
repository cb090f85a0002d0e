"""`dpsgd audit`: evidence against a claim."""

from __future__ import annotations

from experiments.config import AuditConfig


def run(config: AuditConfig) -> int:
    """Runs `dpsgd audit`; the status is 1 if a violation was found."""
    from experiments import audit
    from experiments.console import Console

    with Console() as console:
        if not config.black_box:
            report = audit.coupled(config, console.progress)
            for line in report.lines():
                console.line(line)
            return 0 if report.passed else 1
        bound = audit.black_box(config, console.progress)
        audit.plot(bound, config.plot)
        for line in (*bound.lines(), f"plot: {config.plot}"):
            console.line(line)
        return 1 if bound.violation else 0
