"""Frozen records: compact JSON, one entry a line."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent / "records"


def read(name):
    """Returns the entries of a record."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def write(name, entries):
    """Writes the entries of a record: a list, or a dictionary."""
    if isinstance(entries, dict):
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()]
        begin, end = "{}"
    else:
        lines, (begin, end) = [json.dumps(entry) for entry in entries], "[]"
    (FOLDER / f"{name}.json").write_text(f"{begin}\n" + ",\n".join(lines) + f"\n{end}\n")
