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
    """Returns the options of an area: what every area has, and the settings of its cases."""
    cases = cases_of(area)
    listed = (
        f"  {case.name:32} about {case.seconds:.0f} s{', only by -k' * case.asked}"
        for case in cases
    )
    parser = argparse.ArgumentParser(
        f"bench {area}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["cases:", *listed]),
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="file to which each case adds a line of JSON"
    )
    parser.add_argument("--quick", action="store_true", help="in small; its speed means nothing")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time that it may take")
    parser.add_argument(
        "-k", dest="names", action="extend", nargs="+", metavar="NAME",
        help="only cases with this in their names; * stands for anything",
    )  # fmt: skip
    for name, value in {k: v for case in cases for k, v in case.setting.items()}.items():
        if isinstance(value, int | str) and not isinstance(value, bool):
            option = f"--{name.replace('_', '-')}"
            parser.add_argument(option, dest=f"set {name}", type=_type(value), metavar="VALUE")
    return parser


def _type(value: int | str) -> Callable[[str], Any]:
    def parse_count(text: str) -> int:
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
        return int(text)

    return str if isinstance(value, str) else parse_count


def chosen(cases: Sequence[Case], names: Iterable[str] | None, quick: bool) -> list[Case]:
    """Returns the cases with one of `names`, or else with it in theirs; without names, all.

    Raises:
      ValueError: If no case has a name.
    """
    offered = [case for case in cases if not quick or case.quick is not None]
    if names is None:
        return [case for case in offered if not case.asked]
    chosen_cases: list[Case] = []
    for name in names:
        exact = [case for case in offered if case.name == name]
        like = exact or [case for case in offered if fnmatch(case.name, f"*{name}*")]
        if not like:
            names_offered = "; ".join(case.name for case in offered)
            raise ValueError(f"-k: {name!r} is in the name of no case: {names_offered}")
        chosen_cases += like
    return [case for case in offered if case in chosen_cases]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures an area; the status is 1 if a bar does not hold or a case failed."""
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
            parser.error(f"--{name.replace('_', '-')}: none of the chosen cases has it")
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
