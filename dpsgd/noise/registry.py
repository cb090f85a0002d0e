"""Noise classes by name, as a ledger records them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from dpsgd.noise.base import Independent, Noise
from dpsgd.noise.correlated import BandedToeplitz
from dpsgd.removed import removal_notice

_BUILT_IN: dict[str, type[Noise]] = {
    "independent": Independent,
    "banded toeplitz": BandedToeplitz,
}


def noise_record(noise: Noise) -> dict[str, Any]:
    """Returns the name and settings of `noise` as JSON values.

    >>> noise_record(BandedToeplitz((4.0, 3.0)))["name"]
    'banded toeplitz'
    """
    kind = type(noise)
    names = (name for name, built_in in _BUILT_IN.items() if built_in is kind)
    name = next(names, f"{kind.__module__}:{kind.__qualname__}")
    return {"name": name, **noise.describe()}


def noise_from_record(record: Mapping[str, Any]) -> Noise:
    """Returns the noise that `noise_record` recorded.

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
