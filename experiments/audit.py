"""`dpsgd audit`: see for oneself whether the program keeps what its price promises."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import optax

from accounting import epsilon, format_delta
from dpsgd import Mechanism, dpsgd
from dpsgd.audit import AuditReport, coupled_audit
from dpsgd.audit_black_box import BlackBoxReport, black_box_audit
from experiments import config as configs
from experiments.config import AuditConfig
from experiments.criteo import synthetic
from experiments.criteo.model import PRESETS, functional
from experiments.criteo.store import Store
from samplers import BatchSampler

Progress = Callable[[str], None]

_SYNTHETIC_ROWS = 1_000
_CLAIMS = {
    kind.name: kind
    for kind in (configs.Deterministic, configs.Shuffle, configs.Poisson, configs.BallsAndBins)
}


def coupled(config: AuditConfig, progress: Progress = lambda line: None) -> AuditReport:
    """Audits the compiled training step of the small click model, and the sampler's draws.

    Args:
      config: What to audit; `data` is where the examples come from.
      progress: Called with one line of text whenever there is something to tell.
    """
    mechanism = _mechanism(config)
    if config.data is None:
        progress("generating examples")
        with tempfile.TemporaryDirectory() as folder:
            store, _ = synthetic.write_store(Path(folder) / "store", _SYNTHETIC_ROWS, seed=0)
            columns = {name: column.copy() for name, column in store.load("train").items()}
    else:
        store = Store.open(config.data)
        columns = store.load("train")
    params, _, loss_fn = functional(PRESETS["small"], store.schema, 0)

    def build(optimizer: optax.GradientTransformation):
        return dpsgd(loss_fn, optimizer, mechanism)

    progress("compiling and running the training step")
    return coupled_audit(build, params, columns, claimed=_claimed(config, mechanism.sampler))


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
    return black_box_audit(mechanism, claim, delta=delta, trials=config.trials, progress=progress)


def plot(report: BlackBoxReport, path: Path) -> None:
    """Draws the score in both worlds, the event that was counted, and the bound with the claim.

    Args:
      report: From `black_box`.
      path: File to write; its suffix chooses the format.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2))
    both = np.concatenate([report.present, report.absent])
    bins = np.linspace(both.min(), both.max(), 80).tolist()
    for values, label in ((report.present, "canary present"), (report.absent, "canary absent")):
        left.hist(values, bins, histtype="step", label=label)
    left.axvline(report.event.threshold, color="black", linestyle="--", label="threshold")
    left.set(yscale="log", xlabel=f"score: {report.event.score}", ylabel="runs", title=report.game)
    left.legend()

    bars = {
        "proved by\nthe outputs": report.epsilon_lower,
        "claimed": report.claim.upper,
        "detection\nlimit": max(0.0, report.detection_limit),
    }
    colours = ["tab:red" if report.violation else "tab:green", "tab:blue", "lightgrey"]
    drawn = right.bar(list(bars), list(bars.values()), color=colours)
    right.bar_label(drawn, fmt="%.2f")
    verdict = "VIOLATION" if report.violation else "consistent"
    right.set(ylabel=f"epsilon at delta {format_delta(report.delta)}", title=verdict)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _mechanism(config: AuditConfig) -> Mechanism:
    sampler = config.sampler.build(config.num_examples, config.delta)
    return Mechanism(sampler, config.noise_multiplier, config.l2_clip_norm)


def _claimed(config: AuditConfig, sampler: BatchSampler) -> BatchSampler:
    """Returns the sampler whose price is claimed: the audited one's own, or `config.claim`'s."""
    if config.claim is None:
        return sampler
    kind = _CLAIMS[config.claim]
    claim = kind(batch_size=config.sampler.batch_size, epochs=config.sampler.epochs)
    return claim.build(config.num_examples, config.delta)
