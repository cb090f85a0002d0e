"""`dpsgd audit`: evidence against a claim."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.cli import outputs
from experiments.cli.config import AuditConfig, check_noise
from experiments.cli.console import Console
from experiments.cli.sampler_commands import SamplerCommand


@dataclass(frozen=True)
class Audit(AuditConfig):
    """Look for evidence that a run costs more privacy than its sampler's price says.

    Without --black-box: seconds, the compiled step on neighbouring batches under equal noise, the
    noise's law and the sampler's. With it: minutes, a lower bound on epsilon from many whole runs.
    The exit status is 1 if a violation is found.
    """

    sampler: SamplerCommand


def run(config: Audit) -> int:
    """Runs `dpsgd audit`; the status is 1 if a violation was found."""
    config.check()
    check_noise(config.noise_multiplier)
    if config.black_box:
        outputs.check(config.plot, outputs.PICTURES, "--plot", overwrite=config.overwrite)
    with Console() as console:
        console.progress("starting")
        from experiments import audit

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
