"""Examples a second of `dpsgd train`, beside those of the bare loop over its compiled steps.

The bare loop runs the very program of the run, on batches that were drawn and sent before: nothing
is declared, written or saved. What is looked for is time in which nothing computes, so both are
timed by the clock, from before the first batch is drawn to the last checkpoint; on a busy machine
this means little, and the ratio of their CPU seconds counts all that a run does beside its steps as
if nothing of it went on meanwhile. They take turns, and each figure is the median over the rounds.
The first round, which compiles, is not counted. The same run with the data on the host says what it
costs to stream them, and scoring all rows what the evaluation costs.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

import dpsgd
from dpsgd import RootKey, RunSpec
from dpsgd.core.state import TrainState
from dpsgd.engine.blocks import plan_blocks
from dpsgd.engine.feed import BLOCK_STEPS
from dpsgd.engine.step import Watch, compiled_block
from dpsgd.runs.job import Job
from dpsgd.runs.resolve import resolve
from dpsgd.runs.task import rows_of
from experiments.benchmarks.case import Row, at, cases
from experiments.benchmarks.programs import SIZES, copies_of, num_params
from experiments.benchmarks.timing import Series, Spent, turns
from experiments.tasks.clicks.sizes import PRESETS, ModelConfig
from experiments.tasks.clicks.synthetic.rows import SyntheticStore, write_store
from experiments.tasks.clicks.task import Clicks
from samplers import BatchSource
from samplers.settings import SETTINGS

MODELS = {"small": PRESETS["small"], "medium": SIZES["8M"]}


def run_of(sampler: str, batch_size: int | None, epochs: int | None = None, **rest: Any) -> RunSpec:
    """Returns the run that is asked for; None for defaults."""
    return RunSpec.of(SETTINGS[sampler](batch_size=batch_size, epochs=epochs), **rest)


@contextmanager
def generated(rows: int, model: ModelConfig) -> Iterator[tuple[Clicks, Path, SyntheticStore]]:
    """Yields clicks on a temporary store of generated rows, a folder for runs, and the summary."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = write_store(folder / "store", rows, seed=0)
        sizes = {name: size for name, size in vars(model).items() if name != "wide"}
        yield Clicks(folder / "store", **sizes), folder, made


def steps_of_run(task: Any, spec: RunSpec, out: Path) -> tuple[dict[str, Any], Spent]:
    """Returns the record of a run, and what its steps took."""
    marks: dict[str, float] = {}

    def mark(line: str) -> None:  # the first word of a line of progress, when it first came
        marks.setdefault(line.split()[0], time.process_time())

    record = dpsgd.run(task, spec, out, progress=mark)
    return record, Spent(record["training_seconds"], marks["evaluating"] - marks["steps"])


def train(
    model: str,
    epochs: int,
    *,
    rows: int = 125_000,  # of which 4 in 5 train
    rounds: int = 3,
) -> Iterator[Row]:
    sizes = {"l2_clip_norm": 4.0, "learning_rate": 3e-3, "noise_multiplier": 1.0}
    # The audit is made before a run, and no part of what is timed.
    spec = run_of("balls-and-bins", 1024, epochs, audit=False, **sizes)
    with generated(rows, MODELS[model]) as (task, folder, _):
        numbers = itertools.count()
        job = Job.of(task, resolve(spec, task, rows_of(task)))

        def run(data_on: Literal["device", "host"]) -> Spent:
            out = folder / f"{data_on} {next(numbers)}"
            return steps_of_run(task, dataclasses.replace(spec, data_on=data_on), out)[1]

        def score() -> Spent:
            blocks = [block for split in task.store.splits for block in task.store.blocks(split)]
            return Spent.on(lambda: task.evaluate(job.params, blocks))

        work: dict[str, Callable[[], Spent]] = {
            "bare": _bare_loop(job),
            "device": lambda: run("device"),
            "host": lambda: run("host"),
            "score": score,
        }
        seconds, cpu_seconds = (Series({label: [] for label in work}) for _ in range(2))
        for label, counts in turns(work, rounds):
            spent = work[label]()
            if counts:
                seconds[label].append(spent.seconds)
                cpu_seconds[label].append(spent.cpu_seconds)
        num_rows = task.store.num_rows
    sampler = job.mechanism.sampler
    examples = sampler.num_steps * sampler.expected_batch_size
    row = at(f"{model}, {num_params(job.params) / 1e6:.3g}M parameters, batch 1024")
    yield row("dpsgd train", examples / seconds.median("device"), "ex/s")
    yield row("bare loop of its steps", examples / seconds.median("bare"), "ex/s")
    yield row("dpsgd train / bare loop", seconds.ratio("bare", "device"), "x", at_least=0.9)
    yield row("the same, in CPU seconds", cpu_seconds.ratio("bare", "device"), "x", at_least=0.9)
    yield row("data on the host / on the device", seconds.ratio("device", "host"), "x")
    yield row("rows scored", num_rows / seconds.median("score"), "rows/s")


def _bare_loop(job: Job) -> Callable[[], Spent]:
    """Returns what takes all steps of a run, whose blocks are drawn and on the device."""
    root, sampler = RootKey.from_insecure_seed(0), job.mechanism.sampler
    source = BatchSource(sampler, root.sampling_seed(0))
    drawn = plan_blocks(source, first_step=0, block_steps=BLOCK_STEPS)
    plans, data = [jax.device_put(plan) for _, plan in drawn], jax.device_put(dict(job.data))
    watch = Watch.nothing(job.params)
    rest = jnp.asarray(root.noise_key(0)), job.mechanism.scales(), watch, None
    program = compiled_block(job.algorithm, sampler, (job.start(), data, plans[0], *rest))

    def all_steps(state: TrainState) -> None:
        for plan in plans:
            state, *_ = program(state, data, plan, *rest)
        jax.block_until_ready(state)

    def loop() -> Spent:
        state = jax.block_until_ready(copies_of(job.start())())
        return Spent.on(lambda: all_steps(state))

    return loop


CASES = cases(
    train,
    over={"model, epochs": (("small", 4), ("medium", 1))},
    quick={"rows": 10_000, "rounds": 1},
    seconds=200,
)
