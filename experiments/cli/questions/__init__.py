"""Questions: dataclasses with the options of each command, by subject.

The help of a command imports only the module of its question; the module that carries it out, in
`experiments.cli.commands`, is imported when the command is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from experiments.cli import outputs
from experiments.cli.options import PLACE, Option, build, look_in_the_current_folder, options_of

LAST = ("headline", "better", "plot", "overwrite")
"""Options on the presentation of results, listed last in a help."""


class Question:
    """Base of the questions: options of a command as fields.

    Attributes:
      MADE: Fields that are built from options of other classes.
      ANSWERED_BY: Module in `experiments.cli.commands` that carries out the command; "" if it has
        the name of the question's module.
      ABOUT_RUN: Whether errors may name settings of runs, which are options of the command.
    """

    MADE: ClassVar[tuple[str, ...]] = ()
    ANSWERED_BY: ClassVar[str] = ""
    ABOUT_RUN: ClassVar[bool] = False

    @classmethod
    def options(cls, words: Sequence[str]) -> list[Option]:
        """Returns the options of the command.

        Args:
          words: Words after the command; a sampler or a task named there adds its options.

        Raises:
          ValueError: If the words name an unknown sampler or task.
        """
        del words
        return sorted(options_of(cls), key=_order)

    @classmethod
    def elsewhere(cls, name: str) -> str:
        """Returns where an unknown option belongs, or "".

        Args:
          name: Name of the option in Python's spelling.
        """
        del name
        return ""

    @classmethod
    def build(cls, values: Mapping[str, Any], **others: Any) -> Any:
        """Builds the question from option values.

        Args:
          values: Values of the options by name.
          **others: Values of fields that are no options.
        """
        return build(cls, values, **others)

    def check(self) -> None:
        """Refuses impossible requests before the command is imported."""


def _order(option: Option) -> tuple[bool, bool]:
    required = option.place or option.default is MISSING
    return not required, option.name in LAST


@dataclass(frozen=True, kw_only=True)
class OfRun(Question):
    """Base of questions about a run directory.

    Attributes:
      run: Run directory.
    """

    run: Annotated[Path, PLACE]


@dataclass(frozen=True, kw_only=True)
class ReadsLedgers(Question):
    """Base of questions about ledgers, which are read without executing code that they name.

    Attributes:
      trust: Modules with your own parts, such as my_sampler, to import before ledgers are read:
        their code is executed.
    """

    trust: tuple[str, ...] = ()

    def check(self) -> None:
        """Imports the trusted modules."""
        from samplers.registry import import_module

        super().check()
        if self.trust:
            look_in_the_current_folder()
        for module in self.trust:
            try:
                import_module(module)
            except ValueError as error:
                raise ValueError(f"--trust {error}") from None


@dataclass(frozen=True, kw_only=True)
class Drawn(Question):
    """Base of questions whose results can be drawn.

    Attributes:
      plot: Figure to draw: .png, .pdf or .svg.
      overwrite: Replace existing files.
    """

    plot: Path | None = None
    overwrite: bool = False

    def check(self) -> None:
        """Refuses a figure that cannot be written."""
        if self.plot is not None:
            outputs.check(self.plot, outputs.PICTURES, "--plot", overwrite=self.overwrite)
