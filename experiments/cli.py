"""The command `dpsgd`: prepare data, train, evaluate, and ask what a sampler costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import tyro

from experiments.commands import (
    audit,
    calibrate,
    compare,
    contributions,
    epsilon,
    evaluate,
    export,
    ledger,
    prepare,
    report,
    score,
    sweep,
    train,
)
from experiments.errors import in_one_line

COMMANDS: dict[type, Callable[[Any], int | None]] = {
    prepare.Prepare: prepare.run,
    train.Train: train.run,
    train.ResumeConfig: train.run,
    sweep.SweepConfig: sweep.run,
    ledger.LedgerConfig: ledger.run,
    export.ExportConfig: export.run,
    evaluate.EvaluateConfig: evaluate.run,
    score.ScoreConfig: score.run,
    report.ReportConfig: report.run,
    epsilon.EpsilonConfig: epsilon.run,
    compare.CompareConfig: compare.run,
    calibrate.CalibrateConfig: calibrate.run,
    contributions.ContributionsConfig: contributions.run,
    audit.Audit: audit.run,
}

Command = (
    Annotated[prepare.Prepare, tyro.conf.subcommand("prepare")]
    | Annotated[train.Train, tyro.conf.subcommand("train")]
    | Annotated[train.ResumeConfig, tyro.conf.subcommand("resume")]
    | Annotated[sweep.SweepConfig, tyro.conf.subcommand("sweep")]
    | Annotated[ledger.LedgerConfig, tyro.conf.subcommand("ledger")]
    | Annotated[export.ExportConfig, tyro.conf.subcommand("export")]
    | Annotated[evaluate.EvaluateConfig, tyro.conf.subcommand("evaluate")]
    | Annotated[score.ScoreConfig, tyro.conf.subcommand("score")]
    | Annotated[report.ReportConfig, tyro.conf.subcommand("report")]
    | Annotated[epsilon.EpsilonConfig, tyro.conf.subcommand("epsilon")]
    | Annotated[compare.CompareConfig, tyro.conf.subcommand("compare")]
    | Annotated[calibrate.CalibrateConfig, tyro.conf.subcommand("calibrate")]
    | Annotated[contributions.ContributionsConfig, tyro.conf.subcommand("contributions")]
    | Annotated[audit.Audit, tyro.conf.subcommand("audit")]
)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; what a user can mend ends in one clear line and exit status 2."""

    def run() -> int:
        config = tyro.cli(
            Command,
            prog="dpsgd",
            description="Private training with a guarantee that the batch sampler has earned.",
            args=argv,
            config=(tyro.conf.CascadeSubcommandArgs, tyro.conf.OmitArgPrefixes),
        )
        return COMMANDS[type(config)](config) or 0

    return in_one_line("dpsgd", run)
