"""What may leave the house: the model of a finished run, how to build it, and its guarantee."""

from __future__ import annotations

from pathlib import Path

from experiments.criteo.model import ModelConfig, functional
from experiments.criteo.schema import Schema
from experiments.run_directory import RunDirectory, tuples

MODEL = ("model_sizes", "schema", "hash_seed")
"""What of a run's configuration is needed to use its model."""


def export(run_path: Path, out: Path) -> None:
    """Writes `params.npz`, `model.json` and `guarantee.json` into the new folder `out`.

    Nothing is copied: the parameters are read as those of the model and written again, and the
    guarantee is computed from the ledger, so that no key, seed, batch index, optimizer state or
    diagnostic can come along.

    Raises:
      FileNotFoundError: if there is no finished run.
      FileExistsError: if there is something at `out`.
      ValueError: if the ledger or the parameters do not hold together.
    """
    RunDirectory.refuse_existing(out, option="OUT")
    run = RunDirectory.open(run_path)
    guarantee = run.history().guarantee()
    config = run.read_json("config.json")
    model = {name: config[name] for name in MODEL}
    sizes = ModelConfig(**tuples(model["model_sizes"]))
    like, _, _ = functional(sizes, Schema(**tuples(model["schema"])), seed=0)
    params = run.read_params(like)
    with RunDirectory.create(out) as bundle:
        bundle.write_params(params)
        bundle.write_json("model.json", model)
        bundle.write_json("guarantee.json", guarantee.record())
