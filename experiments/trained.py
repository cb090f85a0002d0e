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
          ValueError: if its configuration or its parameters are damaged; the file is named.
        """
        config, where = run.read_json("config.json"), f"{run.path / 'config.json'} is damaged"
        record = {name: config.get(name) for name in ("model_sizes", "schema", "hash_seed")}
        sizes = build(ModelConfig, record["model_sizes"], f"{where}: model_sizes")
        schema = build(Schema, record["schema"], f"{where}: schema")
        hash_seed = checked(record["hash_seed"], int, f"{where}: hash_seed")
        like, logit_fn, _ = functional(sizes, schema, seed=0)
        return cls(record, schema, hash_seed, run.read_params(like), logit_fn)
