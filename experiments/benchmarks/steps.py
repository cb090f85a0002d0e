"""Time and memory of training steps, by turns: on a CPU in CPU seconds, else by the clock."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpsgd import Mechanism, dpsgd, train_blocks
from dpsgd.core.gaussian import add_gaussian_noise
from dpsgd.noise.keys import RootKey
from experiments.benchmarks.case import Figure, alone, figure, figure_at, in_turns
from experiments.benchmarks.programs import ADAM, RESIDENT_ROWS, Program, Steps, clicks, clock
from samplers import BallsAndBins

PyTree = Any


class Times(NamedTuple):
    """Measurements of one program."""

    seconds: np.ndarray
    """Seconds of a step, float[rounds]."""
    flush: np.ndarray | None
    """Seconds of a flush of lazy tables, float[rounds]; None without lazy tables."""
    memory: float
    """Temporary memory, bytes."""


def times(
    make: Mapping[str, Callable[[], Program]], block_steps: int, rounds: int
) -> dict[str, Times]:
    """Measures programs that take turns, then their flushes."""
    programs = {name: program() for name, program in make.items()}
    spent = in_turns(programs, rounds, clock())
    late = {name: program.flush for name, program in programs.items() if program.lazy}
    flushes = in_turns(late, rounds, clock())
    return {
        name: Times(spent[name] / block_steps, flushes.get(name), float(program.temporary_bytes))
        for name, program in programs.items()
    }


def steps(
    kinds: Sequence[str],
    ratios: Sequence[tuple[str, str, str]] = (),
    interactions: Sequence[Literal["none", "dot", "cross"]] = ("none",),
    table_rows: int = 2**20,
    hidden: Sequence[int] = (598, 598, 598),
    batch_size: int = 1024,
    block_steps: int = 8,
    rounds: int = 5,
    together: bool = True,
) -> Iterator[Figure]:
    """Measures kinds of steps of one model and batch size.

    Args:
      kinds: Kinds of steps, keys of `KINDS`.
      ratios: Pairs of kinds, or of "memory, KIND", with the bar of the first over the second; of
        several interactions, "KIND, INTERACTION".
      interactions: Interactions of the embeddings.
      table_rows: Rows of the largest tables.
      hidden: Widths of the layers.
      batch_size: Number of examples of a batch.
      block_steps: Steps of a block, which is one program.
      rounds: Number of rounds.
      together: Whether all programs take turns; else one is in memory at a time.
    """
    make: dict[str, Callable[[], Program]] = {}
    for interaction in interactions:
        model = clicks(table_rows, hidden, interaction)
        setting = Steps(model, batch_size, block_steps)
        suffix = f", {interaction}" if len(interactions) > 1 else ""
        make |= {f"{kind}{suffix}": partial(setting.program, kind) for kind in kinds}
    row = figure_at(f"{model.num_params / 1e6:.3g}M parameters, batch {batch_size:,}")
    measured: dict[str, Times] = {}
    for names in [list(make)] if together else [[name] for name in make]:
        measured |= times({name: make[name] for name in names}, block_steps, rounds)
        gc.collect()
    quantities: dict[str, Any] = {}
    for name, (seconds, flush, memory) in measured.items():
        quantities |= {name: seconds, f"memory, {name}": memory}
        yield row(name, seconds, "s")
        yield row(f"temporary memory, {name}", memory / 1e6, "MB")
        if flush is not None:
            yield row(f"flush, {name}", flush, "s")
            yield row(f"flush / step, {name}", np.median(flush) / np.median(seconds), "x")
    for first, second, bar in ratios:
        yield row(f"{first} / {second}", quantities[first] / quantities[second], "x", bar)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if peak is not None:
        yield row("peak memory so far", peak / 1e9, "GB")


def sizes(
    lazy: Sequence[str],
    table_rows: Sequence[int],
    dense: str = "",
    dense_rows: Sequence[int] = (),
    bar: str = "",
    hidden: Sequence[int] = (598, 598, 598),
    batch_size: int = 1024,
    rounds: int = 5,
) -> Iterator[Figure]:
    """Measures lazy and dense steps of several sizes.

    Dense steps of large sizes are extrapolated on a line through smaller ones. Each kind is
    measured in a separate process, with its memory.

    Args:
      lazy: Kinds of steps with lazy tables.
      table_rows: Sizes of the lazy steps.
      dense: Kind of dense steps.
      dense_rows: Two or more sizes of the dense steps.
      bar: Bar of the extrapolated time of a dense step over the lazy step's time.
      hidden: Widths of the layers.
      batch_size: Number of examples of a batch.
      rounds: Number of rounds.
    """
    line: list[tuple[int, float]] = []
    for kind in [dense, *lazy] if dense else lazy:
        rows = dense_rows if kind == dense else table_rows
        process = alone(_at_sizes, kind, rows, hidden, batch_size, rounds)
        for count, spent in process.value.items():
            yield figure(f"{kind}, {count / 1e6:.3g}M parameters", spent.seconds, "s")
        medians = {n: float(np.median(spent.seconds)) for n, spent in process.value.items()}
        if kind == dense:
            line = list(medians.items())
            continue
        ratio = max(medians.values()) / min(medians.values())
        yield figure(f"{kind}, dearest / cheapest of {len(medians)} sizes", ratio, "x", "<= 1.25")
        row = figure_at(f"{kind}, {count / 1e6:.3g}M parameters")
        yield row("flush", spent.flush, "s")
        yield row("flush / step", spent.flush / medians[count], "x")
        yield row("most memory of the process", process.gigabytes, "GB", "<= 12")
        if line:
            (x, y), (x2, y2) = line[0], line[-1]
            scaled = y + (y2 - y) / (x2 - x) * (count - x)
            name = f"{dense}, scaled to {count / 1e6:.3g}M parameters"
            yield figure(name, scaled, "s")
            yield figure(f"{name} / {kind}", scaled / medians[count], "x", bar)


def _at_sizes(
    kind: str, table_rows: Sequence[int], hidden: Sequence[int], batch_size: int, rounds: int
) -> dict[int, Times]:
    """Returns the times of a kind of steps by number of parameters."""
    models = {str(rows): clicks(rows, hidden) for rows in table_rows}
    block_steps = 8
    make = {
        rows: partial(Steps(model, batch_size, block_steps).program, kind)
        for rows, model in models.items()
    }
    measured = times(make, block_steps, rounds)
    return {model.num_params: measured[rows] for rows, model in models.items()}


# ----------------------------------------------------------------------------------------- sources


def streamed(
    batch_size: int,
    rows: int = 2**18,
    table_rows: int = 2**11,
    hidden: Sequence[int] = (256, 256),
    rounds: int = 5,
    bar: str = "",
) -> Iterator[Figure]:
    """Measures training on resident rows and on the rows of files.

    Args:
      batch_size: Number of examples of a batch.
      rows: Number of rows, in scalar columns, of one epoch.
      table_rows: Rows of the largest tables.
      hidden: Widths of the layers.
      rounds: Number of rounds.
      bar: Bar of the time with streamed rows over the time with resident rows.
    """
    model = clicks(table_rows, hidden)
    drawn = np.random.default_rng(0).integers(0, RESIDENT_ROWS, rows)
    columns: dict[str, np.ndarray] = {"label": model.columns["label"][drawn]}
    groups = {name: column.shape[1] for name, column in model.columns.items() if column.ndim == 2}
    for name, width in groups.items():
        columns |= {f"{name} {k}": model.columns[name][drawn, k] for k in range(width)}

    def loss_fn(params: PyTree, example: dict[str, jax.Array]) -> jax.Array:
        """Returns the model's loss.

        Args:
          params: Parameters of the model.
          example: Row of scalars by column.
        """
        stacked = {
            name: jnp.stack([example[f"{name} {k}"] for k in range(width)])
            for name, width in groups.items()
        }
        return model.loss_fn(params, {"label": example["label"], **stacked})

    algorithm = dpsgd(loss_fn, ADAM)
    mechanism = Mechanism(BallsAndBins(rows, batch_size), 1.0, 1.0)

    def epoch(data: Any, data_on: Literal["device", "host"]) -> None:
        """Trains an epoch.

        Args:
          data: Rows, from arrays or from a table.
          data_on: Where the rows lie.
        """
        state = algorithm.init(model.params(), mechanism)
        blocks = train_blocks(algorithm, mechanism, state, data, data_on=data_on, insecure_seed=0)
        for block in blocks:
            jax.block_until_ready(block.state)

    with TemporaryDirectory() as name:
        mapped, arrow = _mapped(columns, Path(name))
        work = {
            "rows on the device": partial(epoch, columns, "device"),
            "rows of memory-mapped arrays": partial(epoch, mapped, "host"),
            "rows of an Arrow file": partial(epoch, arrow, "host"),
        }
        spent = in_turns(work, rounds, clock())
    row = figure_at(f"{model.num_params / 1e6:.3g}M parameters, batch {batch_size:,}")
    resident, *others = work
    for name in work:
        yield row(name, rows / spent[name], "ex/s")
    for name in others:
        yield row(f"{name} / {resident}", spent[name] / spent[resident], "x", bar)


def _mapped(columns: dict[str, np.ndarray], folder: Path) -> tuple[dict[str, np.ndarray], Any]:
    """Returns the columns of new files: arrays, and a table of Arrow in record batches."""
    import pyarrow  # a machine that measures steps alone may lack it

    for number, column in enumerate(columns.values()):
        np.save(folder / f"{number}.npy", column)
    files = {name: folder / f"{number}.npy" for number, name in enumerate(columns)}
    table, path = pyarrow.table(columns), str(folder / "table.arrow")
    with pyarrow.OSFile(path, "w") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2**16)
    arrow = pyarrow.ipc.open_file(pyarrow.memory_map(path)).read_all()
    return {name: np.load(file, mmap_mode="r") for name, file in files.items()}, arrow


# ------------------------------------------------------------------------------------------- noise


def noise(size: int, rounds: int = 5) -> Iterator[Figure]:
    """Measures a step's noise beside `jax.random.normal`."""
    root = RootKey.from_insecure_seed(0)

    def stock(implementation: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Returns the addition of JAX's normals."""

        def add(sums: jax.Array, step: jax.Array) -> jax.Array:
            """Returns sums with noise of a step."""
            key = jax.random.fold_in(jax.random.key(0, impl=implementation), step)
            return sums + 1.3 * jax.random.normal(key, sums.shape)

        return add

    def program(add: Callable[[jax.Array, jax.Array], jax.Array]) -> Program:
        """Returns the program of an addition."""
        start = lambda: (jnp.zeros(size), jnp.uint32(1))  # noqa: E731
        return Program(lambda carry: ((add(*carry), carry[1] + 1),), start)

    adders: dict[str, Any] = {
        "noise": lambda sums, step: add_gaussian_noise(sums, root.noise_key(0), step, 1.3),
        "threefry": stock("threefry2x32"),
        "rbg": stock("rbg"),
    }
    seconds = in_turns({name: program(add) for name, add in adders.items()}, rounds, clock())
    row = figure_at(f"{size / 1e6:g}M coordinates")
    yield row("noise", seconds["noise"], "s")
    for name, bar in {"threefry": "<= 1", "rbg": ""}.items():
        ratio = seconds["noise"] / seconds[name]
        yield row(f"noise / jax.random.normal, {name}", ratio, "x", bar)
