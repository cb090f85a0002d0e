"""Checks what must stay true: scripts/gate names | intervals | readers | runs | faults."""

import importlib
import sys

PARTS = ("names", "intervals", "readers", "runs", "faults")


def main(words):
    """Runs the parts that are named, or all, and returns the exit status."""
    if unknown := {*words} - {*PARTS}:
        print(f"gate: {', '.join(sorted(unknown))} is no part; choose from {', '.join(PARTS)}")
        return 2
    lost = [
        line for part in words or PARTS for line in importlib.import_module(f"gate.{part}").check()
    ]
    print("\n".join(lost) or "gate: all holds")
    return bool(lost)


sys.exit(main(sys.argv[1:]))
