"""Examples a second of `dpsgd train`, beside those of the bare loop over its compiled steps.

    scripts/bench train --json train.json        (some minutes)
    scripts/bench train --quick                  (the small model, few rows, once)

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
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

import dpsgd
from dpsgd import RootKey, RunSpec, TrainState
from dpsgd.engine.blocks import plan_blocks
from dpsgd.engine.feed import BLOCK_STEPS
from dpsgd.engine.step import Watch, compiled_block
from dpsgd.runs.job import Job, rows_of
from dpsgd.runs.resolve import resolve
from experiments.benchmarks.rows import Row, options_of, positive, report
from experiments.benchmarks.step import SIZES
from experiments.benchmarks.timing import Series, turns
from experiments.tasks.clicks.sizes import PRESETS, ModelConfig
from experiments.tasks.clicks.synthetic import rows as synthetic
from experiments.tasks.clicks.task import Clicks
from samplers import BatchSource
from samplers.settings import SETTINGS

MODELS = {"small": PRESETS["small"], "medium": SIZES["8M"]}
EPOCHS = {"small": 4, "medium": 1}


class Spent(NamedTuple):
    """What a piece of work took, by the clock and of the processor."""

    seconds: float
    cpu_seconds: float

    @classmethod
    def on(cls, work: Callable[[], Any]) -> Spent:
        """Returns what `work` takes."""
        begin, cpu_begin = time.perf_counter(), time.process_time()
        work()
        return cls(time.perf_counter() - begin, time.process_time() - cpu_begin)


def measure(name: str, model: ModelConfig, store: Path, epochs: int, rounds: int) -> list[Row]:
    """Returns the rows of one model, trained on `store`."""
    runs = store.parent / name
    task = Clicks(store, **dataclasses.asdict(model))
    config = RunSpec.of(
        SETTINGS["balls-and-bins"](batch_size=1024, epochs=epochs),
        noise_multiplier=1.0,
        l2_clip_norm=4.0,
        learning_rate=3e-3,
        audit=False,  # made before a run, and no part of what is timed
    )
    job = Job.of(task, resolve(config, task, rows_of(task)))
    bare, numbers = _BareLoop(job), itertools.count()

    def run(data_on: Literal["device", "host"]) -> Spent:
        marks: dict[str, float] = {}

        def mark(line: str) -> None:  # the first word of a line of progress, when it first came
            marks.setdefault(line.split()[0], time.process_time())

        out = runs / f"{data_on} {next(numbers)}"
        record = dpsgd.run(task, dataclasses.replace(config, data_on=data_on), out, progress=mark)
        return Spent(record["training_seconds"], marks["evaluating"] - marks["steps"])

    def score() -> Spent:
        blocks = [block for split in task.store.splits for block in task.store.blocks(split)]
        return Spent.on(lambda: task.evaluate(job.params, blocks))

    work: dict[str, Callable[[], Spent]] = {
        "bare": bare,
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
    sampler = job.mechanism.sampler
    examples = sampler.num_steps * sampler.expected_batch_size
    num_params = sum(leaf.size for leaf in jax.tree.leaves(job.params))
    at = f"{name}, {num_params / 1e6:.3g}M parameters, batch {config.sampler.batch_size}"
    return [
        Row(f"dpsgd train, {at}", examples / seconds.median("device"), "ex/s"),
        Row(f"bare loop of its steps, {at}", examples / seconds.median("bare"), "ex/s"),
        Row.at_least(f"dpsgd train / bare loop, {at}", seconds.ratio("bare", "device"), "x", 0.9),
        Row.at_least(
            f"the same, in CPU seconds, {at}", cpu_seconds.ratio("bare", "device"), "x", 0.9
        ),
        Row(f"data on the host / on the device, {at}", seconds.ratio("device", "host"), "x"),
        Row(f"rows scored, {at}", task.store.num_rows / seconds.median("score"), "rows/s"),
    ]


class _BareLoop:
    """The blocks of a job's run, drawn and on the device; called, it takes all steps."""

    def __init__(self, job: Job) -> None:
        root = RootKey.from_insecure_seed(0)
        sampler = job.mechanism.sampler
        source = BatchSource(sampler, root.sampling_seed(0))
        plans = plan_blocks(source, first_step=0, block_steps=BLOCK_STEPS)
        self._plans = [jax.device_put(plan) for _, plan in plans]
        self._data = jax.device_put(dict(job.data))
        watch = Watch.nothing(job.params)
        self._rest = jnp.asarray(root.noise_key(0)), job.mechanism.scales(), watch, None
        arguments = job.start(), self._data, self._plans[0], *self._rest
        self._program = compiled_block(job.algorithm, sampler, arguments)
        self._job = job

    def __call__(self) -> Spent:
        state = jax.tree.map(lambda leaf: jnp.array(leaf, leaf.dtype), self._job.start())
        jax.block_until_ready(state)
        return Spent.on(lambda: self._all_steps(state))

    def _all_steps(self, state: TrainState) -> None:
        for plan in self._plans:
            state, *_ = self._program(state, self._data, plan, *self._rest)
        jax.block_until_ready(state)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and returns 1 if a bar does not hold."""
    parser = options_of("train", __doc__, quick="the small model on few rows, once")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--rows", type=positive, default=125_000, help="rows, of which 4 in 5 train"
    )
    parser.add_argument("--rounds", type=positive, default=3, help="rounds for each median")
    options = parser.parse_args(argv)
    if options.quick:
        options.models, options.rows, options.rounds = ["small"], 10_000, 1

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        synthetic.write_store(store, options.rows, seed=0)
        for name in options.models:
            rows += measure(name, MODELS[name], store, EPOCHS[name], options.rounds)
            print(f"measured {name}", file=sys.stderr)
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
