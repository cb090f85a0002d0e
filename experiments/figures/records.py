"""Results of long computations of figures, kept in a file, so that these resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from dpsgd.files import write_atomically
from experiments.processes import each

RECORDS = Path(__file__).parents[1] / "records"


def _write(text: bytes, file: IO[bytes]) -> None:
    file.write(text)


def recorded(
    compute: Callable[[Any], dict[str, Any]],
    jobs: Sequence[tuple[Any, ...]],
    path: Path | None,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Returns compute(job) of each job: from a record where it has it, else on all processors.

    Args:
      compute: Pickled; its results go into JSON.
      jobs: Tuples of numbers and words.
      path: The record, a line a job, which grows by each new result at once; None for none.
      progress: Called with one line of text after each new result.
    """
    known = json.loads(path.read_text()) if path is not None and path.exists() else {}
    keys = [" ".join(map(str, job)) for job in jobs]
    missing = {key: job for key, job in zip(keys, jobs, strict=True) if key not in known}
    for done, (key, found) in enumerate(
        zip(missing, each(compute, list(missing.values())), strict=True), 1
    ):
        known[key] = found
        progress(f"{done} of {len(missing)}")
        if path is not None:
            rows = (f"{json.dumps(key)}: {json.dumps(row)}" for key, row in known.items())
            text = ("{\n" + ",\n".join(rows) + "\n}\n").encode()
            write_atomically(path, partial(_write, text))
    return [known[key] for key in keys]
