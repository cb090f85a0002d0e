"""What is done with a batch? Clipping, noise and the update, as one compiled program.

A name is imported when it is first asked for: who reads a ledger need not wait for JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpsgd.algorithm import Algorithm, TrainState, dpsgd
    from dpsgd.clipping import Diagnostics, clipped_grad
    from dpsgd.exported import ExportedModel, load_exported
    from dpsgd.guarantee import Guarantee
    from dpsgd.keys import RootKey
    from dpsgd.loop import Block, train, train_blocks
    from dpsgd.mechanism import Mechanism
    from dpsgd.memory import explain
    from dpsgd.modules import split_module

__all__ = [
    "Algorithm",
    "Block",
    "Diagnostics",
    "ExportedModel",
    "Guarantee",
    "Mechanism",
    "RootKey",
    "TrainState",
    "clipped_grad",
    "dpsgd",
    "explain",
    "load_exported",
    "split_module",
    "train",
    "train_blocks",
]

_MODULES = {
    "algorithm": ("Algorithm", "TrainState", "dpsgd"),
    "clipping": ("Diagnostics", "clipped_grad"),
    "exported": ("ExportedModel", "load_exported"),
    "guarantee": ("Guarantee",),
    "keys": ("RootKey",),
    "loop": ("Block", "train", "train_blocks"),
    "mechanism": ("Mechanism",),
    "memory": ("explain",),
    "modules": ("split_module",),
}
"""What is imported on demand: the names above, by their modules."""


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            found = getattr(importlib.import_module(f"dpsgd.{module}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
