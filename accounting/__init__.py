"""Privacy profiles of batch samplers, bounded from below and above.

>>> from samplers import Poisson
>>> sampler = Poisson(num_examples=50_000, batch_size=500, epochs=2)
>>> str(sampler.privacy(noise_multiplier=1.0).epsilon(delta=1e-5))
'[0.912, 0.913]'

Names are imported on first use: records of settings are read without NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accounting import profiles as profiles
    from accounting import releases as releases
    from accounting import worst_leaf as worst_leaf
    from accounting.attack import attack_accuracy as attack_accuracy
    from accounting.attack import attack_advantage as attack_advantage
    from accounting.calibration import calibrate as calibrate
    from accounting.calibration import calibrate_advantage as calibrate_advantage
    from accounting.calibration import largest_count as largest_count
    from accounting.checks import default_delta as default_delta
    from accounting.profile import Bound as Bound
    from accounting.profile import PrivacyProfile as PrivacyProfile
    from accounting.profile import epsilon as epsilon
    from accounting.profiles.balls_and_bins import BallsAndBinsProfile as BallsAndBinsProfile
    from accounting.profiles.gaussian import GaussianProfile as GaussianProfile
    from accounting.profiles.multistage import MultistageProfile as MultistageProfile
    from accounting.profiles.poisson import PoissonProfile as PoissonProfile
    from accounting.profiles.shuffle import ShuffleProfile as ShuffleProfile
    from accounting.profiles.units_then_poisson import (
        UnitsThenPoissonProfile as UnitsThenPoissonProfile,
    )
    from accounting.profiles.user_poisson import UserPoissonProfile as UserPoissonProfile
    from accounting.releases import SelectionProfile as SelectionProfile
    from accounting.releases import TrialCount as TrialCount

_MODULES = {
    "BallsAndBinsProfile": "profiles.balls_and_bins",
    "Bound": "profile",
    "GaussianProfile": "profiles.gaussian",
    "MultistageProfile": "profiles.multistage",
    "PoissonProfile": "profiles.poisson",
    "PrivacyProfile": "profile",
    "SelectionProfile": "releases",
    "ShuffleProfile": "profiles.shuffle",
    "TrialCount": "releases",
    "UnitsThenPoissonProfile": "profiles.units_then_poisson",
    "UserPoissonProfile": "profiles.user_poisson",
    "attack_accuracy": "attack",
    "attack_advantage": "attack",
    "calibrate": "calibration",
    "calibrate_advantage": "calibration",
    "default_delta": "checks",
    "epsilon": "profile",
    "largest_count": "calibration",
}
"""Module of each public name, imported on demand."""

_SUBMODULES = {"profiles", "releases", "worst_leaf"}
"""Modules that samplers use without importing them."""

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"accounting.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"accounting.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
