"""Whole runs on generated clicks: examples per second, AUC, and audits.

A run is compared with the bare loop over its own compiled steps, on batches that were drawn and
sent beforehand. Both are timed by the clock, as the difference is idle time. On a busy machine that
is unreliable; the ratio of CPU seconds overstates work that runs beside the steps.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

import dpsgd
from dpsgd import RunSpec
from dpsgd.audit.report import CheckResult
from dpsgd.core.state import TrainState
from dpsgd.engine.blocks import plan_blocks
from dpsgd.engine.feed import BLOCK_STEPS
from dpsgd.engine.step import BlockInputs, Watch, compiled_block
from dpsgd.noise.keys import RootKey
from dpsgd.runs.dry_run import Resized, dry_run
from dpsgd.runs.job import Job
from dpsgd.runs.resolve import resolve
from dpsgd.runs.task import rows_of
from experiments.benchmarks.case import Figure, Spent, figure_at, turns
from experiments.benchmarks.data import FULL
from experiments.benchmarks.programs import clock, num_params
from experiments.cli.commands.audit import coupled
from experiments.tasks.clicks.schema import DISPLAY_ADS
from experiments.tasks.clicks.sizes import PRESETS, ModelConfig
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.clicks.task import ClickModels, Clicks
from samplers import BatchSource, Population
from samplers.settings import SETTINGS

EPSILON = 3.0
"""Epsilon of a whole run."""
MODELS = PRESETS | {
    "medium": ModelConfig(14, 2**15, (598, 598, 598)),
    "tiny": ModelConfig(2, 16, ()),
}


def run_of(sampler: str, batch_size: int, epochs: int | None = None, **rest: Any) -> RunSpec:
    """Returns the settings of a run.

    Args:
      sampler: Name of the sampler.
      batch_size: Expected number of examples of a batch.
      epochs: Number of epochs; None for the default.
      **rest: Other fields of `RunSpec`.

    >>> run_of("poisson", 64, noise_multiplier=1.0).sampler.batch_size
    64
    """
    return RunSpec.of(SETTINGS[sampler](batch_size=batch_size, epochs=epochs), **rest)


@contextmanager
def generated(rows: int, model: str) -> Iterator[tuple[Clicks, Path, synthetic.SyntheticSummary]]:
    """Yields a click task on a temporary store of generated rows.

    Yields:
      The task, a folder for runs, and the summary of the rows.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        summary = synthetic.write_store(folder / "store", rows, seed=0)
        sizes = {name: size for name, size in vars(MODELS[model]).items() if name != "wide"}
        yield Clicks(folder / "store", **sizes), folder, summary


def steps_of_run(task: Any, spec: RunSpec, out: Path) -> tuple[dict[str, Any], Spent]:
    """Trains a run, and returns its record and its steps' time."""
    marks: dict[str, float] = {}

    def mark(line: str) -> None:
        """Records the time at which a line's first word first occurs."""
        marks.setdefault(line.split()[0], time.process_time())

    record = dpsgd.run(task, spec, out, progress=mark)
    return record, Spent(record["training_seconds"], marks["evaluating"] - marks["steps"])


def train(model: str, epochs: int, rows: int = 125_000, rounds: int = 3) -> Iterator[Figure]:
    """Measures a run beside the bare loop of its steps.

    Also with data on the host, and the evaluation.

    Args:
      model: Name of the model's size.
      epochs: Number of epochs.
      rows: Number of generated rows; 4 in 5 of them train.
      rounds: Number of rounds.
    """
    sizes = {"l2_clip_norm": 4.0, "learning_rate": 3e-3, "noise_multiplier": 1.0}
    # The audit precedes a run, and is not timed.
    spec = run_of("balls-and-bins", 1024, epochs, audit=False, **sizes)
    with generated(rows, model) as (task, folder, _):
        numbers = itertools.count()
        job = Job.of_task(task, resolve(spec, task, rows_of(task)))

        def run(data_on: Literal["device", "host"]) -> Spent:
            """Returns the time of a run's steps."""
            out = folder / f"{data_on} {next(numbers)}"
            return steps_of_run(task, dataclasses.replace(spec, data_on=data_on), out)[1]

        def score() -> Spent:
            """Returns the time of an evaluation on all splits."""
            blocks = [block for split in task.store.splits for block in task.store.blocks(split)]
            return Spent.measure(lambda: task.evaluate(job.params, blocks))

        work: dict[str, Callable[[], Spent]] = {
            "bare": _bare_loop(job),
            "device": lambda: run("device"),
            "host": lambda: run("host"),
            "score": score,
        }
        spent: dict[str, list[Spent]] = {label: [] for label in work}
        for label in turns([*work], rounds):
            spent[label].append(work[label]())
        num_rows = task.store.num_rows
    seconds, cpu_seconds = (
        {label: np.array([time[i] for time in times[1:]]) for label, times in spent.items()}
        for i in (0, 1)
    )
    sampler = job.mechanism.sampler
    examples = sampler.num_steps * sampler.expected_batch_size
    row = figure_at(f"{model}, {num_params(job.params) / 1e6:.3g}M parameters, batch 1024")
    yield row("dpsgd train", examples / seconds["device"], "ex/s")
    yield row("bare loop of its steps", examples / seconds["bare"], "ex/s")
    for name, times in {"": seconds, ", in CPU seconds": cpu_seconds}.items():
        ratio = times["bare"] / times["device"]
        yield row(f"dpsgd train / bare loop{name}", ratio, "x", ">= 0.9")
    yield row("data on the host / on the device", seconds["device"] / seconds["host"], "x")
    yield row("rows scored", num_rows / seconds["score"], "rows/s")


