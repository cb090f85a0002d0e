"""Names of a run's parts: built-in classes by a short name, others as "module:QualName".

Looking up a name searches imported modules and executes nothing. `Registry.load` and `import_named`
import a module first: use them for names that the user typed, not for names in files of others.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from accounting.records import Place, Refused, build, named, near, read


class UnknownPart(ValueError):
    """Error of a name without a usable class in this process."""


def import_module(name: str) -> Any:
    """Imports a user's module, which executes its code.

    Raises:
      ValueError: If it is not found or raises an error; the message has one line.

    >>> import_module("nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: nowhere cannot be imported: No module named 'nowhere' in the current folder ...
    """
    try:
        return importlib.import_module(name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        if isinstance(error, ModuleNotFoundError):
            reason = f"{error} in the current folder or on PYTHONPATH; add its folder to PYTHONPATH"
        raise ValueError(f"{name} cannot be imported: {reason}") from error


_PACKAGES = {"dpsgd", "samplers", "accounting"}
_STANDARD = Path(os.__file__).parent  # of Python's own modules: another file may have such a name


@functools.cache
def code_digest(kind: Any) -> str:
    """Returns a digest of the source files of a class and its bases outside this package.

    The files of a sampler or noise are read when its class is created, since a later edit does not
    change the code that runs. A class typed in a console has no file. Modules that these files
    import are not read.
    """
    digest, modules = hashlib.sha256(), dict.fromkeys(base.__module__ for base in kind.__mro__)
    for name in modules:
        file = getattr(sys.modules.get(name), "__file__", None)
        package = name.partition(".")[0]
        if package in _PACKAGES or not (file and Path(file).is_file()):
            continue
        if package not in sys.stdlib_module_names or not Path(file).is_relative_to(_STANDARD):
            digest.update(hashlib.sha256(Path(file).read_bytes()).digest())
    return digest.hexdigest()


@dataclass(frozen=True)
class Registry:
    """Classes of one kind of part.

    Attributes:
      noun: Kind of part in messages, such as "sampler".
      base: Base class of all classes.
      built_in: Classes of this package by name.
      unnamed: Classes of this package that users cannot choose.

    >>> numbers = Registry("number", int, {"truth": bool})
    >>> numbers.find("truth"), numbers.name_of(bool), numbers.name_of(int)
    (<class 'bool'>, 'truth', 'builtins:int')
    >>> numbers.is_own(True), numbers.is_own(1)
    (False, True)
    """

    noun: str
    base: type
    built_in: Mapping[str, type]
    unnamed: tuple[type, ...] = ()

    def is_own(self, part: Any) -> bool:
        """Returns True for a part from outside this package, also of a built-in's subclass."""
        return type(part) not in (*self.built_in.values(), *self.unnamed)

    def name_of(self, kind: type) -> str:
        """Returns the name of a class; `find` inverts it."""
        names = {built_in: name for name, built_in in self.built_in.items()}
        return names.get(kind, f"{kind.__module__}:{kind.__qualname__}")

    def find(self, name: str) -> Any:
        """Returns the class of a name, without importing a module.

        Raises:
          UnknownPart: If the class is unknown, abstract or no frozen dataclass.
        """
        if name in self.built_in:
            return self.built_in[name]
        module, colon, qualified = name.partition(":")
        if not (module and colon and qualified):
            hint = near(name, self.built_in)
            raise UnknownPart(f"unknown {self.noun} {name!a:.60}{hint} (your own: module:Class)")
        kind: Any = sys.modules.get(module)
        if kind is None:
            raise UnknownPart(
                f"the module of the {self.noun} {name!a:.60} is not imported: if you trust its "
                "code, import it first (commands: --trust MODULE)"
            )
        for attribute in qualified.split("."):  # not by getattr, which modules may define
            kind = getattr(kind, "__dict__", {}).get(attribute)
        if not (isinstance(kind, type) and issubclass(kind, self.base)):
            raise UnknownPart(f"the module {module!a:.60} has no {self.noun} {qualified!a:.60}")
        return self.check(kind)

    def check(self, kind: Any) -> Any:
        """Returns a class; raises UnknownPart if its instances cannot be built and compared."""
        if not getattr(vars(kind).get("__dataclass_params__"), "frozen", False):
            raise UnknownPart(f"the {self.noun} {self.name_of(kind)} must be a frozen dataclass")
        if uncompared := [field.name for field in fields(kind) if not field.compare]:
            raise UnknownPart(
                f"the {self.noun} {self.name_of(kind)} is compared without its {uncompared[0]}, so "
                "that unequal ones could share costs, checks or programs: leave out compare=False"
            )
        if inspect.isabstract(kind):
            missing = ", ".join(sorted(kind.__abstractmethods__))
            raise UnknownPart(f"the {self.noun} {self.name_of(kind)} lacks {missing}")
        return kind

    def load(self, name: str) -> Any:
        """Returns the class of a name after importing its module.

        Raises:
          ValueError: As `find`, or if the module cannot be imported.
        """
        module, colon, _ = name.partition(":")
        if module and colon:
            import_module(module)
        return self.find(name)

    def read(self, value: Any, place: Place = ()) -> Any:
        """Returns the part of a name, or of a table.

        Args:
          value: Part, which is returned; or name; or mapping of "name" and settings.
          place: Names and indices that lead to the value, for error messages.

        Raises:
          ValueError: If there is no such part, or a setting is refused.
        """
        if isinstance(value, self.base):
            return value
        settings = dict(value) if isinstance(value, Mapping) else {"name": value}
        kind = self.find(read(str, settings.pop("name", value), place))
        try:
            result = build(kind, settings, place)
            hash(result)  # costs and programs are cached by part
        except TypeError as error:  # a field has a type that records do not support
            raise Refused(place, str(error).partition("\n")[0]) from None
        return result

    def record(self, part: Any) -> dict[str, Any]:
        """Returns a part's name and settings, for `read`."""
        attributes, arguments = named(type(part)), {f.name for f in fields(part) if f.init}
        settings = {key: getattr(part, x) for key, x in attributes.items() if x in arguments}
        return {"name": self.name_of(type(part)), **settings}


def import_named(
    options: Mapping[str, Any],
    registries: Mapping[str, Registry],
    where: str,
    progress: Callable[[str], None] = lambda line: None,
) -> None:
    """Imports the modules of parts that options name.

    Args:
      options: Values of options: names, tables of name and settings, or lists of these.
      registries: Registry of each option that names parts.
      where: Prefix of error messages, such as a file's name.
      progress: Function that is called with a line before each import.

    Raises:
      ValueError: If a part is not found or cannot be used; the message names option and module.
    """
    for option, registry in registries.items():
        values = options.get(option)
        for i, value in enumerate(values if isinstance(values, list) else [values]):
            name = value.get("name") if isinstance(value, Mapping) else value
            if not isinstance(name, str) or ":" not in name:
                continue
            progress(f"importing the module of your own {registry.noun}, {name}")
            try:
                registry.load(name)
            except ValueError as error:
                place = f"{option}[{i}]" if isinstance(values, list) else option
                raise ValueError(f"{where}, {place}: {error}") from None
