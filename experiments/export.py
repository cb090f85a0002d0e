"""What may leave the house: the model of a finished run, how to build it, and its guarantee."""

from __future__ import annotations

from pathlib import Path

from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.exports import GUARANTEE, MODEL, Bundle
from experiments.trained import KIND, TrainedModel


def export(run_path: Path, out: Path) -> None:
    """Writes the bundle of a finished run into the new folder `out`; `load_exported` reads it.

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
    model = TrainedModel.load(run)
    with RunDirectory.create(out) as bundle:
        bundle.write_params(model.params)
        bundle.write_json(GUARANTEE, guarantee.record())
        bundle.write_json(MODEL, Bundle.manifest(bundle.path, KIND, model.record))
