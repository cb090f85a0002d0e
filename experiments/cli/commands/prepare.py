"""`dpsgd prepare`: raw data to a store of columns."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

if TYPE_CHECKING:
    from experiments.beam.pipelines import Runner
    from experiments.cli.console import Console

Paths = Annotated[
    tuple[Path, ...],
    tyro.conf.Positional,
    tyro.conf.arg(metavar="FILE [FILE ...] STORE", help_behavior_hint="(required)"),
]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Where work is done that many machines can share."""

    beam: bool = False
    """Prepare with Apache Beam (extra `beam`). The store is bit-identical; every worker needs the
    files under the same paths."""
    runner: str | None = None
    """Beam runner: DirectRunner (this machine, the default), DataflowRunner, SparkRunner,
    FlinkRunner or another that Beam knows."""
    beam_options: tuple[str, ...] = ()
    """Beam options, NAME=VALUE each, such as direct_num_workers=8."""

    def chosen(self) -> Runner | None:
        """Returns the runner; None where this process does the work."""
        if not self.beam:
            if self.runner is not None or self.beam_options:
                raise ValueError("--runner and --beam-options are for a pipeline: add --beam")
            return None
        from experiments.beam.pipelines import LOCAL, Runner

        return Runner(self.runner or LOCAL, self.beam_options)


@dataclass(frozen=True)
class FromFiles:
    """Files, and the store that they become."""

    paths: Paths
    """Input files, read in this order, then the store to create."""
    hash_seed: int = field(default=0, kw_only=True)
    """Public seed of the hash that maps categorical values to buckets."""
    pipeline: Pipeline = field(default_factory=Pipeline, kw_only=True)

    @property
    def out(self) -> Path:
        """The store to create."""
        return self.paths[-1]

    def format(self) -> Any:
        """Returns the format of the files: a `Format`."""
        raise NotImplementedError

    def prepare(self, console: Console) -> None:
        """Makes the store, here or by a pipeline.

        Raises:
          ValueError: where there is no file or no store.
        """
        files = self.paths[:-1]
        if not files:
            raise ValueError(
                "give a FILE or several, and then the STORE to create, before all options"
            )
        if self.out.is_file():
            raise ValueError(f"{self.out} is a file; the last path is the STORE to create")
        format = replace(self.format(), hash_seed=self.hash_seed)
        runner = self.pipeline.chosen()
        if runner is None:
            format.prepare(files, self.out, progress=shown(console))
            return
        from experiments.beam.prepare import prepare

        console.progress(f"a pipeline on {runner.name}")
        prepare(files, self.out, format, runner.write_store)


@dataclass(frozen=True)
class PrepareCriteoDisplay(FromFiles):
    """Prepare the Criteo Display Ads data (`train.txt` or `train.txt.gz`) for training.

    Raw files have a label, 13 counts and 26 hexadecimal categoricals, tab separated. The rows keep
    their order: the first 80 % train, the next 10 % validate, the last 10 % test.
    """

    def format(self) -> Any:
        """Returns the format of the files."""
        from experiments.tasks.clicks.formats import DISPLAY

        return DISPLAY


@dataclass(frozen=True)
class PrepareCriteoSearch(FromFiles):
    """Prepare the Criteo Sponsored Search Conversion Log, to predict Sale from categories alone.

    Raw files have 23 columns, tab separated, -1 where missing; plain or .gz. A public random split:
    80 % of the rows train, 10 % validate, 10 % test. SalesAmountInEuro, time_delay_for_conversion
    and product_price are left out: they are known only after a sale, or go with one, and a model
    that sees them reads the answer.
    """

    include: tuple[
        Literal["SalesAmountInEuro", "time_delay_for_conversion", "product_price"], ...
    ] = ()
    """Outcome columns to use as features too."""

    def format(self) -> Any:
        """Returns the format of the files, with the columns that are read of them."""
        from experiments.tasks.clicks import schema
        from experiments.tasks.clicks.formats import SEARCH

        return replace(SEARCH, schema=schema.sponsored_search(self.include))


