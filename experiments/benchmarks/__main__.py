"""`scripts/bench AREA`: measures the cases of an area, and prints their figures beside bars."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from experiments.benchmarks.case import Case
from experiments.benchmarks.cases import CASES

AREAS = tuple(dict.fromkeys(case.area for case in CASES))


def cases_of(area: str) -> list[Case]:
    """Returns the cases of an area."""
    return [case for case in CASES if case.area == area]


def parser_of(area: str) -> argparse.ArgumentParser:
    """Returns an area's option parser, with its cases' settings."""
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
    for name, value in {k: v for case in cases for k, v in case.setting.items()}.items():
        if isinstance(value, int | str) and not isinstance(value, bool):
            option = f"--{name.replace('_', '-')}"
            parser.add_argument(option, dest=f"set {name}", type=_type(value), metavar="VALUE")
    return parser


def _type(value: int | str) -> Callable[[str], Any]:
    def parse_count(text: str) -> int:
        """Returns an integer of at least 1."""
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
        return int(text)

    return str if isinstance(value, str) else parse_count


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


def main(argv: Sequence[str] | None = None) -> int:
    """Measures an area's cases and returns `Record.status`."""
    argv = sys.argv[1:] if argv is None else list(argv)
    first = argparse.ArgumentParser("bench", epilog="bench AREA --help lists its cases")
    first.add_argument("area", choices=AREAS)
    area = first.parse_args(argv[:1]).area
    parser = parser_of(area)
    options = parser.parse_args(argv[1:])
    changes = {
        name.removeprefix("set "): value
        for name, value in vars(options).items()
        if name.startswith("set ") and value is not None
    }
    if not options.minutes > 0:
        parser.error("--minutes must be greater than 0")
    from experiments.benchmarks.record import Record

    try:
        cases = chosen(cases_of(area), options.names, options.quick)
    except ValueError as error:
        parser.error(str(error))
    for name in changes:
        if not any(name in case.setting for case in cases):
            parser.error(f"--{name.replace('_', '-')} is a setting of none of the chosen cases")
    record = Record(options.json, options.minutes)
    for case in cases:
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        own_changes = {name: value for name, value in changes.items() if name in case.setting}
        record.run(case, _command(case, own_changes, options.quick), own_changes, options.quick)
    return record.status()


def _command(case: Case, changes: dict[str, Any], quick: bool) -> str:
    """Returns the command that measures a case again."""
    name = f'"{case.name}"' if " " in case.name else case.name
    words = ["scripts/bench", case.area, "-k", name, *(["--quick"] if quick else [])]
    for option, value in changes.items():
        words += [f"--{option.replace('_', '-')}", str(value)]
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
