"""Long computations of figures, job by job; those that are kept in a file resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dpsgd.files import write_atomically
from experiments.processes import each

RECORDS = Path(__file__).parents[1] / "records"


def computed(
    compute: Callable[[Any], Any],
    jobs: Iterable[Any],
    progress: Callable[[str], None],
    record: Path | None = None,
) -> dict[Any, Any]:
    """Returns compute(job) by job: from a record where it has it, else on all processors.

    Args:
      compute: Pickled; results that are recorded go into JSON.
      jobs: Hashable; those that are recorded are tuples of numbers and words.
      progress: Called with one line of text after each new result.
      record: A line a job, which grows by each new result at once; None for none.
    """
    known = json.loads(record.read_text()) if record is not None and record.exists() else {}
    keys = {job: " ".join(map(str, job)) if record is not None else job for job in jobs}
    missing = [job for job, key in keys.items() if key not in known]
    if missing:
        progress(f"0 of {len(missing)}")
    for done, (job, found) in enumerate(zip(missing, each(compute, missing), strict=True), 1):
        known[keys[job]] = found
        progress(f"{done} of {len(missing)}")
        if record is not None:
            rows = (f"{json.dumps(key)}: {json.dumps(row)}" for key, row in known.items())
            text = ("{\n" + ",\n".join(rows) + "\n}\n").encode()
            write_atomically(record, lambda file, text=text: file.write(text))  # type: ignore[misc]
    return {job: known[key] for job, key in keys.items()}
