"""The settings of the samplers that runs are mostly asked for, by name: see `samplers.settings`."""

from __future__ import annotations

from typing import Any

from samplers.settings import SETTINGS

Deterministic: Any = SETTINGS["deterministic"]
Shuffle: Any = SETTINGS["shuffle"]
Poisson: Any = SETTINGS["poisson"]
BallsAndBins: Any = SETTINGS["balls-and-bins"]
