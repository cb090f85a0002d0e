"""Noises by name, as ledgers record them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpsgd.core.noise import Independent, Noise
from dpsgd.noise.correlated import BandedToeplitz
from samplers.registry import Registry

NOISES = Registry("noise", Noise, {law.NAME: law for law in (Independent, BandedToeplitz)})
"""Noises by name, see `Noise.name`."""


def noise_label(record: Mapping[str, Any]) -> str:
    """Returns the printed name of a noise from its record.

    >>> noise_label({"name": "banded toeplitz", "coefficients": [4, 3]})
    'BandedToeplitz noise of 2 bands'
    """
    try:
        return NOISES.read(record).label
    except ValueError:  # of a module that is not imported here
        return f"{record.get('name')} noise"
