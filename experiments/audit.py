"""`dpsgd audit`: see for oneself whether the program keeps what its price promises."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import optax

from accounting import epsilon, format_delta
from dpsgd import Mechanism
from dpsgd.audit import AuditReport, coupled_audit
from dpsgd.audit_black_box import BlackBoxReport, black_box_audit
from experiments import config as configs
from experiments.config import AuditConfig, TrainConfig
from experiments.criteo.model import PRESETS, ModelConfig, functional
from experiments.criteo.schema import DISPLAY_ADS, Schema
from experiments.criteo.store import Columns, Store
from experiments.programs import click_algorithm
from samplers import BatchSampler

Progress = Callable[[str], None]

_ROWS = 64
_MOST_BUCKETS = PRESETS["small"].max_buckets
_CLAIMS = {
    kind.name: kind
    for kind in (configs.Deterministic, configs.Shuffle, configs.Poisson, configs.BallsAndBins)
}


def audit_run(
    config: TrainConfig,
    schema: Schema,
    mechanism: Mechanism,
    progress: Progress = lambda line: None,
) -> None:
    """Audits the step and the sampler of a run that is about to start.

    The step is the run's own: loss, clipping, microbatches, noise and divisor. Three things are
    not, so that it takes seconds and tells nothing about anybody: the rows are generated, the keys
    are other keys, and batches and hash tables are small. Sizes are shapes to the program, which
    does the same with every row of a batch and every coordinate of a table.

    Args:
      config: The run.
      schema: Columns of its data.
      mechanism: Sampler, sigma and C.
      progress: Called with one line of text.

    Raises:
      ValueError: if the run is not what its guarantee assumes; it must not be trained.
    """
    if not config.audit or not mechanism.noise_multiplier:
        return
    progress("auditing the step and the sampler")
    _require_passed(_small(config.model_config()), schema, mechanism, config.microbatch_size)


@functools.lru_cache(maxsize=256)
def _require_passed(
    sizes: ModelConfig, schema: Schema, mechanism: Mechanism, microbatch_size: int | None
) -> None:
    """Raises ValueError unless the audit passes; a process asks once for each mechanism."""
    _coupled(sizes, schema, mechanism, microbatch_size, None).require_passed()


def audit_sentence(config: TrainConfig) -> str:
    """Returns what `audit_run` had to say about a run that was trained; it depends on no row."""
    if config.non_private:
        return "not made: there is no noise"
    if not config.audit:
        return "not made: it was switched off"
    sizes = config.model_config()
    tables = "" if _small(sizes) == sizes else f" and hash tables of {_MOST_BUCKETS:,} rows"
    return f"passed: step and sampler keep what the price assumes, on generated rows{tables}"


def coupled(config: AuditConfig, progress: Progress = lambda line: None) -> AuditReport:
    """Audits the compiled training step of the small click model, and the sampler's draws.

    Args:
      config: What to audit; `data` names the columns, its rows are not read.
      progress: Called with one line of text whenever there is something to tell.
    """
    mechanism = _mechanism(config)
    schema = DISPLAY_ADS if config.data is None else Store.open(config.data).schema
    progress("compiling and running the training step")
    claimed = _claimed(config, mechanism.sampler)
    return _coupled(PRESETS["small"], schema, mechanism, None, claimed)


def _coupled(
    sizes: ModelConfig,
    schema: Schema,
    mechanism: Mechanism,
    microbatch_size: int | None,
    claimed: BatchSampler | None,
) -> AuditReport:
    params, _, _ = functional(sizes, schema, 0)

    def build(optimizer: optax.GradientTransformation):
        return click_algorithm(
            sizes, schema, mechanism, microbatch_size=microbatch_size, optimizer=optimizer
        )[1]

    # Where there are microbatches, a batch has several, the last of them not full.
    width = max(_ROWS, 2 * (microbatch_size or 0) + 1)
    rows = generated_rows(schema, _ROWS)
    return coupled_audit(build, params, rows, claimed=claimed, max_batch_size=width)


def _small(sizes: ModelConfig) -> ModelConfig:
    return dataclasses.replace(sizes, max_buckets=min(sizes.max_buckets, _MOST_BUCKETS))


def generated_rows(schema: Schema, count: int) -> Columns:
    """Returns `count` rows of the columns of `schema`, which are nobody's."""
    rng = np.random.default_rng(0)
    shape = count, len(schema.integers)
    missing = rng.random(shape) < 0.2
    return {
        "label": rng.integers(0, 2, count).astype(np.uint8),
        "integers": np.where(missing, 0, rng.uniform(0, 12, shape)).astype(np.float32),
        "integers_missing": missing,
        "categories": rng.integers(
            0, schema.buckets, (count, len(schema.buckets)), endpoint=True
        ).astype(np.int32),
    }