@dataclass(frozen=True)
class PrepareCsv(FromFiles):
    """Prepare your own table: CSV, TSV or Parquet files with a column to predict.

    Only named columns are read, and the others listed: to guess what they hold would be to learn it
    from rows that are private. Text files are UTF-8 with a header, plain or gzip. An empty field is
    a missing value.
    """

    label: str = field(kw_only=True)
    """Column to predict: 0 or 1, false or true, a declared class (--classes), or a number
    (--label-bounds)."""
    classes: str | None = None
    """Label values, VALUE,VALUE,...; of two values, the last is the positive one. They are
    declared, because inferring them from private rows would leak information."""
    positive: str | None = None
    """Label value to predict, with --negative, in place of --classes."""
    negative: str | None = None
    """Other label value, with --positive."""
    label_bounds: str | None = None
    """Public bounds LOW:HIGH of a numerical label; labels are clipped to them."""
    categories: tuple[str, ...] = ()
    """Categorical columns (text, integers, booleans or dates); their values are hashed."""
    numbers: tuple[str, ...] = ()
    """Numerical columns."""
    bounds: tuple[str, ...] = ()
    """Public bounds of numbers, COLUMN=LOW:HIGH each, or a TOML file of COLUMN = [LOW, HIGH]. The
    models linear and wide-and-deep then learn a piecewise linear curve."""
    values: tuple[str, ...] = ()
    """Public values of categories, COLUMN=VALUE,VALUE,... each, or a TOML file of COLUMN = [VALUE,
    ...]. Each value gets a bucket of its own; an undeclared value counts as missing."""
    buckets: tuple[int, ...] = (1 << 16,)
    """Number of hash buckets, a power of two: one number for all categories without declared
    values, or one for each. Choose it from public knowledge, not by counting rows."""
    transform: Literal["log1p", "none", "both"] = "both"
    """Transform of numbers x. log1p: sign(x) log(1 + |x|), for counts; none: x, for scaled numbers;
    both: numbers with bounds get a curve of the logarithm and one of x."""
    missing: tuple[str, ...] = ()
    """Texts that mean a missing value, such as NA. The empty text always does."""
    order: Literal["random", "chronological"] = "random"
    """Validation and test rows: chosen at random by row number (public generator), or the last
    rows."""
    split: tuple[float, float, float] = (0.8, 0.1, 0.1)
    """Fractions of training, validation and test rows."""

    def format(self) -> Any:
        """Returns the format of the files, by the columns that are named."""
        from experiments.tasks.clicks.formats import table_format, table_schema
        from experiments.tasks.splits import Split

        names = "categories", "numbers", "buckets", "transform", "missing"
        how = {name: getattr(self, name) for name in names}
        how["bounds"] = _by_column("--bounds", self.bounds, ":", _ends, "LOW:HIGH", "[LOW, HIGH]")
        wanted = "VALUE,VALUE,...", '["VALUE", "VALUE", ...]'
        how["values"] = _by_column("--values", self.values, ",", _texts, *wanted)
        if self.label_bounds is not None:
            how["label_bounds"] = _range("--label-bounds", self.label_bounds)
        schema = table_schema(self.label, classes=_classes(self), **how)
        return table_format(schema, split=Split(self.order, self.split))

    def prepare(self, console: Console) -> None:
        """Makes the store, and says which columns are left out, or lack bounds."""
        super().prepare(console)
        from experiments.tasks.clicks.files import listed

        format = self.format()
        if left_out := format.left_out([format.open(path) for path in self.paths[:-1]]):
            console.line(f"left out: {listed(left_out)}")
        schema = format.schema
        if without := [name for name in schema.integers if name not in schema.bounded]:
            console.line(f"numbers without public bounds (--bounds): {listed(without)}")


@dataclass(frozen=True)
class PrepareSynthetic:
    """Generate rows like those of a Criteo data set, whose best reachable AUC is known."""

    out: tyro.conf.Positional[Path]
    """Store (or raw file) to create."""
    like: Literal["criteo-display", "criteo-search"] = "criteo-display"
    """Data set whose columns, cardinalities and missing rates are imitated."""
    num_rows: int = 1_000_000
    """Number of rows to generate."""
    seed: int = 0
    """Seed of the generator."""
    raw: bool = False
    """Write a raw file in the publisher's format in place of a store."""

    def prepare(self, console: Console) -> int:
        """Writes the rows, says what can be reached on them, and returns how many there are."""
        from experiments.tasks.clicks.synthetic import rows as synthetic

        write = synthetic.write_raw if self.raw else synthetic.write_store
        log, progress = synthetic.LOGS[self.like], shown(console)
        made = write(self.out, self.num_rows, self.seed, log=log, progress=progress)
        summary = made.summary if isinstance(made, synthetic.SyntheticStore) else made
        console.line(f"best reachable AUC: {summary.bayes_auc:.4f}")
        console.line(f"on the test rows: {summary.test_bayes_auc:.4f}")
        return summary.rows


