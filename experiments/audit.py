"""`dpsgd audit`: see for oneself whether the program keeps what its price promises."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import optax

from accounting import epsilon, format_delta
from dpsgd import Mechanism
from dpsgd.audit.black_box import BlackBoxReport, black_box_audit
from dpsgd.audit.coupled import AuditReport, coupled_audit
from dpsgd.gradients.memory import bytes_per_example
from dpsgd.gradients.memory import microbatch_size as automatic_size
from experiments.cli import config as configs
from experiments.cli.config import AuditConfig, TrainConfig
from experiments.programs import click_algorithm
from experiments.tasks.clicks.model import functional
from experiments.tasks.clicks.schema import DISPLAY_ADS, Schema
from experiments.tasks.clicks.sizes import PRESETS, ModelConfig
from experiments.tasks.clicks.store import Store
from experiments.tasks.clicks.synthetic.uniform import uniform_rows
from samplers import BatchSampler

Progress = Callable[[str], None]

_ROWS = 64
_MICROBATCH = 24  # at most: a batch has three, the last of them not full
_MOST_BUCKETS = PRESETS["small"].max_buckets
_MOST_SECURE = 64  # buckets and units in the secure mode, whose noise takes seconds a million
_CLAIMS = {
    kind.name: kind
    for kind in (configs.Deterministic, configs.Shuffle, configs.Poisson, configs.BallsAndBins)
}


def audit_run(
    config: TrainConfig,
    schema: Schema,
    mechanism: Mechanism,
    progress: Progress = lambda line: None,
) -> str:
    """Audits the step and the sampler of a run that is about to start, and says what was checked.

    The step is the run's own: loss, clipping, noise and divisor, and a scan over microbatches where
    the run has one. Three things are not, so that it takes seconds and tells nothing about anybody:
    the rows are generated, the keys are other keys, and batches, microbatches and hash tables (with
    secure noise, also layers) are small. Sizes are shapes to the program, which does the same with
    every row of a batch and every coordinate of a table.

    Args:
      config: The run.
      schema: Columns of its data.
      mechanism: Sampler, sigma and C.
      progress: Called with one line of text.

    Raises:
      ValueError: if the run is not what its guarantee assumes; it must not be trained.
    """
    if not mechanism.noise_multiplier:
        return "not made: there is no noise"
    if not config.audit:
        return "not made: it was switched off"
    progress("auditing the step and the sampler")
    sizes = config.model_config()
    found = _audited(sizes, schema, mechanism, config.microbatch_size)
    found.require_passed()
    return _sentence(found, sizes, mechanism)


@functools.lru_cache(maxsize=256)
def _audited(
    sizes: ModelConfig, schema: Schema, mechanism: Mechanism, microbatch_size: int | None
) -> AuditReport:
    """Returns the audit of a run; a process makes it once for each mechanism."""
    return _coupled(sizes, schema, mechanism, microbatch_size, None)


def _sentence(found: AuditReport, sizes: ModelConfig, mechanism: Mechanism) -> str:
    """Returns what an audit that passed has checked, on what, and what it left out."""
    small = _small(sizes, mechanism)
    on = ["generated rows", f"batches of {_ROWS}"]
    if small.max_buckets < sizes.max_buckets:
        on.append(f"hash tables of {small.max_buckets:,} rows")
    if small.hidden != sizes.hidden:
        on.append(f"layers of {max(small.hidden)} units at most")
    said = f"passed: step and sampler keep what the price assumes, on {', '.join(on)}"
    if found.left_out:
        left_out = "; ".join(f"{check.name} ({check.detail})" for check in found.left_out)
        said += f". Not checked: {left_out}"
    return said


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
    """Audits the step of a run of these sizes, made small."""
    together = microbatch_size or _automatic_microbatch(sizes, schema, mechanism)
    scans = together < mechanism.sampler.padded_batch_size
    # All of the small batch at once where the run takes all of its own at once.
    together = min(together, _MICROBATCH) if scans else _ROWS
    small = _small(sizes, mechanism)
    params, _, _ = functional(small, schema, 0)

    def build(optimizer: optax.GradientTransformation):
        return click_algorithm(small, schema, microbatch_size=together, optimizer=optimizer)[1]

    rows = uniform_rows(schema, _ROWS)
    return coupled_audit(build, mechanism, params, rows, claimed=claimed, max_batch_size=_ROWS)


def _automatic_microbatch(sizes: ModelConfig, schema: Schema, mechanism: Mechanism) -> int:
    """Returns how many examples a run differentiates together if nobody says how many."""
    rows = uniform_rows(schema, 1)
    example = {
        name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in rows.items()
    }
    sizes_in_bytes = []

    def estimate() -> None:
        params, _, loss_fn = functional(sizes, schema, 0)
        sizes_in_bytes.append(
            bytes_per_example(
                loss_fn, params, example, per_example_gradients=mechanism.secure_noise
            )
        )

    jax.eval_shape(estimate)  # shapes alone: no table of the run's size is filled
    return automatic_size(mechanism.sampler.padded_batch_size, sizes_in_bytes[0])


def _small(sizes: ModelConfig, mechanism: Mechanism) -> ModelConfig:
    most = _MOST_SECURE if mechanism.secure_noise else _MOST_BUCKETS
    hidden = sizes.hidden
    if mechanism.secure_noise:
        hidden = tuple(min(units, most) for units in hidden)
    return dataclasses.replace(sizes, max_buckets=min(sizes.max_buckets, most), hidden=hidden)


def black_box(config: AuditConfig, progress: Progress = lambda line: None) -> BlackBoxReport:
    """Bounds epsilon from below by many runs of the sampler and the compiled step.

    Args:
      config: What to audit, and how many runs to make.
      progress: Called with one line of text whenever there is something to tell.

    Raises:
      ValueError: if there is too little noise for any finite claim, or too few trials.
    """
    mechanism = _mechanism(config)
    delta = 1 / config.num_examples if config.delta is None else config.delta
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

    from experiments.figures.drawing import save

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
    save(figure, path)


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
