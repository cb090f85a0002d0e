"""The samplers of a run as subcommands: what the command line adds to their settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union

import tyro

from samplers.settings import SETTINGS, SamplerSettings

if TYPE_CHECKING:
    SamplerCommand = SamplerSettings
else:
    SamplerCommand = Union[  # noqa: UP007  # of a tuple
        tuple(
            Annotated[kind, tyro.conf.subcommand(f"sampler:{name}", prefix_name=False)]
            for name, kind in SETTINGS.items()
        )
    ]
