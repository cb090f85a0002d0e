"""`dpsgd choose`: a linear model of ratings, chosen privately from a finite class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class ChooseConfig:
    """Choose a linear model of ratings from a finite class, by the exponential mechanism.

    Whole users are protected, with delta 0. Of each user the first ratings count, up to a cap.
    """

    data: tyro.conf.Positional[Path | None] = None
    """`u.data` of MovieLens 100K, gzipped or not; by default a generated population."""
    target_epsilon: float = 1.0
    """Of all that is released."""
    max_ratings: int | None = None
    """The cap, a public number; by default it is chosen privately, which is paid for."""
    caps: tuple[int, ...] = (5, 10, 20, 50, 100, 200, 400, 700)
    """Caps to choose from: a public list, made without the data."""
    private_quantile: float = 0.9
    """Quantile of users' numbers of ratings near which the cap is chosen."""
    quantile_epsilon: float = 0.1
    """What that choice costs, of the target."""
    out: Path | None = None
    """File .json to write the model and its guarantee into."""
    overwrite: bool = False
    """Replace that file if it is there."""


def run(config: ChooseConfig) -> None:
    """Runs `dpsgd choose`."""
    import json
    from fractions import Fraction

    import numpy as np

    from accounting.releases.contribution import private_quantile
    from dpsgd.files import write_atomically
    from experiments.cli import outputs
    from experiments.cli.console import going_on
    from experiments.contributions import pure_guarantee
    from experiments.tasks.ratings.linear import GRID, LinearRatings
    from experiments.tasks.ratings.ratings import load

    chosen = config.max_ratings is None
    caps = config.caps if config.max_ratings is None else (config.max_ratings,)
    if min(caps, default=0) < 1:
        raise ValueError(f"--caps and --max-ratings need numbers >= 1, got {caps}")
    spent = Fraction(config.quantile_epsilon) if chosen else Fraction(0)
    if not 0.0 < config.target_epsilon < float("inf"):
        raise ValueError(f"--target-epsilon must be > 0 and finite, got {config.target_epsilon}")
    if (rest := Fraction(config.target_epsilon) - spent) <= 0:
        raise ValueError(
            f"--quantile-epsilon {config.quantile_epsilon} leaves nothing of --target-epsilon "
            f"{config.target_epsilon} for the model: lower it, or give --max-ratings"
        )
    if config.out is not None:
        outputs.check(config.out, (".json",), "--out", overwrite=config.overwrite)
    with going_on("choosing"):
        model = LinearRatings(load(config.data))
        [cap, *_] = caps
        if chosen:
            cap = private_quantile(
                np.unique(model.train.user, return_counts=True)[1],
                config.private_quantile,
                epsilon=config.quantile_epsilon,
                candidates=caps,
            )
        found = dict(zip(GRID, model.choose(cap, rest).tolist(), strict=True))
    paid = f"{config.quantile_epsilon} of it for the choice of the cap" if chosen else "cap public"
    guarantee = pure_guarantee(config.target_epsilon, f"{paid}; where a user is removed, the same")
    terms = " + ".join(f"{value:g} {name}" for name, value in found.items() if name != "level")
    print(f"rating = {3.5 + found['level']:g} + {terms}, cap {cap}")
    print(guarantee)
    if config.out is not None:
        record = {"model": found, "cap": cap, "guarantee": guarantee}
        text = (json.dumps(record, indent=1) + "\n").encode()
        write_atomically(config.out, lambda file: file.write(text))
