"""Task of clicks and tables: a store of rows, an embedding model, metrics of its label."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from accounting.records import Count
from dpsgd.runs.recommendation import RecommendationRequest, Settings
from dpsgd.runs.records import build, checked, to_json
from experiments.tasks import Models
from experiments.tasks.clicks.schema import DISPLAY_ADS, Schema
from experiments.tasks.clicks.sizes import (
    PRESETS,
    DefaultPreset,
    ModelConfig,
    epsilon_of,
    preset_for,
    recommended,
)
from samplers import UnitData, cap_contributions
from samplers.contribution import Contributions

if TYPE_CHECKING:  # a command's help reads the fields alone, and waits for no JAX
    from dpsgd.engine.queries import Refinement
    from experiments.tasks.clicks.model import Scores
    from experiments.tasks.clicks.store import Store

PyTree = Any


class ClickModels(Models):
    """Click model without training rows.

    Args:
      sizes: Sizes of the model.
      schema: Columns that the model reads.
      hash_seed: Public seed of the hash of categorical values.
    """

    def __init__(self, sizes: ModelConfig, schema: Schema, hash_seed: int) -> None:
        self.sizes, self.schema, self.hash_seed = sizes, schema, hash_seed

    def calibration(self) -> Refinement:
        """Returns the calibration of predictions through the last layer."""
        return self.functions.calibration

    @property
    def functions(self) -> Any:
        """Pure functions of the model; `Target` defines the predictions."""
        from experiments.tasks.clicks.model import pure_functions

        return pure_functions(self.sizes, self.schema)

    def read(
        self, path: Path, *, labelled: bool = True, split: str | None = None
    ) -> Iterator[PyTree]:
        """Yields the rows of a store or raw file, as encoded blocks.

        Args:
          path: Store, or file in the raw format of the model's data.
          labelled: True to include the labels, which a file must then have.
          split: Split of the store; by default all rows.

        Raises:
          ValueError: If the data cannot be read, or do not fit the model.
        """
        from experiments.tasks.clicks.formats import format_of
        from experiments.tasks.clicks.store import Store

        if not path.is_dir():
            if split is not None:
                raise ValueError(f"{path} is a file, which has no splits; leave out --split")
            return format_of(self.schema, self.hash_seed).read(path, labelled=labelled)
        store = Store.open(path)
        if (mismatch := store.schema_mismatch(self.schema, self.hash_seed)) is not None:
            raise ValueError(f"{path} {mismatch}, so the model cannot read it")
        splits = list(store.splits) if split is None else [split]
        for name in splits:
            store.rows(name)  # there is such a split
        store.verify()
        return (
            {column: x for column, x in block.items() if labelled or column != "label"}
            for name in splits
            for block in store.blocks(name)
        )

    def keys(self, path: Path, column: str) -> Iterator[str]:
        """Yields a column of a table as texts, see `Task.keys`.

        Args:
          path: CSV, TSV or Parquet file.
          column: Name of any column of the file.

        Raises:
          ValueError: If the rows are not in a table's file, or it has no such column.
        """
        if path.is_dir() or not self.schema.label:
            raise ValueError(f"{path}: keys need a table in a CSV, TSV or Parquet file")
        from experiments.tasks.clicks.formats import table_format

        return table_format(self.schema).texts(path, column)

    def encode(self, rows: Any) -> PyTree:
        """Returns raw rows as columns of the model, see `Format.encode`.

        Raises:
          TypeError: If `rows` is not a mapping of columns, or a column is a single value.
          ValueError: For a missing feature or an invalid value, with its row (from 0) and column.
        """
        from experiments.tasks.clicks.formats import format_of

        return format_of(self.schema, self.hash_seed).encode(rows)

    def evaluate(self, params: PyTree, blocks: Iterable[PyTree]) -> dict[str, float]:
        """Computes the target's metrics on labelled rows.

        Args:
          params: Parameters of the model.
          blocks: Blocks of labelled rows, read once.

        Raises:
          ValueError: If there are no rows.
        """
        scores = self.score(params, blocks)
        return self.schema.target.metrics(scores.logits, scores.labels)

    def score(self, params: PyTree, blocks: Iterable[PyTree], by: str | None = None) -> Scores:
        """Computes the logits of labelled rows.

        Args:
          params: Parameters of the model.
          blocks: Blocks of labelled rows, read once.
          by: Categorical column whose hashed values are also returned.

        Raises:
          ValueError: If there is no such categorical column.
        """
        from experiments.tasks.clicks.model import score

        names = list(self.schema.categories)
        if by is not None and by not in names:
            raise ValueError(
                f"{by!a:.60} is no categorical column; these are: {', '.join(names) or 'none'}"
            )
        return score(self.functions.logit, params, blocks, None if by is None else names.index(by))

    def recommend(self, request: RecommendationRequest) -> Settings:
        """Returns the default settings of a run, see `recommendation`."""
        return recommended(request, self.sizes, max(self.schema.buckets, default=0))

    def generated(self, count: int) -> PyTree:
        """Returns `count` synthetic rows, a fifth of the numbers missing."""
        schema, rng = self.schema, np.random.default_rng(0)
        shape = count, len(schema.integers)
        missing = rng.random(shape) < 0.2
        most = schema.buckets
        ids = rng.integers(0, most, (count, len(most)), endpoint=True)
        return {
            "label": schema.target.generated(rng, count),
            "integers": np.where(missing, 0, rng.uniform(0, 12, shape)).astype(np.float32),
            "integers_missing": missing,
            "categories": ids.astype(np.int32),
        }

    def describe(self) -> dict[str, Any]:
        """Returns sizes, columns and hash seed, the input of `described`."""
        target = self.schema.target
        return {
            "model_sizes": to_json(self.sizes),
            "schema": to_json(self.schema),
            "hash_seed": self.hash_seed,
            "headline": f"test_{target.headline}",
            "better": target.better,
            "prediction": target.prediction,
            **({"prediction_columns": list(target.columns)} if target.columns else {}),
        }

    @staticmethod
    def described(description: Mapping[str, Any], where: str = "task") -> ClickModels:
        """Returns the models of a described task, without its rows.

        Args:
          description: Description of the task, as `describe` returns it.
          where: Location of the description, for messages.

        Raises:
          ValueError: If `description` is invalid; the message begins with `where`.
        """
        return ClickModels(
            build(ModelConfig, description.get("model_sizes"), f"{where}: model_sizes"),
            build(Schema, description.get("schema"), f"{where}: schema"),
            checked(description.get("hash_seed"), int, f"{where}: hash_seed"),
        )


@dataclass(frozen=True)
class Clicks(ClickModels):
    """Clicks and tables: rows of numbers and categories, a model of embeddings, AUC or accuracy.

    Attributes:
      data: Store of prepared examples (see `dpsgd prepare`).
      model: Model preset. linear: weights alone; small: a network for a CPU; wide-and-deep: both;
        large: three layers of 598 units and tables of up to 2^20 rows per feature (85 million
        parameters on Criteo Display Ads). Default: chosen by the number of rows and epsilon.
      embedding_dim: Embedding length, in place of the preset's.
      max_buckets: Hash buckets per feature, a power of two, in place of the preset's.
      hidden: Units of each hidden layer, in place of the preset's.
      bins: Pieces of the piecewise-linear curve of a number with public bounds, in place of the
        preset's.
      huber: Residual (in the label's units) above which the loss of a numerical label grows
        linearly (Huber), so that outliers move the model less. Default: squared error.
      interaction: How embeddings interact before the first layer. none: they are concatenated; dot:
        also the dot products of all pairs (DLRM); cross: two low-rank cross layers (DCN V2).
        Default: none.
      max_contributions: For user-poisson, on a table prepared with --user: largest number of
        training rows per user. The first rows in the order of the files train; others are left out.
    """

    data: Path | None
    model: Literal["linear", "small", "wide-and-deep", "large"] | None = None
    embedding_dim: int | None = None
    max_buckets: int | None = None
    hidden: tuple[int, ...] | None = None
    bins: int | None = None
    huber: float | None = None
    interaction: Literal["none", "dot", "cross"] | None = None
    max_contributions: Count | None = None

    def __post_init__(self) -> None:
        self._sized(self.model or "small")  # refused before anything is read
        if self.huber:
            self.schema.target.robust(self.huber)
        if self.max_contributions is not None:
            self.store.users("train")

    def settle(self, request: RecommendationRequest) -> tuple[Clicks, dict[str, str]]:
        """Chooses the model preset, and states the reason."""
        if self.model is not None:
            return self, {}
        rows, epsilon = request.num_examples, epsilon_of(request)
        model, about = self._preset(rows, epsilon), f"{rows:,} rows train"
        if request.noise_multiplier is not None:
            about += "; with --noise-multiplier the choice assumes epsilon 1"
        elif math.isfinite(epsilon):
            about += f" at an epsilon of about {epsilon:.3g}"
        if self._network:
            about = "options set sizes of a network"
        elif model != preset_for(rows, epsilon):
            about = "embeddings interact"
        return dataclasses.replace(self, model=model), {"model": about}

    @property
    def _network(self) -> bool:
        """True if sizes of a network are given."""
        return self.embedding_dim is not None or self.hidden is not None

    @property
    def sizes(self) -> ModelConfig:  # type: ignore[override]
        """Sizes of the model, by preset and overrides."""
        return self._sized(self.model or self._preset(self.num_examples))

    def _preset(self, rows: int, epsilon: float = 1.0) -> DefaultPreset:
        interaction = self.interaction not in (None, "none")
        return preset_for(rows, epsilon, network=self._network, interaction=interaction)

    def _sized(self, model: str) -> ModelConfig:
        sizes = {
            field.name: getattr(self, field.name, None) for field in dataclasses.fields(ModelConfig)
        }
        overrides = {name: size for name, size in sizes.items() if size is not None}
        return dataclasses.replace(PRESETS[model], **overrides)

    @cached_property
    def store(self) -> Store:
        """Store, opened on first use."""
        from experiments.tasks.clicks.store import Store

        if self.data is None:
            if self.max_contributions is not None:
                raise ValueError(
                    "sampler user-poisson needs the users of rows: name a store, from "
                    "`dpsgd prepare` with --user"
                )
            raise ValueError("the task clicks needs data, a store from `dpsgd prepare`")
        return Store.open(self.data)

    @cached_property
    def schema(self) -> Schema:  # type: ignore[override]
        """Columns that the model reads; without a store, the columns of Criteo Display Ads."""
        return DISPLAY_ADS if self.data is None else dataclasses.replace(self.store.schema, user="")

    @property
    def hash_seed(self) -> int:  # type: ignore[override]
        """Public hash seed of the store."""
        return 0 if self.data is None else self.store.hash_seed

    @cached_property
    def num_examples(self) -> int:
        """Number of training rows within the cap of each user; 0 without a store."""
        if self.data is None:
            return 0
        capped = self._capped
        return self.store.rows("train") if capped is None else capped.kept_examples.size

    def columns(self) -> PyTree | UnitData:
        """Returns the training rows.

        They are memory-mapped, and a process reads its data shards; with a cap on users' rows, they
        are read into memory.
        """
        columns = self.store.load("train")
        return columns if self._capped is None else self._capped.of_examples(columns)

    @cached_property
    def _capped(self) -> Contributions | None:
        most = self.max_contributions
        return None if most is None else cap_contributions(self.store.users("train"), most)

    def held_out(self, split: str) -> Iterator[PyTree]:
        """Returns the rows of a split, block by block."""
        return self.store.blocks(split)

    def describe(self) -> dict[str, Any]:
        """Returns the description, with the cap or the best metrics.

        The best metrics are known for generated rows.

        Raises:
          ValueError: If a store of generated rows lacks their description.
        """
        source = {} if self.data is None else self.store.source
        if self.max_contributions is not None:
            cap = f"the first {self.max_contributions} rows of each user, as the files have them"
            return {**super().describe(), "user": self.store.schema.user, "kept": cap}
        if source.get("format") != "synthetic":
            return super().describe()
        location = f"{self.store.path / 'manifest.json'}: source, test_bayes_auc"
        best = checked(source.get("test_bayes_auc"), float, location)
        return {**super().describe(), "generated": {"test_auc": best}}

    def check(self, begun: Mapping[str, Any] | None = None) -> None:
        """Verifies checksums, labels and the run's recorded description.

        Process 0, which evaluates, also checks the labels of the validation and test rows.

        Args:
          begun: Description from the run's beginning, which the store must fit.

        Raises:
          ValueError: If a file was changed, the store differs, or held-out rows have no metrics.
        """
        from dpsgd.runs.processes import Processes

        self.store.verify()
        if begun is not None:
            task = self.described(begun)
            if (mismatch := self.store.schema_mismatch(task.schema, task.hash_seed)) is not None:
                raise ValueError(f"{self.data} {mismatch}")
        for split in ("validation", "test") if Processes.current().first else ():
            labels = (block["label"] for block in self.store.blocks(split))
            if mismatch := self.schema.target.problem(labels):
                raise ValueError(f"{self.data}: the {split} rows {mismatch}; prepare more rows")

    def digest(self) -> str:
        """Returns the store's digest, which depends on every row.

        It hashes the manifest, which holds the checksums of all files, and not their paths. It is
        as secret as the rows: who knows all but one can try that one.
        """
        return self.store.digest
