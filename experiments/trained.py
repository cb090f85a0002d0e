"""The model of a finished run, read back from its directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from dpsgd.records import build, checked
from experiments.criteo.model import ModelConfig, functional
from experiments.criteo.schema import Schema
from experiments.run_directory import RunDirectory

PyTree = Any


@dataclass(frozen=True)
class TrainedModel:
    """Parameters, and what is needed to use them.

    Attributes:
      record: Sizes, columns and hash seed as JSON values.
      schema: Columns that the model reads.
      hash_seed: Public seed of the hash of categorical values.
      params: Parameters.
      logit_fn: (params, example) -> logit.
    """

    record: dict[str, Any]
    schema: Schema
    hash_seed: int
    params: PyTree
    logit_fn: Callable[[PyTree, PyTree], jax.Array]

    @classmethod
    def load(cls, run: RunDirectory) -> TrainedModel:
        """Reads the model of a finished run.

        Raises:
          ValueError: if its ledger, configuration or parameters are damaged; the file is named.
        """
        config, where = run.config(run.history()), f"{run.path / 'config.json'} is damaged"
        record = {name: config.get(name) for name in ("model_sizes", "schema", "hash_seed")}
        sizes = build(ModelConfig, record["model_sizes"], f"{where}: model_sizes")
        schema = build(Schema, record["schema"], f"{where}: schema")
        hash_seed = checked(record["hash_seed"], int, f"{where}: hash_seed")
        like, logit_fn, _ = functional(sizes, schema, seed=0)
        params = run.read_params(like)
        if run.params_digest() != run.read_json("report.json").get("params_sha256"):
            raise ValueError(
                f"{run.path / 'params.npz'} is not the model that the run's report is about: "
                "restore it from a copy"
            )
        return cls(record, schema, hash_seed, params, logit_fn)
