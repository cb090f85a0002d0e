"""The model of a finished run, read back from its directory or from what was exported of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy.special import expit

from dpsgd.runs.directory import RunDirectory
from dpsgd.runs.exports import MODEL, Bundle
from dpsgd.runs.records import build, checked
from experiments.tasks.clicks.formats import check_columns, format_of
from experiments.tasks.clicks.model import shaped
from experiments.tasks.clicks.predict import FEW, logits
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.sizes import ModelConfig
from experiments.tasks.clicks.store import Columns, Store

PyTree = Any

KIND = "clicks"
"""What an exported model says it is, and the entry point by which its reader is found."""


@dataclass(frozen=True)
class TrainedModel:
    """Parameters, and what is needed to use them.

    Attributes:
      path: Where it was read.
      record: Sizes, columns and hash seed as JSON values.
      schema: Columns that the model reads.
      hash_seed: Public seed of the hash of categorical values.
      params: Parameters.
      logit_fn: (params, example) -> logit.
    """

    path: Path
    record: Mapping[str, Any]
    schema: Schema
    hash_seed: int
    params: PyTree = field(repr=False)
    logit_fn: Callable[[PyTree, PyTree], jax.Array] = field(repr=False)

    @classmethod
    def load(cls, run: RunDirectory) -> TrainedModel:
        """Reads the model of a finished run.

        Raises:
          ValueError: if its ledger, configuration or parameters are damaged; the file is named.
        """
        config = run.config(run.history())
        record = {name: config.get(name) for name in ("model_sizes", "schema", "hash_seed")}
        model = cls(run.path, *_parts(run, record, f"{run.path / 'config.json'} is damaged"))
        if run.params_digest() != run.read_json("report.json").get("params_sha256"):
            raise ValueError(
                f"{run.path / 'params.npz'} is not the model that the run's report is about: "
                "restore it from a copy"
            )
        return model

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes of the model, and the number of its parameters."""
        num_params = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return {**self.record["model_sizes"], "num_params": num_params}

    def predict(self, rows: Mapping[str, Any]) -> np.ndarray:
        """Returns the probability of the label 1, float64[rows], of rows of raw values.

        Args:
          rows: Column name to its values, as they stand in a raw file of the data set: texts, or
            numbers where it has integers; None, NaN and the empty text are missing. Columns that
            are no features are not looked at.

        Raises:
          TypeError: if `rows` is no mapping of columns, or a column is a single value.
          ValueError: for a feature that is not there, or a value that no raw file holds; the line
            names row (from 0) and column.
        """
        check_columns(rows, (*self.schema.integers, *self.schema.categories))
        columns = format_of(self.schema).encode(rows, hash_seed=self.hash_seed)
        few = len(columns["categories"]) <= FEW
        return self.probabilities(columns, batch=FEW if few else None)

    def probabilities(self, columns: Columns, *, batch: int | None = None) -> np.ndarray:
        """Returns the probability of the label 1, float64[rows], of rows of a store."""
        return expit(logits(self.logit_fn, self.params, columns, batch=batch).astype(np.float64))

    def rows(
        self, data: Path, *, labelled: bool = True, split: str | None = None
    ) -> Iterator[Columns]:
        """Returns the rows of `data`, in their order, as blocks of columns that the model reads.

        Args:
          data: A store, or a raw file in the format that the model's store was prepared from.
          labelled: Whether the rows must have labels.
          split: Which rows of a store; by default all.

        Raises:
          ValueError: if the data cannot be read, or are not such as the model reads.
        """
        if not data.is_dir():
            if split is not None:
                raise ValueError(f"{data} is no store, which alone has splits: leave out --split")
            return format_of(self.schema).read(data, hash_seed=self.hash_seed, labelled=labelled)
        store = Store.open(data)
        if (why := store.unlike(self.schema, self.hash_seed)) is not None:
            raise ValueError(f"{store.path} {why}: the model in {self.path} does not fit it")
        splits = list(store.splits) if split is None else [split]
        for name in splits:
            store.rows(name)  # there is such a split
        store.verify()
        return (block for name in splits for block in store.blocks(name))


@dataclass(frozen=True)
class ExportedClickModel(TrainedModel):
    """A model that was exported, with its guarantee as JSON values."""

    guarantee: Mapping[str, Any]

    @classmethod
    def of(cls, bundle: Bundle) -> ExportedClickModel:
        """Returns the model in a bundle of the kind `KIND`.

        Raises:
          ValueError: if its parameters are not those of such a model.
        """
        parts = _parts(RunDirectory(bundle.path), bundle.model, f"{bundle.path / MODEL} is damaged")
        return cls(bundle.path, *parts, bundle.guarantee)


def read(path: Path) -> TrainedModel:
    """Reads the model of a finished run, or one that was exported.

    Raises:
      FileNotFoundError: if there is none.
      ValueError: if it is damaged, or of a kind that this program does not know.
    """
    if (path / MODEL).is_file():
        bundle = Bundle.read(path)
        if bundle.kind != KIND:
            raise ValueError(f"{path} is a model of the kind {bundle.kind!a}; `dpsgd` knows {KIND}")
        return ExportedClickModel.of(bundle)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} is neither an exported model nor the directory of a run")
    return TrainedModel.load(RunDirectory.open(path))


def _parts(
    folder: RunDirectory, record: Mapping[str, Any], where: str
) -> tuple[Mapping[str, Any], Schema, int, PyTree, Callable[[PyTree, PyTree], jax.Array]]:
    """Returns (record, schema, hash seed, parameters, logit function) of a recorded model."""
    sizes = build(ModelConfig, record.get("model_sizes"), f"{where}: model_sizes")
    schema = build(Schema, record.get("schema"), f"{where}: schema")
    hash_seed = checked(record.get("hash_seed"), int, f"{where}: hash_seed")
    like, logit_fn = shaped(sizes, schema)
    return record, schema, hash_seed, folder.read_params(like), logit_fn
