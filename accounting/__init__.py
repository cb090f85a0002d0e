"""Privacy profiles of batch samplers, bounded from below and above.

>>> from accounting import calibrate
>>> from samplers import Poisson
>>> sampler = Poisson(num_examples=50_000, batch_size=500, epochs=2)
>>> profile = sampler.privacy(noise_multiplier=1.0)
>>> str(profile.epsilon(delta=1e-5))
'[0.912, 0.913]'
>>> sigma = calibrate(sampler.privacy, epsilon=2.0, delta=1e-5)
>>> sampler.privacy(sigma).epsilon(delta=1e-5).upper <= 2.0
True

Names are imported on first use: records of settings are read without NumPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accounting.attack import attack_accuracy, attack_advantage
    from accounting.calibration import calibrate, calibrate_advantage, largest_count
    from accounting.profile import Bound, PrivacyProfile, default_delta, epsilon
    from accounting.profiles.balls_and_bins import BallsAndBinsProfile
    from accounting.profiles.gaussian import GaussianProfile
    from accounting.profiles.multistage import MultistageProfile
    from accounting.profiles.poisson import PoissonProfile
    from accounting.profiles.shuffle import ShuffleProfile
    from accounting.profiles.units_then_poisson import UnitsThenPoissonProfile
    from accounting.profiles.user_poisson import UserPoissonProfile
    from accounting.releases import SelectionProfile, TrialCount

__all__ = [
    "BallsAndBinsProfile",
    "Bound",
    "GaussianProfile",
    "MultistageProfile",
    "PoissonProfile",
    "PrivacyProfile",
    "SelectionProfile",
    "ShuffleProfile",
    "TrialCount",
    "UnitsThenPoissonProfile",
    "UserPoissonProfile",
    "attack_accuracy",
    "attack_advantage",
    "calibrate",
    "calibrate_advantage",
    "default_delta",
    "epsilon",
    "largest_count",
]

_MODULES = {
    "attack": (
        "attack_accuracy",
        "attack_advantage",
    ),
    "calibration": (
        "calibrate",
        "calibrate_advantage",
        "largest_count",
    ),
    "profile": (
        "Bound",
        "PrivacyProfile",
        "default_delta",
        "epsilon",
    ),
    "profiles.balls_and_bins": ("BallsAndBinsProfile",),
    "profiles.gaussian": ("GaussianProfile",),
    "profiles.multistage": ("MultistageProfile",),
    "profiles.poisson": ("PoissonProfile",),
    "profiles.shuffle": ("ShuffleProfile",),
    "profiles.units_then_poisson": ("UnitsThenPoissonProfile",),
    "profiles.user_poisson": ("UserPoissonProfile",),
    "releases": (
        "SelectionProfile",
        "TrialCount",
    ),
}
"""Modules of the public names, imported on demand."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = getattr(importlib.import_module(f"accounting.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
