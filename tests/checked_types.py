"""Annotations are promises: what is imported after `install` is checked at every call."""

import ast
import dataclasses
import hashlib
import math
import sys
import typing
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

from beartype import BeartypeConf, beartype

# An int passes for a float, as the numeric tower of PEP 484 has it. Of a container the first item
# is looked at, not a random one: a test that fails does so every time.
CHECK = beartype(conf=BeartypeConf(is_pep484_tower=True, is_random=False, violation_type=TypeError))
NAME = "@checked"  # which no module can have for a name of its own
CACHED = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def install(packages: Sequence[str]) -> None:
    """Checks the calls of functions and dataclasses of these packages, imported from now on."""
    sys.meta_path.insert(0, _Finder(packages))


def checked(of):
    """Returns a function, or a class, that raises TypeError where an annotation is not kept.

    Names that are imported for type checkers alone stand for anything. A function inside another is
    checked as the first call of the other makes it: to check it costs more than most of them do.
    """
    if isinstance(of, type):
        if dataclasses.is_dataclass(of) and "__init__" in vars(of):
            of.__init__ = checked(of.__init__)
        return of
    if "<locals>" in of.__qualname__:
        if of.__code__ in _INSIDE:
            return of
        _INSIDE.add(of.__code__)
    names = of.__globals__
    of.__annotations__ = {key: _meant(hint, names) for key, hint in of.__annotations__.items()}
    return CHECK(of)


def unchecked(record, **changed):
    """Returns a frozen dataclass with other fields, made as by a user, whose types are not checked.

    Args:
      record: A sound one.
      changed: Values of fields.
    """
    made = object.__new__(type(record))
    for field in dataclasses.fields(record):
        object.__setattr__(made, field.name, changed.get(field.name, getattr(record, field.name)))
    made.__post_init__()
    return made


BY_NAME = {
    **dict.fromkeys(("sampling_prob", "unit_prob"), (0.0, -0.5, 1.5)),
    **dict.fromkeys(("noise_multiplier", "release"), (0.0, math.nan)),
    **dict.fromkeys(("assignment", "order", "overflow"), ("drop",)),
}
"""What no field of a name may be, whatever its annotation says."""


def assert_refused(record, *integers):
    """Asserts that each field of a record refuses, by name, what its annotation does not allow.

    Args:
      record: A sound one.
      integers: What no count and no size may be, whatever its annotation says.
    """
    import pytest

    from accounting.records import Refused, described, field_types, read

    tries = [None, 0, -1, 2, 2.5, True, "3", "drop", math.nan, 2**63, 1.5, (0,), (1.5,), object()]
    for name, hint in field_types(type(record)).items():
        is_count = "an integer" in described(hint) and not name.endswith("_level")
        values = list(integers) if is_count else []
        values += BY_NAME.get(name, ())
        for value in tries:
            try:
                read(hint, value)
            except Refused:
                values.append(value)
        for value in values:
            with pytest.raises(Refused, match=f"^{name}.* must be .*, got") as refusal:
                unchecked(record, **{name: value})
            assert "\n" not in str(refusal.value)


_INSIDE = set()
"""Code of functions inside others, made before."""


def _meant(hint, names):
    try:
        return eval(hint, names) if isinstance(hint, str) else hint
    except (NameError, AttributeError):
        return typing.Any


class _Decorating(ast.NodeTransformer):
    def visit_ClassDef(self, node):
        self.generic_visit(node)
        node.decorator_list.insert(0, ast.Name(NAME, ast.Load()))  # after `dataclass`
        return node

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        if node.returns or any(isinstance(at, ast.arg) and at.annotation for at in ast.walk(node)):
            node.decorator_list.append(ast.Name(NAME, ast.Load()))  # before what wraps it
        return node


class _Loader(SourceFileLoader):
    def source_to_code(self, data, path, *, _optimize=-1):
        tree = _Decorating().visit(ast.parse(data, path))
        return compile(
            ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=_optimize
        )

    def exec_module(self, module):
        vars(module)[NAME] = checked
        super().exec_module(module)

    # What is compiled so is kept apart.

    def get_data(self, path):
        return super().get_data(_apart(path))

    def set_data(self, path, data, **options):
        super().set_data(_apart(path), data, **options)


def _apart(path: str) -> str:
    return path.removesuffix("pyc") + f"{CACHED}.pyc" if path.endswith(".pyc") else path


class _Finder(MetaPathFinder):
    def __init__(self, packages):
        self.packages = frozenset(packages)

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in self.packages:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec
