"""What each command can be asked: dataclasses of its options, by subject.

The help of a command imports no more than its own module here; the module that answers it,
`experiments.cli.commands.NAME`, is imported when it is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from experiments.cli import outputs
from experiments.cli.options import PLACE, Option, made, options_of

LAST = ("headline", "better", "plot", "overwrite")
"""Options on how an answer is shown, which end a help; what must be given begins it."""


class Question:
    """Base of what commands can be asked.

    Attributes:
      MADE: Fields that options of other classes make.
      ANSWERED_BY: Module in `experiments.cli.commands` of the answer; "" if it is called as that of
        the question.
      ABOUT_RUN: Whether errors name settings of runs, which are options of the command.
    """

    MADE: ClassVar[tuple[str, ...]] = ()
    ANSWERED_BY: ClassVar[str] = ""
    ABOUT_RUN: ClassVar[bool] = False

    @classmethod
    def options(cls, words: Sequence[str]) -> list[Option]:
        """Returns the options of the command, as far as its words choose them.

        Raises:
          ValueError: If a word names what does not exist.
        """
        del words
        return sorted(options_of(cls), key=_order)

    @classmethod
    def elsewhere(cls, name: str) -> str:
        """Returns where an option belongs that the command has not, in words; "" if nowhere."""
        del name
        return ""

    @classmethod
    def of(cls, values: Mapping[str, Any], **others: Any) -> Any:
        """Returns the question that values of the options, and other fields, make."""
        return made(cls, values, **others)

    def check(self) -> None:
        """Raises an error for what cannot be done, before the command is imported."""


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
class Drawn(Question):
    """Base of questions that a figure answers.

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
