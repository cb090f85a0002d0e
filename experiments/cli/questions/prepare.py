"""Questions about raw data: `dpsgd prepare`, one class a format."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from accounting.records import Count, Seed
from experiments.cli.options import PLACE
from experiments.cli.questions import Question


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Apache Beam pipeline over several machines.

    Attributes:
      beam: Run on Apache Beam (extra `beam`), with bit-identical results. Every worker needs the
        files under the same paths.
      runner: Beam runner: DirectRunner (this machine, the default), DataflowRunner, SparkRunner,
        FlinkRunner or another that Beam knows.
      beam_options: Beam options, NAME=VALUE each, such as direct_num_workers=8.
    """

    beam: bool = False
    runner: str | None = None
    beam_options: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuses pipeline options without --beam."""
        if not self.beam and (self.runner is not None or self.beam_options):
            raise ValueError("--runner and --beam-options are for a pipeline: add --beam")

    def on_runner(self) -> Any:
        """Returns the `Runner` of the pipeline."""
        pipelines = importlib.import_module("experiments.beam.pipelines")
        return pipelines.Runner(self.runner or pipelines.LOCAL, self.beam_options)


@dataclass(frozen=True, kw_only=True)
class Labelled(Question):
    """Base of questions about rows whose label may be declared.

    Attributes:
      classes: Label values, VALUE,VALUE,...; of two values, the last is the positive one. They are
        declared, because inferring them from private rows would leak information.
      positive: Label value to predict, with --negative, in place of --classes.
      negative: Other label value, with --positive.
    """

    classes: str | None = None
    positive: str | None = None
    negative: str | None = None

    @property
    def label_values(self) -> tuple[str, ...]:
        """Values of the labels 0, 1, ...; () if undeclared.

        Raises:
          ValueError: If the values are declared twice, or only one of two.

        >>> Labelled(positive="yes", negative="no").label_values
        ('no', 'yes')
        """
        if self.positive is None or self.negative is None:
            if self.positive != self.negative:
                raise ValueError("--positive and --negative are given together")
            return tuple(self.classes.split(",")) if self.classes is not None else ()
        if self.classes is not None:
            raise ValueError("--classes replaces --positive and --negative: leave them out")
        return self.negative, self.positive


@dataclass(frozen=True, kw_only=True)
class FromFiles(Question):
    """Files, and the store that they become.

    Attributes:
      files: Input files, read in this order.
      store: Store to create.
      hash_seed: Public seed of the hash that maps categorical values to buckets.
    """

    files: Annotated[tuple[Path, ...], PLACE]
    store: Annotated[Path, PLACE]
    hash_seed: Seed = 0
    pipeline: Pipeline = field(default_factory=Pipeline)

    def check(self) -> None:
        """Refuses a file in the place of the store."""
        self.pipeline.check()
        if self.store.is_file():
            raise ValueError(f"{self.store} is a file; the last path is the STORE to create")


@dataclass(frozen=True, kw_only=True)
class PrepareCriteoDisplay(FromFiles):
    """Prepare the Criteo Display Ads data (`train.txt` or `train.txt.gz`) for training.

    Raw files have a label, 13 counts and 26 hexadecimal categoricals, tab separated. The rows keep
    their order: the first 80 % train, the next 10 % validate, the last 10 % test.
    """


@dataclass(frozen=True, kw_only=True)
class PrepareCriteoSearch(FromFiles):
    """Prepare the Criteo Sponsored Search Conversion Log, to predict Sale from categories alone.

    Raw files have 23 columns, tab separated, -1 where missing; plain or .gz. A public random split:
    80 % of the rows train, 10 % validate, 10 % test. SalesAmountInEuro, time_delay_for_conversion
    and product_price are left out: they are known only after a sale, or go with one, and a model
    that sees them reads the answer.

    Attributes:
      include: Outcome columns to use as features too.
    """

    include: tuple[
        Literal["SalesAmountInEuro", "time_delay_for_conversion", "product_price"], ...
    ] = ()


@dataclass(frozen=True, kw_only=True)
class PrepareCsv(FromFiles, Labelled):
    """Prepare your own table: CSV, TSV or Parquet files with a column to predict.

    Only named columns are read; the others are listed. Guessing their contents would mean learning
    from private rows. Text files are UTF-8 with a header, plain or gzip. An empty field is
    a missing value.

    Attributes:
      label: Column to predict: 0 or 1, false or true, a declared class (--classes), or a number
        (--label-bounds).
      label_bounds: Public bounds LOW:HIGH of a numerical label; labels are clipped to them.
      categories: Categorical columns (text, integers, booleans or dates); their values are hashed.
      numbers: Numerical columns.
      bounds: Public bounds of numbers, COLUMN=LOW:HIGH each, or a TOML file of COLUMN = [LOW,
        HIGH]. The models linear and wide-and-deep then learn a piecewise linear curve.
      values: Public values of categories, COLUMN=VALUE,VALUE,... each, or a TOML file of COLUMN =
        [VALUE, ...]. Each value gets a bucket of its own; an undeclared value counts as missing.
      buckets: Number of hash buckets, a power of two: one number for all categories without
        declared values, or one for each. Choose it from public knowledge, not by counting rows.
      user: Column that names each row's user, for guarantees of users; it is no feature. All rows
        of a user lie in one split.
      transform: Transform of numbers x. log1p: sign(x) log(1 + |x|), for counts; none: x, for
        scaled numbers; both: numbers with bounds get a curve of the logarithm and one of x.
      missing: Texts that mean a missing value, such as NA. The empty text always does.
      order: Validation and test rows: chosen at random by row number (public generator), or by a
        hash of the user; or the last rows, for tables without users.
      split: Fractions of training, validation and test rows.
    """

    label: str
    label_bounds: str | None = None
    categories: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    buckets: tuple[Count, ...] = (1 << 16,)
    user: str | None = None
    transform: Literal["log1p", "none", "both"] = "both"
    missing: tuple[str, ...] = ()
    order: Literal["random", "chronological"] = "random"
    split: tuple[float, float, float] = (0.8, 0.1, 0.1)


@dataclass(frozen=True, kw_only=True)
class PrepareTfds(Labelled):
    """Read a data set of TensorFlow Datasets, which lies on the disk as array_record, into a store.

    One row a record: the label is 0 or 1, or declared; numbers become numeric columns, class
    labels, booleans and texts categories; other features must be left out by name. Where there are
    no validation or test rows, the other or the training rows are split at random.

    Attributes:
      name: Name of the data set, or the directory of one version.
      store: Store to create.
      data_dir: Folder of the data sets. Default: the folder of TensorFlow Datasets.
      label: Feature to predict. Default: the data set's own, or "label".
      leave_out: Features to ignore.
      text_buckets: Number of hash buckets of a text feature, a power of two.
      hash_seed: Public seed of the hash that maps categorical values to buckets.
    """

    name: Annotated[str, PLACE]
    store: Annotated[Path, PLACE]
    data_dir: Path | None = None
    label: str | None = None
    leave_out: tuple[str, ...] = ()
    text_buckets: Count = 1 << 16
    hash_seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class PrepareSynthetic(Question):
    """Generate rows like a Criteo data set has, with a known best reachable AUC.

    Attributes:
      store: Store (or raw file) to create.
      like: Data set whose columns, cardinalities and missing rates are imitated.
      num_rows: Number of rows to generate.
      seed: Seed of the generator.
      raw: Write a raw file in the publisher's format in place of a store.
    """

    store: Annotated[Path, PLACE]
    like: Literal["criteo-display", "criteo-search"] = "criteo-display"
    num_rows: Count = 1_000_000
    seed: Seed = 0
    raw: bool = False
