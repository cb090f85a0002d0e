"""`dpsgd prepare`: turns raw data into a store of columns."""

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
from experiments.tasks.clicks.formats import DISPLAY, SEARCH, table_format, table_schema
from experiments.tasks.clicks.store import Store
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.files import listed
from experiments.tasks.splits import Split


def prepare(question: FromFiles | PrepareTfds | PrepareSynthetic) -> None:
    """Turns raw data into a store."""
    with Console() as console:
        rows, sizes = _prepare(question, console), ""
        if question.store.is_dir():
            store = Store.open(question.store)
            rows = store.num_rows
            sizes = ": " + ", ".join(f"{store.rows(split):,} {split}" for split in store.splits)
            if store.schema.user:
                most = max(int(store.users(split).max()) for split in store.splits)
                sizes += f"; {counted(1 + most, 'user')}, each with all rows in one split"
        assert rows is not None, "a raw file has rows that were generated"
        console.line(f"{counted(rows, 'row')} in {question.store}{sizes}")


def _prepare(question: FromFiles | PrepareTfds | PrepareSynthetic, console: Console) -> int | None:
    """Makes a store or a raw file; returns the number of rows of a raw file."""
    progress = _row_progress(console)
    if isinstance(question, PrepareSynthetic):
        write = synthetic.write_raw if question.raw else synthetic.write_store
        log = synthetic.LOGS[question.like]
        summary = write(
            question.store, question.num_rows, question.seed, log=log, progress=progress
        )
        console.line(f"best reachable AUC: {summary.bayes_auc:.4f}")
        console.line(f"on the test rows: {summary.test_bayes_auc:.4f}")
        return summary.rows
    if isinstance(question, PrepareTfds):
        source = importlib.import_module("experiments.tasks.clicks.formats")
        names = "data_dir", "label", "leave_out", "text_buckets", "hash_seed"
        arguments = {name: getattr(question, name) for name in names}
        arguments |= {"classes": question.label_values, "progress": progress}
        source.prepare_tfds(question.name, question.store, **arguments)
        return None
    file_format = replace(_format(question), hash_seed=question.hash_seed)
    if question.pipeline.beam:
        runner = question.pipeline.on_runner()
        console.progress(f"a pipeline on {runner.name}")
        beam = importlib.import_module("experiments.beam.prepare")
        beam.prepare(question.files, question.store, file_format, runner.write_store)
    else:
        file_format.prepare(question.files, question.store, progress=progress)
    if isinstance(question, PrepareCsv):
        if left_out := file_format.left_out([file_format.open(path) for path in question.files]):
            console.line(f"left out: {listed(left_out)}")
        columns = file_format.schema
        if without := [name for name in columns.integers if name not in columns.bounded]:
            console.line(f"numbers without public bounds (--bounds): {listed(without)}")
    return None


def _format(question: FromFiles) -> Any:
    """Returns the format of files: a `Format`."""
    if isinstance(question, PrepareCriteoSearch):
        return replace(SEARCH, schema=schema.sponsored_search(question.include))
    if not isinstance(question, PrepareCsv):
        return DISPLAY
    names = "categories", "numbers", "buckets", "transform", "missing", "user"
    arguments = {name: getattr(question, name) for name in names}
    arguments["bounds"] = _by_column(
        "--bounds", question.bounds, ":", _ends, "LOW:HIGH", "[LOW, HIGH]"
    )
    value_syntax = "VALUE,VALUE,...", '["VALUE", "VALUE", ...]'
    arguments["values"] = _by_column("--values", question.values, ",", _texts, *value_syntax)
    if question.label_bounds is not None:
        arguments["label_bounds"] = _range("--label-bounds", question.label_bounds)
    columns = table_schema(question.label, classes=question.label_values, **arguments)
    return table_format(columns, split=Split(question.order, question.split))


def _row_progress(console: Console) -> Callable[[int], None]:
    return lambda rows: console.progress(f"{rows:,} rows")


def _by_column(
    option: str,
    given: tuple[str, ...],
    separator: str,
    parsed: Callable[[list[Any]], Any],
    wanted: str,
    wanted_in_files: str,
) -> dict[str, Any]:
    """Returns the value of each column that an option declares.

    Args:
      option: Name of the option, such as `--bounds`.
      given: COLUMN=PART... each, or a TOML file of COLUMN = [PART, ...].
      separator: Separator of the parts.
      parsed: Converts the parts to a value; raises TypeError or ValueError if they are invalid.
      wanted: Syntax of the parts on the command line, for errors.
      wanted_in_files: Syntax of the parts in files, for errors.
    """
    parsed_values: dict[str, Any] = {}
    for text in given:
        name, is_pair, values = text.partition("=")
        columns = {name: values.split(separator)} if is_pair else _toml(Path(text))
        for column, texts in columns.items():
            try:
                value = parsed(texts)
            except (TypeError, ValueError):
                raise ValueError(
                    f"{option if is_pair else text}: {column!a} needs {option.strip('-')} of the "
                    f"form {wanted if is_pair else wanted_in_files}"
                ) from None
            if parsed_values.setdefault(column, value) != value:
                raise ValueError(f"{option}: {column} is given twice, with different values")
    return parsed_values


def _range(option: str, given: str) -> tuple[float, float]:
    try:
        return _ends(given.split(":"))
    except ValueError:
        raise ValueError(f"{option} takes LOW:HIGH, two numbers, not {given!a}") from None


def _ends(ends: list[Any]) -> tuple[float, float]:
    low, high = map(float, ends)
    return low, high


def _texts(texts: list[Any]) -> tuple[str, ...]:
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise TypeError
    return tuple(texts)


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
