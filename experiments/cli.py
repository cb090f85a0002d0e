"""The command `dpsgd`: prepare data, train, evaluate, and ask what a sampler costs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from experiments.config import (
    AuditConfig,
    CalibrateConfig,
    CompareConfig,
    EpsilonConfig,
    EvaluateConfig,
    ExportConfig,
    LedgerConfig,
    PrepareCriteoDisplay,
    PrepareSynthetic,
    ResumeConfig,
    TrainConfig,
)
from experiments.errors import in_one_line


@dataclass(frozen=True)
class Prepare:
    """Turn raw data into a store that `dpsgd train` reads."""

    format: (
        Annotated[PrepareCriteoDisplay, tyro.conf.subcommand("criteo-display", prefix_name=False)]
        | Annotated[PrepareSynthetic, tyro.conf.subcommand("synthetic", prefix_name=False)]
    )
    """What the data come from."""


STOPPED = 75
"""Exit status of a run that was asked to stop and can go on: EX_TEMPFAIL of sysexits.h."""


def train_command(config: TrainConfig | ResumeConfig) -> int:
    """Runs `dpsgd train` and `dpsgd resume`; the status is `STOPPED` if the run can go on."""
    from experiments.console import Console
    from experiments.stop import Stopped
    from experiments.train import resume, train

    try:
        with Console() as console:
            if isinstance(config, TrainConfig):
                out, record = config.out, train(config, console.progress)
            else:
                out, record = config.run, resume(config.run, config.data, console.progress)
            console.comparison([record])
            console.line(record["guarantee"])
            console.line(f"report: {out / 'report.md'}")
    except Stopped as stopped:
        print(f"dpsgd: {stopped}", file=sys.stderr)
        return STOPPED
    return 0


def ledger_command(config: LedgerConfig) -> None:
    """Runs `dpsgd ledger`."""
    from experiments.run_directory import RunDirectory

    history = RunDirectory.open(config.run, finished=False).history()
    for generation in history.generations:
        mechanism, steps = generation.terms.mechanism, generation.steps
        print(
            f"generation {generation.index}: {len(steps):,} steps from {steps.start:,} declared of "
            f"{mechanism.sampler.num_steps:,}; noise multiplier {mechanism.noise_multiplier:.6g}; "
            f"{mechanism.sampler}"
        )
    guarantee = history.guarantee()
    for note in filter(None, guarantee.notes):
        print(f"note: {note}")
    print(guarantee.sentence())


def export_command(config: ExportConfig) -> None:
    """Runs `dpsgd export`."""
    from experiments.export import export

    export(config.run, config.out)
    print(f"model and guarantee: {config.out}")


def evaluate_command(config: EvaluateConfig) -> None:
    """Runs `dpsgd evaluate`."""
    from experiments.evaluate import evaluate_run

    for name, value in dataclasses.asdict(evaluate_run(config.run, config.data)).items():
        print(f"{name}: {value:.6g}")


def prepare_command(config: Prepare) -> None:
    """Runs `dpsgd prepare`."""
    from experiments.console import Console
    from experiments.criteo import display, synthetic

    with Console() as console:

        def progress(rows: int) -> None:
            console.progress(f"{rows:,} rows")

        match config.format:
            case PrepareCriteoDisplay(source, out, hash_seed):
                store = display.prepare(source, out, hash_seed=hash_seed, progress=progress)
            case PrepareSynthetic(out, num_rows, seed):
                store, summary = synthetic.write_store(out, num_rows, seed, progress=progress)
                console.line(f"best reachable AUC: {summary.bayes_auc:.4f}")
        console.line(f"{store.num_rows:,} rows in {config.format.out}")


def epsilon_command(config: EpsilonConfig) -> None:
    """Runs `dpsgd epsilon`."""
    from dpsgd.algorithm import Mechanism
    from dpsgd.guarantee import Guarantee

    sampler, delta = config.build()
    guarantee = Guarantee.of(Mechanism(sampler, config.noise_multiplier, 1.0), delta)
    print(guarantee.sentence())
    for note in guarantee.notes:
        print(f"note: {note}")


def compare_command(config: CompareConfig) -> None:
    """Runs `dpsgd compare`."""
    from matplotlib.figure import Figure

    from accounting import format_delta
    from experiments import compare
    from experiments.console import Console

    if not config.noise_multipliers:
        raise ValueError("--noise-multipliers needs at least one number")
    samplers = compare.all_samplers(config.num_examples, config.batch_size, config.epochs)
    delta = 1 / config.num_examples if config.delta is None else config.delta
    with Console() as console:
        found = compare.curves(samplers, config.noise_multipliers, delta, console.progress)
        console.line(f"epsilon [lower, upper] at delta {format_delta(delta)}, zero-out adjacency")
        console.table(*compare.table(found))
        if config.out is not None:
            figure = Figure(figsize=(7, 5), layout="constrained")
            title = f"n = {config.num_examples:,}, b = {config.batch_size:,}, E = {config.epochs}"
            compare.draw(figure.subplots(), found, f"{title}, δ = {format_delta(delta)}")
            compare.save(figure, config.out)
            console.line(f"drawn: {config.out}")


def calibrate_command(config: CalibrateConfig) -> None:
    """Runs `dpsgd calibrate`."""
    from accounting import Bound, calibrate, format_delta

    sampler, delta = config.build()
    sigma = calibrate(sampler.privacy, epsilon=config.epsilon, delta=delta)
    # Rounded up: the printed number suffices as it stands.
    printed = Bound(sigma, sigma).format_upper(".6g")
    at = f"at delta {format_delta(delta)}"
    print(f"noise multiplier {printed} gives epsilon <= {config.epsilon} {at}")


def audit_command(config: AuditConfig) -> int:
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


COMMANDS: dict[type, Callable[[Any], int | None]] = {
    TrainConfig: train_command,
    ResumeConfig: train_command,
    LedgerConfig: ledger_command,
    ExportConfig: export_command,
    EvaluateConfig: evaluate_command,
    Prepare: prepare_command,
    EpsilonConfig: epsilon_command,
    CompareConfig: compare_command,
    CalibrateConfig: calibrate_command,
    AuditConfig: audit_command,
}

Command = (
    Annotated[Prepare, tyro.conf.subcommand("prepare")]
    | Annotated[TrainConfig, tyro.conf.subcommand("train")]
    | Annotated[ResumeConfig, tyro.conf.subcommand("resume")]
    | Annotated[LedgerConfig, tyro.conf.subcommand("ledger")]
    | Annotated[ExportConfig, tyro.conf.subcommand("export")]
    | Annotated[EvaluateConfig, tyro.conf.subcommand("evaluate")]
    | Annotated[EpsilonConfig, tyro.conf.subcommand("epsilon")]
    | Annotated[CompareConfig, tyro.conf.subcommand("compare")]
    | Annotated[CalibrateConfig, tyro.conf.subcommand("calibrate")]
    | Annotated[AuditConfig, tyro.conf.subcommand("audit")]
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
