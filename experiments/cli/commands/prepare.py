"""`dpsgd prepare`: raw data to a store of columns."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.cli.console import Console, counted
from experiments.cli.questions.prepare import (
    FromFiles,
    PrepareCriteoSearch,
    PrepareCsv,
    PrepareSynthetic,
    PrepareTfds,
)
from experiments.tasks.clicks import schema
from experiments.tasks.clicks.files import listed
from experiments.tasks.clicks.formats import DISPLAY, SEARCH, table_format, table_schema
from experiments.tasks.clicks.store import Store
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.splits import Split


def prepare(asked: FromFiles | PrepareTfds | PrepareSynthetic) -> None:
    """Turns raw data into a store."""
    with Console() as console:
        rows, parts = _prepare(asked, console), ""
        if asked.store.is_dir():
            store = Store.open(asked.store)
            rows = store.num_rows
            parts = ": " + ", ".join(f"{store.rows(split):,} {split}" for split in store.splits)
        assert rows is not None, "a raw file has rows that were generated"
        console.line(f"{counted(rows, 'row')} in {asked.store}{parts}")


def _prepare(asked: FromFiles | PrepareTfds | PrepareSynthetic, console: Console) -> int | None:
    """Makes a store or a raw file; returns the number of rows of a raw file."""
    progress = _shown(console)
    if isinstance(asked, PrepareSynthetic):
        write = synthetic.write_raw if asked.raw else synthetic.write_store
        log = synthetic.LOGS[asked.like]
        summary = write(asked.store, asked.num_rows, asked.seed, log=log, progress=progress)
        console.line(f"best reachable AUC: {summary.bayes_auc:.4f}")
        console.line(f"on the test rows: {summary.test_bayes_auc:.4f}")
        return summary.rows
    if isinstance(asked, PrepareTfds):
        source = importlib.import_module("experiments.tasks.clicks.tfds")
        names = "data_dir", "label", "leave_out", "text_buckets", "hash_seed"
        how = {name: getattr(asked, name) for name in names}
        how |= {"classes": asked.label_values, "progress": progress}
        source.prepare(asked.name, asked.store, **how)
        return None
    found = replace(_format(asked), hash_seed=asked.hash_seed)
    if asked.pipeline.beam:
        runner = asked.pipeline.on_runner()
        console.progress(f"a pipeline on {runner.name}")
        beam = importlib.import_module("experiments.beam.prepare")
        beam.prepare(asked.files, asked.store, found, runner.write_store)
    else:
        found.prepare(asked.files, asked.store, progress=progress)
    if isinstance(asked, PrepareCsv):
        if left_out := found.left_out([found.open(path) for path in asked.files]):
            console.line(f"left out: {listed(left_out)}")
        columns = found.schema
        if without := [name for name in columns.integers if name not in columns.bounded]:
            console.line(f"numbers without public bounds (--bounds): {listed(without)}")
    return None


def _format(asked: FromFiles) -> Any:
    """Returns the format of files: a `Format`."""
    if isinstance(asked, PrepareCriteoSearch):
        return replace(SEARCH, schema=schema.sponsored_search(asked.include))
    if not isinstance(asked, PrepareCsv):
        return DISPLAY
    names = "categories", "numbers", "buckets", "transform", "missing"
    how = {name: getattr(asked, name) for name in names}
    how["bounds"] = _by_column("--bounds", asked.bounds, ":", _ends, "LOW:HIGH", "[LOW, HIGH]")
    wanted = "VALUE,VALUE,...", '["VALUE", "VALUE", ...]'
    how["values"] = _by_column("--values", asked.values, ",", _texts, *wanted)
    if asked.label_bounds is not None:
        how["label_bounds"] = _range("--label-bounds", asked.label_bounds)
    columns = table_schema(asked.label, classes=asked.label_values, **how)
    return table_format(columns, split=Split(asked.order, asked.split))


def _shown(console: Console) -> Callable[[int], None]:
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