def _bare_loop(job: Job) -> Callable[[], Spent]:
    """Returns a function that takes all steps of a run, with all blocks on the device."""
    root, sampler = RootKey.from_insecure_seed(0), job.mechanism.sampler
    source = BatchSource(sampler, root.sampling_seed(0))
    blocks = plan_blocks(source, first_step=0, block_steps=BLOCK_STEPS)
    plans, data = [jax.device_put(plan) for _, plan in blocks], jax.device_put(dict(job.data))
    watch = Watch.nothing(job.params)
    noise = jnp.asarray(root.noise_key(0)), job.mechanism.scales()
    inputs = [BlockInputs(data, plan, *noise, watch) for plan in plans]
    program = compiled_block(job.algorithm, sampler, (job.start(), inputs[0]))

    def all_steps(state: TrainState) -> None:
        """Takes all steps from a state."""
        for block_inputs in inputs:
            state, *_ = program(state, block_inputs)
        jax.block_until_ready(state)

    def loop() -> Spent:
        """Returns the time of all steps."""
        state = jax.block_until_ready(jax.tree.map(jnp.array, job.start()))
        return Spent.measure(lambda: all_steps(state))

    return loop


def whole_run(
    model: str,
    rows: int,
    batch_size: int,
    tables: str = "dense",
    audit: bool = False,
) -> Iterator[Figure]:
    """Measures an epoch of `dpsgd train`: time, epsilon and AUC.

    `tables` is "lazy" or "dense".
    """
    spec = run_of(
        "balls-and-bins", batch_size, 1, target_epsilon=EPSILON, tables=tables, audit=audit
    )
    with generated(round(rows / 0.8), model) as (task, folder, summary):  # four fifths train
        results: list[Any] = []
        total = Spent.measure(lambda: results.extend(steps_of_run(task, spec, folder / "run")))
    record, steps = results
    place = f"{record['num_params'] / 1e6:.3g}M parameters, {rows:,} rows, batch {batch_size:,}"
    row = figure_at(place)
    yield row("whole run", total.seconds, "s")
    yield row("its steps by the clock", steps.seconds, "s")
    yield row("its steps", steps.cpu_seconds, "CPU s")
    yield row(f"steps of an epoch of {FULL:,} rows", steps.cpu_seconds * FULL / rows, "CPU s")
    yield row("its epsilon", record["epsilon_upper"], bar=f"<= {EPSILON:g}")
    auc, best = record["metrics"]["test_auc"], summary.test_bayes_auc
    yield row("test AUC", auc)
    yield row("best reachable AUC of its test rows", best)
    yield row("test AUC short of the best by", best - auc)


def epoch(model: str, batch_size: int, rows: int = FULL) -> Iterator[Figure]:
    """Measures the steps of an epoch of Criteo Display Ads, on generated rows.

    It times `dpsgd train --dry-run --num-examples ROWS`, on a CPU in CPU seconds.

    Args:
      model: Preset of the click model.
      batch_size: Expected number of examples of a batch.
      rows: Assumed number of training rows.
    """
    spec = run_of("balls-and-bins", batch_size, 1, noise_multiplier=0.6)
    task = Clicks(None, model=cast(Any, model))
    plan = dry_run(Resized(task, rows), spec, clock=clock())
    row = figure_at(f"{plan.parameters / 1e6:.3g}M parameters, {rows:,} rows, batch {batch_size:,}")
    yield row("step", plan.timing.step, "s")
    yield row("steps of an epoch", plan.timing.step * plan.steps / 3600, "h")
    yield row("memory, rows included", plan.program_bytes / 1e9, "GB")


def audit(
    model: str, sampler: str, overflow: str = "", tables: str = "dense", bar: str = "",
    rows: int = 88_000, batch_size: int = 1_024,
) -> Iterator[Figure]:  # fmt: skip
    """Measures an audit of the training program.

    It compares the program with DP-SGD's definition: a device that fails its checks must not
    train. `tables` is "lazy" or "dense"; an empty `overflow` is the default.
    """
    options: Any = {"noise_multiplier": 1.0, "tables": tables, "calibration": "none"}
    spec = run_of(sampler, batch_size, 2, l2_clip_norm=1.0, **options)
    if overflow:
        several = dataclasses.replace(spec.sampler, max_batch_size=batch_size, overflow=overflow)
        spec = dataclasses.replace(spec, sampler=several)
    task, checks = ClickModels(MODELS[model], DISPLAY_ADS, 0), list[CheckResult]()
    run = resolve(spec, task, (task.generated(1), Population(rows)))
    spent = Spent.measure(lambda: checks.extend(coupled(task, run).checks))
    row = figure_at(f"{model}, {sampler}, {rows:,} rows, batch {batch_size:,}")
    yield row("audit, compiling included", spent.cpu_seconds, "CPU s", bar)
    failed = [f"{check.name} ({check.detail})" for check in checks if not check.passed]
    yield row("; ".join(["checks that failed", *failed]), len(failed), bar="<= 0")
