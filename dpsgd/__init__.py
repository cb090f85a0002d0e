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
    from dpsgd.core.cost import cost as cost
    from dpsgd.core.mechanism import Mechanism as Mechanism
    from dpsgd.core.noise import Independent as Independent
    from dpsgd.core.noise import Noise as Noise
    from dpsgd.core.segments import Segment as Segment
    from dpsgd.core.segments import Trials as Trials
    from dpsgd.core.state import Diagnostics as Diagnostics
    from dpsgd.engine.algorithm import dpsgd as dpsgd
    from dpsgd.engine.averages import averaged as averaged
    from dpsgd.engine.calibration import Platt as Platt
    from dpsgd.engine.calibration import calibration_sums as calibration_sums
    from dpsgd.engine.closures import public as public
    from dpsgd.engine.lazy.group import LazyTables as LazyTables
    from dpsgd.engine.loop import train_blocks as train_blocks
    from dpsgd.engine.modules import module_with_rows as module_with_rows
    from dpsgd.engine.modules import split_module as split_module
    from dpsgd.engine.placement import Placement as Placement
    from dpsgd.engine.queries import Refinement as Refinement
    from dpsgd.engine.sources import RowSource as RowSource
    from dpsgd.engine.sources import row_source as row_source
    from dpsgd.gradients.clipping import clipped_grad as clipped_grad
    from dpsgd.gradients.memory import explain as explain
    from dpsgd.gradients.rows import with_rows as with_rows
    from dpsgd.gradients.rules import AutomaticClipping as AutomaticClipping
    from dpsgd.gradients.rules import PerLayerClipping as PerLayerClipping
    from dpsgd.models.model import load_exported as load_exported
    from dpsgd.noise.correlated import BandedToeplitz as BandedToeplitz
    from dpsgd.runs.log import MetricWriter as MetricWriter
    from dpsgd.runs.recommendation import Settings as Settings
    from dpsgd.runs.run import Run as Run
    from dpsgd.runs.run import resume as resume
    from dpsgd.runs.run import run as run
    from dpsgd.runs.spec import SGD as SGD
    from dpsgd.runs.spec import Adam as Adam
    from dpsgd.runs.spec import AdamW as AdamW
    from dpsgd.runs.spec import Auto as Auto
    from dpsgd.runs.spec import Banded as Banded
    from dpsgd.runs.spec import Lazy as Lazy
    from dpsgd.runs.spec import MovingAverage as MovingAverage
    from dpsgd.runs.spec import NoiseMultiplier as NoiseMultiplier
    from dpsgd.runs.spec import NonPrivate as NonPrivate
    from dpsgd.runs.spec import Optimizer as Optimizer
    from dpsgd.runs.spec import RunSpec as RunSpec
    from dpsgd.runs.spec import TailAverage as TailAverage
    from dpsgd.runs.spec import TargetEpsilon as TargetEpsilon
    from dpsgd.runs.task import Task as Task
    from dpsgd.selection.engine import select as select
    from dpsgd.trainer import train as train

__version__ = "0.3.0"

_MODULES = {
    "SGD": "runs.spec",
    "Adam": "runs.spec",
    "AdamW": "runs.spec",
    "Auto": "runs.spec",
    "AutomaticClipping": "gradients.rules",
    "Banded": "runs.spec",
    "BandedToeplitz": "noise.correlated",
    "Diagnostics": "core.state",
    "Independent": "core.noise",
    "Lazy": "runs.spec",
    "LazyTables": "engine.lazy.group",
    "Mechanism": "core.mechanism",
    "MetricWriter": "runs.log",
    "MovingAverage": "runs.spec",
    "Noise": "core.noise",
    "NoiseMultiplier": "runs.spec",
    "NonPrivate": "runs.spec",
    "Optimizer": "runs.spec",
    "PerLayerClipping": "gradients.rules",
    "Placement": "engine.placement",
    "Platt": "engine.calibration",
    "Refinement": "engine.queries",
    "RowSource": "engine.sources",
    "Run": "runs.run",
    "RunSpec": "runs.spec",
    "Segment": "core.segments",
    "Settings": "runs.recommendation",
    "TailAverage": "runs.spec",
    "TargetEpsilon": "runs.spec",
    "Task": "runs.task",
    "Trials": "core.segments",
    "averaged": "engine.averages",
    "calibration_sums": "engine.calibration",
    "clipped_grad": "gradients.clipping",
    "cost": "core.cost",
    "dpsgd": "engine.algorithm",
    "explain": "gradients.memory",
    "load_exported": "models.model",
    "module_with_rows": "engine.modules",
    "public": "engine.closures",
    "resume": "runs.run",
    "row_source": "engine.sources",
    "run": "runs.run",
    "select": "selection.engine",
    "split_module": "engine.modules",
    "train": "trainer",
    "train_blocks": "engine.loop",
    "with_rows": "gradients.rows",
}
"""Modules of the public names, imported on demand."""

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dpsgd.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
