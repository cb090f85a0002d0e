"""Options of a command: a wrong spelling gets a hint, and numbers are finite."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from dpsgd.runs.records import field_types

_ALIKE = (
    ("epsilon", "target-epsilon", "eps"),
    ("delta", "target-delta"),
    ("target-advantage", "advantage", "attack-advantage"),
    ("learning-rate", "lr", "step-size", "rate"),
    ("noise-multiplier", "noise-multipliers", "noise", "sigma", "noise-scale"),
    ("l2-clip-norm", "clip", "clip-norm", "clipping-norm", "max-grad-norm", "l2-norm-clip", "C"),
    ("batch-size", "batch", "lot-size", "expected-batch-size"),
    ("epochs", "num-epochs", "passes"),
    ("steps", "num-steps", "iterations", "max-steps"),
    ("num-examples", "num-rows", "examples", "dataset-size", "sample-size", "rows", "n"),
    ("budget-minutes", "minutes", "budget", "time-budget"),
    ("non-private", "no-privacy", "disable-dp"),
    ("insecure-seed", "seed"),
    ("num-devices", "devices", "gpus"),
    ("bands", "num-bands", "bandwidth"),
    ("out", "output", "output-dir", "logdir"),
    ("plot", "out", "figure"),
    ("bands-memory", "memory"),
    ("label", "target", "labels"),
    ("categories", "categorical", "categoricals"),
    ("numbers", "numeric", "numerical"),
)
"""Names of one thing, here or elsewhere: who gives one that a command lacks means another."""


def check_spelling(kind: type, words: Sequence[str], command: str) -> None:
    """Raises ValueError for the first option among `words` that `kind` has not.

    Args:
      kind: Dataclass of what can be asked, as tyro parses it.
      words: Of the command line, after the command.
      command: Which is named.
    """
    if {"--help", "-h"} & {*words}:
        return
    known = dict(_options(kind))
    for word in words:
        name = word.partition("=")[0].removeprefix("--").replace("_", "-")
        if not word.startswith("--") or not name or name.startswith("tyro-"):
            continue
        if name not in known and not (name.startswith("no-") and known.get(name[3:]) is bool):
            raise ValueError(f"{command} has no option --{name}{_hint(name, [*known], command)}")


def _hint(name: str, known: Sequence[str], command: str) -> str:
    """Returns what is most likely meant."""
    meant = [one for names in _ALIKE if name in names for one in names if one in known]
    meant = meant or difflib.get_close_matches(name, known, 1)
    if meant:
        return f": did you mean --{meant[0]}?"
    return f"; `{command} --help` lists them"


def _options(kind: type) -> Iterator[tuple[str, Any]]:
    """Yields names and types of the options of a dataclass, and of those that it is made of."""
    for name, hint in field_types(kind).items():
        parts = [one for one in get_args(hint) or (hint,) if dataclasses.is_dataclass(one)]
        for part in parts:
            yield from _options(part)  # type: ignore[arg-type]  # a class
        if not parts:
            yield name.replace("_", "-"), hint


def check_finite(config: Any) -> None:
    """Raises ValueError for a number in a parsed command that is none, or infinite.

    What is so by default, and was not given, stays.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check_finite(value)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, float) and not math.isfinite(one) and value != field.default:
                option = f"--{field.name.replace('_', '-')}"
                raise ValueError(f"{option} must be a finite number, got {one}")
