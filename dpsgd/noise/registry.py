"""Noise classes by name, as a ledger records them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from dpsgd.core.noise import Independent, Noise
from dpsgd.noise.correlated import BandedToeplitz
from dpsgd.removed import removal_notice

_BUILT_IN: dict[str, type[Noise]] = {
    "independent": Independent,
    "banded toeplitz": BandedToeplitz,
}


def noise_label(record: Mapping[str, Any]) -> str:
    """Returns the printed name of a noise from its record.

    >>> noise_label({"name": "banded toeplitz", "coefficients": [4, 3]})
    'BandedToeplitz noise of 2 bands'
    """
    try:
        return noise_from_record(record).label
    except ValueError:  # of a module that is not imported here
        return f"{record.get('name')} noise"


def noise_from_record(record: Mapping[str, Any]) -> Noise:
    """Returns the noise that `Noise.record` recorded.

    >>> noise_from_record({"name": "independent"})
    Independent()

    Raises:
      ValueError: If no imported class has this name, or it refuses the settings.
    """
    settings = dict(record)
    name = str(settings.pop("name", None))
    if notice := removal_notice("noise", name):
        raise ValueError(f"{name} noise: {notice}")
    kind = _BUILT_IN.get(name) or _imported(name)
    try:
        return kind(**settings)
    except TypeError as error:
        raise ValueError(f"noise {name!r} refuses its recorded settings: {error}") from None


def _imported(name: str) -> type[Noise]:
    """Returns the imported class named "module:qualified name", without importing a module."""
    module, _, qualified = name.partition(":")
    kind: Any = sys.modules.get(module)
    for attribute in qualified.split("."):
        kind = getattr(kind, attribute, None)
    if not (isinstance(kind, type) and issubclass(kind, Noise)):
        raise ValueError(
            f"noise {name!a:.60} is unknown, and so is its privacy cost; import the module that "
            "defines it first"
        )
    return kind
