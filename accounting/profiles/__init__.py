"""One file a law: the certified privacy profile of each way to draw batches.

Modules are imported on first use, as in `accounting`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accounting.profiles import balls_and_bins as balls_and_bins
    from accounting.profiles import bins_grids as bins_grids
    from accounting.profiles import truncation as truncation

_MODULES = {"balls_and_bins", "bins_grids", "truncation"}
"""Modules that samplers use without importing them."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"accounting.profiles.{name}")
