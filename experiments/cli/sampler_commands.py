"""The samplers of a run as subcommands: what the command line adds to a configuration."""

from __future__ import annotations

from typing import Annotated, Any

import tyro

from experiments.cli.config import BallsAndBins, Deterministic, Poisson, Shuffle


def subcommand(config: type[Any]):
    """Returns what makes `config` the subcommand of its sampler's name."""
    return tyro.conf.subcommand(f"sampler:{config.name}", prefix_name=False)


SamplerCommand = (
    Annotated[Deterministic, subcommand(Deterministic)]
    | Annotated[Shuffle, subcommand(Shuffle)]
    | Annotated[Poisson, subcommand(Poisson)]
    | Annotated[BallsAndBins, subcommand(BallsAndBins)]
)
