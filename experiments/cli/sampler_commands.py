"""The samplers of a run as subcommands: what the command line adds to their settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Union

import tyro

from experiments.cli.tasks import look_in_the_current_folder
from samplers.settings import SETTINGS, SamplerSettings, kind_of, settings_of


def _subcommands(kinds: Mapping[str, type[Any]]) -> Any:
    return Union[  # noqa: UP007  # of a tuple
        tuple(
            Annotated[kind, tyro.conf.subcommand(f"sampler:{name}", prefix_name=False)]
            for name, kind in kinds.items()
        )
    ]


if TYPE_CHECKING:
    SamplerCommand = SamplerSettings
else:
    SamplerCommand = _subcommands(SETTINGS)


def with_own_sampler(base: type, words: Sequence[str]) -> type:
    """Returns the command `base`, in which one may choose the sampler that the words name.

    That is done by sampler:module:name, with a module in the current folder or where Python finds
    modules: it is imported.

    Raises:
      ValueError: if there is no such sampler.
    """
    names = [word.removeprefix("sampler:") for word in words if word.count(":") > 1]
    own = [name for name in names if f"sampler:{name}" in words]
    if not own:
        return base
    look_in_the_current_folder()
    kinds = {name: settings_of(kind_of(name, execute=True)) for name in own}
    return dataclasses.make_dataclass(
        base.__name__,
        [("sampler", _subcommands({**SETTINGS, **kinds}))],
        bases=(base,),
        frozen=True,
        kw_only=True,
        namespace={"__doc__": base.__doc__},
    )
