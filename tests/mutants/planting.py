"""Bugs of the library, planted where they would be made: some lines of a function become others."""

import contextlib
import importlib
import inspect
import sys
import textwrap
from dataclasses import dataclass

import jax
import pytest

from dpsgd.engine import programs

OURS = ("accounting", "samplers", "dpsgd", "experiments")


@dataclass(frozen=True)
class Bug:
    """A bug of the library.

    Attributes:
      where: The function, "module:qualified name".
      old: Part of its text, which is there once.
      new: What stands in its place.
      check: Of the audit, or the claim, which must fail.
      kind: Of what is audited.
    """

    where: str
    old: str
    new: str
    check: str
    kind: str = ""


def plant(bug, patch):
    """Replaces the function, wherever a module of the library knows it by name."""
    module, _, qualified = bug.where.partition(":")
    *owners, name = qualified.split(".")
    owner = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    sound = inspect.getattr_static(owner, name)
    function = inspect.unwrap(sound)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(bug.old) == 1, f"{bug.where} has not once: {bug.old}"
    made = {}
    code = f"from __future__ import annotations\n{source.replace(bug.old, bug.new)}"
    exec(compile(code, f"<{bug.where}, planted>", "exec"), function.__globals__, made)
    patch.setattr(owner, name, made[name])
    for other in [m for known, m in sys.modules.items() if known.split(".")[0] in OURS]:
        for known, value in list(vars(other).items()):
            if value is sound:
                patch.setattr(other, known, made[name])


@contextlib.contextmanager
def planted(bug):
    """The library has the bug; what was compiled without it, or with it, is forgotten."""
    with pytest.MonkeyPatch.context() as patch:
        plant(bug, patch)
        forget()
        yield
    forget()


def forget():
    for cache in (programs._executable, programs._compiled):
        cache.cache_clear()
    jax.clear_caches()
