"""DP-SGD in JAX: clipping, noise and update as one compiled program.

>>> import jax.numpy as jnp, optax
>>> from dpsgd import Mechanism, dpsgd, train
>>> from samplers import BallsAndBins
>>> def loss(params, example):
...     return (params["w"] * example["x"] - example["y"]) ** 2
>>> data = {"x": jnp.linspace(-1, 1, 1_000), "y": 3 * jnp.linspace(-1, 1, 1_000)}
>>> sampler = BallsAndBins(num_examples=1_000, batch_size=100, epochs=5)
>>> mechanism = Mechanism(sampler, noise_multiplier=1.0, l2_clip_norm=1.0)
>>> params, guarantee = train(
...     dpsgd(loss, optax.adam(0.1)), mechanism, {"w": jnp.zeros(())}, data, delta=1e-5)
>>> guarantee.epsilon.format_upper()
'4.29'

Names are imported on first use, so that reading a ledger does not wait for JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpsgd.core.cost import cost
    from dpsgd.core.mechanism import Mechanism
    from dpsgd.core.noise import Independent, Noise
    from dpsgd.core.segments import Segment, Trials
    from dpsgd.core.state import Diagnostics
    from dpsgd.engine.algorithm import dpsgd
    from dpsgd.engine.averages import averaged
    from dpsgd.engine.calibration import Platt, calibration_sums
    from dpsgd.engine.closures import public
    from dpsgd.engine.lazy.group import LazyTables
    from dpsgd.engine.loop import train_blocks
    from dpsgd.engine.modules import module_with_rows, split_module
    from dpsgd.engine.placement import Placement
    from dpsgd.engine.queries import Refinement
    from dpsgd.engine.sources import RowSource, row_source
    from dpsgd.gradients.clipping import clipped_grad
    from dpsgd.gradients.memory import explain
    from dpsgd.gradients.rows import with_rows
    from dpsgd.gradients.rules import AutomaticClipping, PerLayerClipping
    from dpsgd.models.model import load_exported
    from dpsgd.noise.correlated import BandedToeplitz
    from dpsgd.runs.log import MetricWriter
    from dpsgd.runs.recommendation import Settings
    from dpsgd.runs.run import Run, resume, run
    from dpsgd.runs.spec import (
        SGD,
        Adam,
        AdamW,
        Auto,
        Banded,
        Lazy,
        MovingAverage,
        NoiseMultiplier,
        NonPrivate,
        Optimizer,
        RunSpec,
        TailAverage,
        TargetEpsilon,
    )
    from dpsgd.runs.task import Task
    from dpsgd.selection.engine import select
    from dpsgd.trainer import train

__version__ = "0.3.0"

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Auto",
    "AutomaticClipping",
    "Banded",
    "BandedToeplitz",
    "Diagnostics",
    "Independent",
    "Lazy",
    "LazyTables",
    "Mechanism",
    "MetricWriter",
    "MovingAverage",
    "Noise",
    "NoiseMultiplier",
    "NonPrivate",
    "Optimizer",
    "PerLayerClipping",
    "Placement",
    "Platt",
    "Refinement",
    "RowSource",
    "Run",
    "RunSpec",
    "Segment",
    "Settings",
    "TailAverage",
    "TargetEpsilon",
    "Task",
    "Trials",
    "averaged",
    "calibration_sums",
    "clipped_grad",
    "cost",
    "dpsgd",
    "explain",
    "load_exported",
    "module_with_rows",
    "public",
    "resume",
    "row_source",
    "run",
    "select",
    "split_module",
    "train",
    "train_blocks",
    "with_rows",
]

_MODULES = {
    "engine.calibration": ("Platt", "calibration_sums"),
    "engine.closures": ("public",),
    "engine.algorithm": ("dpsgd",),
    "engine.averages": ("averaged",),
    "gradients.clipping": ("clipped_grad",),
    "core.state": ("Diagnostics",),
    "gradients.rows": ("with_rows",),
    "gradients.rules": (
        "AutomaticClipping",
        "PerLayerClipping",
    ),
    "models.model": ("load_exported",),
    "runs.run": ("Run", "resume", "run"),
    "runs.log": ("MetricWriter",),
    "runs.recommendation": ("Settings",),
    "runs.spec": (
        "Adam",
        "AdamW",
        "Auto",
        "Banded",
        "Lazy",
        "MovingAverage",
        "NoiseMultiplier",
        "NonPrivate",
        "Optimizer",
        "RunSpec",
        "SGD",
        "TailAverage",
        "TargetEpsilon",
    ),
    "runs.task": ("Task",),
    "selection.engine": ("select",),
    "engine.lazy.group": ("LazyTables",),
    "core.cost": ("cost",),
    "core.segments": ("Segment", "Trials"),
    "core.noise": ("Independent", "Noise"),
    "noise.correlated": ("BandedToeplitz",),
    "trainer": ("train",),
    "engine.loop": ("train_blocks",),
    "core.mechanism": ("Mechanism",),
    "gradients.memory": ("explain",),
    "engine.modules": ("module_with_rows", "split_module"),
    "engine.sources": ("RowSource", "row_source"),
    "engine.placement": ("Placement",),
    "engine.queries": ("Refinement",),
}
"""Modules of the public names, imported on demand."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = getattr(importlib.import_module(f"dpsgd.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
