"""What each command can be asked: dataclasses of its options, by subject.

The help of a command imports no more than its own module here; the module that answers it,
`experiments.cli.commands.NAME`, is imported when it is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from experiments.cli.options import Option, made, options_of


class Question:
    """Base of what commands can be asked.

    Attributes:
      MADE: Fields that options of other classes make.
      ABOUT_RUN: Whether errors name settings of runs, which are options of the command.
    """

    MADE: ClassVar[tuple[str, ...]] = ()
    ABOUT_RUN: ClassVar[bool] = False

    @classmethod
    def options(cls, words: Sequence[str]) -> list[Option]:
        """Returns the options of the command, as far as its words choose them.

        Raises:
          ValueError: If a word names what does not exist.
        """
        del words
        return options_of(cls)

    @classmethod
    def elsewhere(cls, name: str) -> str:
        """Returns where an option belongs that the command has not, in words; "" if nowhere."""
        del name
        return ""

    @classmethod
    def of(cls, values: Mapping[str, Any], **others: Any) -> Any:
        """Returns what is asked by values of the options, and by `others` of its fields."""
        return made(cls, values, **others)

    def check(self) -> None:
        """Raises an error for what cannot be done, before the command is imported."""
