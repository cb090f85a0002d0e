"""`scripts/bench AREA`: measures the cases of an area, and prints their figures beside bars."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import math
import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from experiments.benchmarks.case import SPEED, Case, LeftOut
from experiments.benchmarks.cases import CASES

AREAS = tuple(dict.fromkeys(case.area for case in CASES))
FLAGS = "XLA_FLAGS", "JAX_PLATFORMS", "OMP_NUM_THREADS"
"""Environment variables that decide speed."""


def cases_of(area: str) -> list[Case]:
    """Returns the cases of an area."""
    return [case for case in CASES if case.area == area]


def parser_of(area: str) -> argparse.ArgumentParser:
    """Returns an area's option parser."""
    cases = cases_of(area)
    listed = (
        f"  {case.name:32} about {case.seconds:.0f} s{', only by -k' * case.opt_in}"
        for case in cases
    )
    parser = argparse.ArgumentParser(
        f"bench {area}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["cases:", *listed]),
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="file to append one line of JSON per case to"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, without bars of speed")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="time limit; later cases are left out"
    )
    parser.add_argument(
        "-k", dest="names", action="extend", nargs="+", metavar="NAME",
        help="only cases whose names contain NAME, in which * matches anything",
    )  # fmt: skip
    return parser


def chosen(cases: Sequence[Case], names: Iterable[str] | None, quick: bool) -> list[Case]:
    """Returns the cases that names select; without names, all.

    >>> [case.name for case in chosen(cases_of("tables"), ["siz"], quick=False)]
    ['sizes']

    Args:
      cases: Cases of an area.
      names: Names of cases, or patterns of parts of names; None selects all but `opt_in` cases.
      quick: Whether only cases with a quick setting are offered.

    Raises:
      ValueError: If a name selects no case.
    """
    offered = [case for case in cases if not quick or case.quick is not None]
    if names is None:
        return [case for case in offered if not case.opt_in]
    chosen_cases: list[Case] = []
    for name in names:
        exact = [case for case in offered if case.name == name]
        like = exact or [case for case in offered if fnmatch(case.name, f"*{name}*")]
        if not like:
            names_offered = "; ".join(case.name for case in offered)
            raise ValueError(f"-k {name!r} matches no case; choose from: {names_offered}")
        chosen_cases += like
    return [case for case in offered if case in chosen_cases]


def measured(case: Case, quick: bool = False, until: float = math.inf) -> Any:
    """Measures a case, prints its figures, and returns its record.

    An error ends only this case, and is recorded in one line.

    Args:
      case: Case to measure.
      quick: Whether to use its quick setting, without bars of speed.
      until: Latest `time.monotonic` at which the case may end by its estimate.
    """
    setting = {**case.setting, **((case.quick or {}) if quick else {})}
    words = ["scripts/bench", case.area, "-k", case.name, *(["--quick"] if quick else [])]
    entry: dict[str, Any] = {
        "area": case.area, "name": case.name, "command": shlex.join(words), "setting": setting,
        "status": "done", "rows": [],
    }  # fmt: skip
    begin, cpu = time.monotonic(), sum(os.times()[:4])
    try:
        if case.seconds > until - begin:
            raise LeftOut(f"{until - begin:.0f} s are left, and it takes about {case.seconds:.0f}")
        for row in case.function()(**setting):
            figure = row._replace(bar="", holds=None) if quick and row.unit in SPEED else row
            entry["rows"].append(figure._asdict())
            print(figure, flush=True)
    except LeftOut as reason:
        entry |= {"status": "left out", "why": str(reason)}
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split()) or "no message"
        entry |= {"status": "failed", "why": f"{type(error).__name__}: {text:.300}"}
    entry["seconds"] = round(time.monotonic() - begin, 2)
    entry["cpu_seconds"] = round(sum(os.times()[:4]) - cpu, 2)
    if entry["status"] != "done":
        print(f"{case.name}: {entry['status']}, {entry['why']}")
    return entry


def exit_status(entries: Sequence[dict[str, Any]]) -> int:
    """Returns the exit status of the command for the records of its cases.

    1 if a bar does not hold or a case failed, 2 if every case was left out, else 0.
    """
    statuses = {entry["status"] for entry in entries}
    missed = any(row["holds"] is False for entry in entries for row in entry["rows"])
    return 1 if missed or "failed" in statuses else 2 if statuses == {"left out"} else 0


@functools.cache
def hardware() -> dict[str, Any]:
    """Returns versions, devices, processor and flags of this process."""
    from dpsgd.runs.result import environment  # imports JAX, which --help does not need

    facts = environment() | {k: os.environ[k] for k in FLAGS if k in os.environ}
    with contextlib.suppress(OSError):
        model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        facts |= {"cpu": model[1]} if model else {}
    return facts


def main(argv: Sequence[str] | None = None) -> int:
    """Measures an area's cases and returns their `exit_status`."""
    argv = sys.argv[1:] if argv is None else list(argv)
    first = argparse.ArgumentParser("bench", epilog="bench AREA --help lists its cases")
    first.add_argument("area", choices=AREAS)
    area = first.parse_args(argv[:1]).area
    parser = parser_of(area)
    options = parser.parse_args(argv[1:])
    if not options.minutes > 0:
        parser.error("--minutes must be greater than 0")
    try:
        cases = chosen(cases_of(area), options.names, options.quick)
    except ValueError as error:
        parser.error(str(error))
    entries, until = [], time.monotonic() + 60 * options.minutes
    for case in cases:
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        entries.append(measured(case, options.quick, until))
        gc.collect()  # memory of this case must not be missing in the next
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            with options.json.open("a") as lines:
                lines.write(json.dumps(entries[-1] | {"environment": hardware()}) + "\n")
    return exit_status(entries)


if __name__ == "__main__":
    sys.exit(main())