def black_box(config: AuditConfig, progress: Progress = lambda line: None) -> BlackBoxReport:
    """Bounds epsilon from below by many runs of the sampler and the compiled step.

    Args:
      config: What to audit, and how many runs to make.
      progress: Called with one line of text whenever there is something to tell.

    Raises:
      ValueError: if there is too little noise for any finite claim, or too few trials.
    """
    mechanism = _mechanism(config)
    delta = config.delta or 1 / config.num_examples
    progress("pricing the claim")
    claim = epsilon(_claimed(config, mechanism.sampler).privacy(config.noise_multiplier), delta)
    if math.isinf(claim.upper):
        raise ValueError(
            f"no finite epsilon is claimed at delta {format_delta(delta)}, so there is nothing to "
            "refute: raise --noise-multiplier or --delta"
        )
    return black_box_audit(mechanism, claim, delta=delta, trials=config.trials, progress=progress)


def plot(report: BlackBoxReport, path: Path) -> None:
    """Draws the score in both worlds, the event that was counted, and the bound with the claim.

    Args:
      report: From `black_box`.
      path: File to write; its suffix chooses the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(5, 2))
    found, claimed = report.epsilon_lower, report.claim.upper
    verdict = "VIOLATION" if report.violation else "consistent"
    figure.suptitle(
        f"{verdict}: the outputs prove ε ≥ {found:.3f}, the claim is ε ≤ "
        f"{report.claim.format_upper('.3f')} at δ = {format_delta(report.delta)}"
    )

    event, hits = report.event, (report.true_positives, report.false_positives)
    bins = _bins(report)
    worlds = [("present", report.present, "tab:blue"), ("absent", report.absent, "tab:orange")]
    for (world, scores, colour), count in zip(
        worlds, hits if event.present else hits[::-1], strict=True
    ):
        label = f"canary {world}: {count:,} of {scores.size:,} runs"
        left.hist(scores, bins, histtype="stepfilled", color=colour, alpha=0.3)
        left.hist(scores, bins, histtype="step", color=colour, label=label)
    edges = (event.threshold, bins[-1]) if event.present else (bins[0], event.threshold)
    left.axvspan(*edges, color="black", alpha=0.08, zorder=0)
    left.axvline(event.threshold, color="black", linestyle="--", linewidth=1)
    left.set(
        yscale="log",
        xlim=(bins[0], bins[-1]),
        xlabel=f"score: {event.score}",
        ylabel="runs",
        title=f"the event that was counted (shaded); canary +1, {report.game}",
    )
    left.legend(title="in the event", loc="upper right")

    bars = {"proved": found, "claimed": claimed, "detection\nlimit": report.detection_limit}
    heights = [max(0.0, value) for value in bars.values()]
    colours = ["tab:red" if report.violation else "tab:green", "tab:blue", "lightgrey"]
    right.bar_label(right.bar(list(bars), heights, color=colours), fmt="%.2f", padding=2)
    right.axhline(claimed, color="tab:blue", linestyle="--", linewidth=1)
    right.set(ylabel=f"ε at confidence {report.confidence:.0%}", ylim=(0, 1.12 * max(heights)))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _bins(report: BlackBoxReport) -> list[float]:
    """Returns the edges of bins of equal width, one of which is the event's threshold."""
    both = np.concatenate([report.present, report.absent])
    low, high, threshold = float(both.min()), float(both.max()), report.event.threshold
    width = (high - low) / 80 or 1.0
    below, above = math.ceil((threshold - low) / width), math.ceil((high - threshold) / width)
    return [threshold + k * width for k in range(-max(1, below), max(1, above) + 1)]


def _mechanism(config: AuditConfig) -> Mechanism:
    sampler = config.sampler.build(config.num_examples, config.delta)
    return Mechanism(sampler, config.noise_multiplier, config.l2_clip_norm, config.secure_noise)


def _claimed(config: AuditConfig, sampler: BatchSampler) -> BatchSampler:
    """Returns the sampler whose price is claimed: the audited one's own, or `config.claim`'s."""
    if config.claim is None:
        return sampler
    kind = _CLAIMS[config.claim]
    claim = kind(batch_size=config.sampler.batch_size, epochs=config.sampler.epochs)
    return claim.build(config.num_examples, config.delta)
