"""`dpsgd plan`: what to choose before a run: its devices."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.cli import devices_plan
from experiments.cli.devices_plan import run

__all__ = ["TOPICS", "command", "run"]

TOPICS = ("devices",)
"""What can be planned."""


def command(words: Sequence[str]) -> type:
    """Returns what can be asked about what words name first."""
    if words and words[0] not in TOPICS and not words[0].startswith("-"):
        raise ValueError(f"plan: name what is planned first: {TOPICS[0]}")
    return devices_plan.command(words)
