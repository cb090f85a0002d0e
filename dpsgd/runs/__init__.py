"""Runs that survive their machine: any task, its ledger, checkpoints, report and export."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpsgd.runs.engine import resume, run
    from dpsgd.runs.spec import RunSpec
    from dpsgd.runs.task import Task

__all__ = ["RunSpec", "Task", "resume", "run"]

_MODULES = {"RunSpec": "spec", "Task": "task", "resume": "engine", "run": "engine"}
"""What is imported on demand: who reads a ledger need not wait for JAX."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"dpsgd.runs.{_MODULES[name]}"), name)