@dataclass(frozen=True)
class PrepareTfds:
    """Read a data set of TensorFlow Datasets, which lies on the disk as array_record, into a store.

    One row a record: the label is 0 or 1, or declared; numbers become numeric columns, class
    labels, booleans and texts categories; other features must be left out by name. Where there are
    no validation or test rows, the other or the training rows are split at random.
    """

    name: tyro.conf.Positional[str]
    """Name of the data set, or the directory of one version."""
    out: tyro.conf.Positional[Path]
    """Store to create."""
    data_dir: Path | None = None
    """Folder of the data sets. Default: the folder of TensorFlow Datasets."""
    label: str | None = None
    """Feature to predict. Default: the data set's own, or "label"."""
    classes: str | None = None
    """Label values, VALUE,VALUE,..., if the label is not 0 or 1; of two values, the last is the
    positive one."""
    positive: str | None = None
    """Label value to predict, with --negative, in place of --classes."""
    negative: str | None = None
    """Other label value, with --positive."""
    leave_out: tuple[str, ...] = ()
    """Features to ignore."""
    text_buckets: int = 1 << 16
    """Number of hash buckets of a text feature, a power of two."""
    hash_seed: int = 0
    """Public seed of the hash that maps categorical values to buckets."""

    def prepare(self, console: Console) -> None:
        """Makes the store."""
        from experiments.tasks.clicks import tfds

        names = "data_dir", "label", "leave_out", "text_buckets", "hash_seed"
        how = {name: getattr(self, name) for name in names}
        tfds.prepare(self.name, self.out, progress=shown(console), classes=_classes(self), **how)


@dataclass(frozen=True)
class Prepare:
    """Turn raw data into a store that `dpsgd train` reads."""

    format: (
        Annotated[PrepareCriteoDisplay, tyro.conf.subcommand("criteo-display", prefix_name=False)]
        | Annotated[PrepareCriteoSearch, tyro.conf.subcommand("criteo-search", prefix_name=False)]
        | Annotated[PrepareCsv, tyro.conf.subcommand("csv", prefix_name=False)]
        | Annotated[PrepareTfds, tyro.conf.subcommand("tfds", prefix_name=False)]
        | Annotated[PrepareSynthetic, tyro.conf.subcommand("synthetic", prefix_name=False)]
    )
    """Format of the input."""


def run(config: Prepare) -> None:
    """Runs `dpsgd prepare`."""
    from experiments.cli.console import Console, counted
    from experiments.tasks.clicks.store import Store

    out = config.format.out
    with Console() as console:
        rows, parts = config.format.prepare(console), ""
        if out.is_dir():
            store = Store.open(out)
            rows = store.num_rows
            parts = ": " + ", ".join(f"{store.rows(split):,} {split}" for split in store.splits)
        assert rows is not None, "a raw file has rows that were generated"
        console.line(f"{counted(rows, 'row')} in {out}{parts}")


def shown(console: Console) -> Callable[[int], None]:
    """Returns what shows the number of rows that are done."""
    return lambda rows: console.progress(f"{rows:,} rows")


def _by_column(
    option: str,
    given: tuple[str, ...],
    separator: str,
    parsed: Callable[[list[Any]], Any],
    wanted: str,
    wanted_in_files: str,
) -> dict[str, Any]:
    """Returns what an option says of columns, in its words or in files.

    Args:
      option: Its name.
      given: COLUMN=PART... each, or a TOML file of COLUMN = [PART, ...].
      separator: Of the parts.
      parsed: Returns what parts mean; a TypeError or ValueError where they mean nothing.
      wanted: Parts, as people see them.
      wanted_in_files: The same in files.
    """
    found: dict[str, Any] = {}
    for text in given:
        name, is_pair, parts = text.partition("=")
        columns = {name: parts.split(separator)} if is_pair else _toml(Path(text))
        for column, texts in columns.items():
            try:
                value = parsed(texts)
            except (TypeError, ValueError):
                raise ValueError(
                    f"{option if is_pair else text}: {column!a} has no "
                    f"{option.strip('-')} {wanted if is_pair else wanted_in_files}"
                ) from None
            if found.setdefault(column, value) != value:
                raise ValueError(f"{option}: {column} is given twice, with different values")
    return found


def _range(option: str, given: str) -> tuple[float, float]:
    try:
        return _ends(given.split(":"))
    except ValueError:
        raise ValueError(f"{option} takes LOW:HIGH, two numbers, not {given!a}") from None


def _ends(parts: list[Any]) -> tuple[float, float]:
    low, high = map(float, parts)
    return low, high


def _texts(parts: list[Any]) -> tuple[str, ...]:
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise TypeError
    return tuple(parts)


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def _classes(asked: PrepareCsv | PrepareTfds) -> tuple[str, ...]:
    """Returns the values of the label that mean 0, 1, ..., if they were declared."""
    if asked.positive is None or asked.negative is None:
        if asked.positive != asked.negative:
            raise ValueError("--positive and --negative are given together")
        return tuple(asked.classes.split(",")) if asked.classes is not None else ()
    if asked.classes is not None:
        raise ValueError("--classes stands for --positive and --negative: leave them out")
    return asked.negative, asked.positive
