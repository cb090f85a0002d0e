"""`scripts/bench AREA`: measures the cases of an area, and prints their figures beside bars."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.benchmarks.case import Case

AREAS = (
    "accounting", "audit", "gpu", "gpu_program", "ingest", "noise",
    "samplers", "scale", "size", "step", "tables", "train",
)  # fmt: skip


def parser_of(area: str, module: ModuleType) -> argparse.ArgumentParser:
    """Returns the options of an area: those of all areas, and those of its cases."""
    cases: Sequence[Case] = module.CASES
    parser = argparse.ArgumentParser(
        f"bench {area}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["cases:", *map(_described, cases)]),
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the record, or where to add")
    parser.add_argument("--quick", action="store_true", help="in small: its speed means nothing")
    parser.add_argument("--minutes", type=float, help="time that it may take")
    parser.add_argument(
        "-k", dest="names", action="extend", nargs="+", metavar="NAME",
        help="only cases with this in their names; * stands for anything",
    )  # fmt: skip
    parser.set_defaults(minutes=getattr(module, "MINUTES", math.inf))
    options = {name: value for case in cases for name, value in case.options.items()}
    for name, value in options.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", dest=f"option {name}", **_how(value), metavar="VALUE",
            help="" if value is None else f"default: {_words(value)}",
        )  # fmt: skip
    return parser


def _described(case: Case) -> str:
    words = f"  {case.name:32} about {case.seconds:.0f} s"
    words += "".join(f", needs {need}" for need in case.needs)
    return words + (", only by -k" if case.asked else "")


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _how(value: Any) -> dict[str, Any]:
    """Returns how an option is read whose default is `value`."""
    if isinstance(value, tuple):
        return {"nargs": "+", "type": type(value[0])}
    if isinstance(value, int):

        def whole(text: str) -> int:
            if int(text) < min(value, 1):
                raise argparse.ArgumentTypeError(f"must be at least {min(value, 1)}, got {text}")
            return int(text)

        return {"type": whole}
    return {"type": str if value is None else type(value)}


def chosen(cases: Sequence[Case], names: Iterable[str] | None, quick: bool) -> list[Case]:
    """Returns the cases that have one of `names`, or else have it in theirs; without, all.

    Raises:
      ValueError: If there is none of a name.
    """
    offered = [case for case in cases if not quick or case.quick is not None]
    if names is None:
        return [case for case in offered if not case.asked]
    found: list[Case] = []
    for name in names:
        exact = [case for case in offered if case.name == name]
        like = exact or [case for case in offered if fnmatch(case.name, f"*{name}*")]
        if not like:
            known = "; ".join(case.name for case in offered)
            raise ValueError(f"-k: {name!r} is in the name of no case: {known}")
        found += like
    return [case for case in offered if case in found]


def main(argv: Sequence[str] | None = None) -> int:
    """Measures an area; the status is 1 if a bar does not hold or a case failed."""
    argv = sys.argv[1:] if argv is None else list(argv)
    first = argparse.ArgumentParser("bench", epilog="bench AREA --help lists its cases")
    first.add_argument("area", choices=AREAS)
    area = first.parse_args(argv[:1]).area
    module = importlib.import_module(f"experiments.benchmarks.{area}")
    parser = parser_of(area, module)
    options = parser.parse_args(argv[1:])
    given = {
        name.removeprefix("option "): tuple(value) if isinstance(value, list) else value
        for name, value in vars(options).items()
        if name.startswith("option ") and value is not None
    }
    if not options.minutes > 0:
        parser.error("--minutes must be greater than 0")
    try:
        cases = chosen(module.CASES, options.names, options.quick)
    except ValueError as error:
        parser.error(str(error))
    for name in given:
        if not any(name in case.options for case in cases):
            parser.error(f"--{name.replace('_', '-')}: none of the chosen cases has it")
    getattr(module, "before_devices", lambda: None)()
    from experiments.benchmarks.record import Record, table

    file = options.json or (None if options.quick else getattr(module, "RECORD", None))
    try:
        record = Record(file, area, options.minutes)
    except ValueError as error:
        parser.error(str(error))
    try:
        for case in cases:
            print(f"{case.name} ...", file=sys.stderr, flush=True)
            mine = {name: value for name, value in given.items() if name in case.options}
            command = _command(area, case, mine, options.quick)
            record.run(case, command, mine, quick=options.quick)
    finally:  # also when it is interrupted
        print(table(record.rows()))
        if file is not None:
            print(f"written: {file}")
    return record.status()


def _command(area: str, case: Case, given: dict[str, Any], quick: bool) -> str:
    """Returns the command that measures a case again; a path is written as the option's name."""
    name = f'"{case.name}"' if " " in case.name else case.name
    words = ["scripts/bench", area, "-k", name, *(["--quick"] if quick else [])]
    for option, value in given.items():
        shown = option.upper() if case.options[option] is None else _words(value)
        words += [f"--{option.replace('_', '-')}", shown]
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
