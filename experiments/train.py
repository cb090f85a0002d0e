"""One training run: from a store of examples to a run directory with model and guarantee."""

from __future__ import annotations

import dataclasses
import errno
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from accounting import calibrate
from dpsgd import (
    Algorithm,
    Guarantee,
    Independent,
    Mechanism,
    RootKey,
    Secure,
    TrainState,
    train_blocks,
)
from dpsgd.runs.audit import audit_run
from dpsgd.runs.checkpoint import Checkpoint
from dpsgd.runs.config import config_digest
from dpsgd.runs.directory import DATA, RunDirectory
from dpsgd.runs.environment import environment
from dpsgd.runs.history import NO_HEAD, Generation, Terms
from dpsgd.runs.ledger import Ledger
from dpsgd.runs.records import build, checked
from dpsgd.runs.stop import Stopped, stop_requests
from dpsgd.training.loop import Block, repeats_exactly
from experiments.cli.config import TrainConfig
from experiments.fingerprint import differing, fingerprint
from experiments.finished import FinishedRun, guarantee_of, proved
from experiments.programs import click_algorithm, step_sizes
from experiments.recorded import config_from, describe
from experiments.reports import run as report
from experiments.tasks.clicks.evaluate import evaluate
from experiments.tasks.clicks.model import functional
from experiments.tasks.clicks.schema import Schema
from experiments.tasks.clicks.store import Store
from experiments.tasks.clicks.task import DescribedClicks
from samplers import BatchSampler, Population

PyTree = Any
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """Everything a run computes with, made from its configuration and its data alone."""

    config: TrainConfig
    store: Store
    columns: Mapping[str, Any]
    params: PyTree
    logit_fn: Callable[[PyTree, PyTree], jax.Array]
    algorithm: Algorithm
    mechanism: Mechanism
    delta: float

    @classmethod
    def of(cls, config: TrainConfig, store: Store, mechanism: Callable[[int], Mechanism]) -> Job:
        """Returns the job of `config` on `store`.

        Args:
          config: The whole run.
          store: Its data.
          mechanism: Gives the mechanism for the number of training examples.
        """
        columns = store.load("train")
        num_examples = len(columns["label"])
        _refuse_one_class(store)
        sizes = config.model_config()
        params, _, _ = functional(sizes, store.schema, config.init_seed)
        logit_fn, algorithm = click_algorithm(
            sizes, store.schema, microbatch_size=config.microbatch_size
        )
        delta = config.target_delta or 1 / num_examples
        chosen = mechanism(num_examples)
        return cls(config, store, columns, params, logit_fn, algorithm, chosen, delta)

    def start(self) -> TrainState:
        """Returns the state before the first step."""
        return self.scheduled(self.algorithm.init(self.params, self.mechanism))

    def scheduled(self, state: TrainState) -> TrainState:
        """Returns a state, made now or read back, with the step sizes of this job."""
        hyperparams = step_sizes(self.config.learning_rate, self.mechanism.sampler.num_steps)
        return state._replace(opt_state=state.opt_state._replace(hyperparams=hyperparams))

    def terms(self, record: Mapping[str, Any], root: RootKey) -> Terms:
        """Returns what a generation of this job is declared under."""
        return Terms(
            self.mechanism, self.delta, root.insecure, fingerprint(record, self.store, root)
        )


def train(config: TrainConfig, progress: Progress = lambda line: None) -> dict[str, Any]:
    """Trains as `config` says, writes its run directory, and returns what `report.json` holds.

    Everything that can be refused is refused before the run directory is made.

    Args:
      config: The whole run.
      progress: Called with one line of text whenever there is something to tell.

    Raises:
      FileExistsError: if the run directory exists; it is left as it is.
      ValueError: for a configuration that cannot be run or cannot be guaranteed.
      OSError: if the disk is full; `resume` then goes on.
      Stopped: if SIGTERM or SIGINT asked for it; `resume` then goes on.
    """
    config.check()
    RunDirectory.refuse_existing(config.out)
    store = Store.open(config.data)
    progress("checking the data")
    store.verify()
    given = config.target_epsilon is None
    progress("pricing the run" if given else "finding the noise for the epsilon that is wanted")
    job = Job.of(config, store, lambda n: mechanism_for(config, n))
    insecure = config.insecure_seed is not None
    planned = Guarantee.of(job.mechanism, job.delta, reproducible_noise=insecure)
    if planned.epsilon is not None and math.isinf(planned.epsilon.upper):
        raise ValueError(
            f"no finite epsilon is certified for this run ({planned.epsilon.note or 'no reason'}): "
            "raise --noise-multiplier, or --max-batch-size or --overflow accumulate where batches "
            "are cut"
        )
    audit = _audit(job, progress)
    if config.insecure_seed is None:
        root = RootKey.from_entropy()
    else:
        root = RootKey.from_insecure_seed(config.insecure_seed)
    record = describe(config, job.store)
    with RunDirectory.create(config.out) as run:
        run.write_json("config.json", record)
        run.write_json("environment.json", environment())
        run.write_json("guarantee.json", planned.record())
        run.write_json("audit.json", {"audit": audit})
        run.write_json(DATA, {"data": [store.digest]})
        root.save(run.root_path)
        Ledger.create(run.ledger_path, job.terms(record, root)).close()
    with Ledger.open(run.ledger_path) as ledger:
        return _finish(job, run, ledger, root, None, audit, progress)


def resume(
    path: Path, data: Path | None = None, progress: Progress = lambda line: None
) -> dict[str, Any]:
    """Goes on with the run in `path` from its last checkpoint, and returns its report.

    No step is replayed: a batch is a function of seed and step. The ledger decides whether declared
    steps are repeated bit for bit, or taken anew and counted again (`Ledger.resume`).

    Args:
      path: Its run directory.
      data: Where its store lies now; by default where it lay.
      progress: Called with one line of text whenever there is something to tell.

    Raises:
      FileNotFoundError: if there is no run, or its root secret or its data are gone.
      ValueError: if ledger, checkpoints or data are damaged, or another process is at it.
      OSError, Stopped: as for `train`.
    """
    run = RunDirectory.open(path, finished=False)
    if run.finished:
        record = FinishedRun.read(path).record
        run.forget()  # in case the run died just before it did
        progress("the run is finished")
        return record
    with Ledger.open(run.ledger_path) as ledger:
        run.history()  # refuses a ledger that is older than the checkpoints
        root = run.root()
        record = run.read_json("config.json")
        config = config_from(record, out=path, data=data)
        progress("checking the data")
        store = Store.open(config.data)
        store.verify()  # the fingerprint holds for the manifest: now it holds for the rows
        last = ledger.history.generations[-1].terms
        _refuse_other_data(config, store, record, last.mechanism)
        unchanged = config_digest(record) == last.fingerprint["config"]
        job = Job.of(
            config,
            store,
            # What was calibrated once stays: another version might calibrate a little differently.
            lambda n: last.mechanism if unchanged else mechanism_for(config, n),
        )
        checkpoint = run.checkpoints.latest(job.start())
        if checkpoint:
            checkpoint = checkpoint._replace(state=job.scheduled(checkpoint.state))
        step = int(checkpoint.state.step) if checkpoint else 0
        terms = job.terms(record, root)
        if terms.fingerprint != last.fingerprint:
            audit = _audit(job, progress)
            run.write_json("audit.json", {"audit": audit})
        else:
            said = run.read_json("audit.json").get("audit")
            audit = checked(said, str, f"{path / 'audit.json'} is damaged: audit")
        run.note_data(store.digest)
        generation = ledger.resume(
            terms,
            step=step,
            origin=checkpoint.ledger_head if checkpoint else NO_HEAD,
            repeatable=repeats_exactly(),
        )
        run.cut_diagnostics(step)
        if generation.terms.fingerprint != last.fingerprint:
            run.withdraw("guarantee.json")  # planned for one generation: it would be too low now
            run.write_json("environment.json", environment())
            changed = differing([last.fingerprint, generation.terms.fingerprint])
            progress(f"changed since: {', '.join(changed)}")
        return _finish(job, run, ledger, root, checkpoint, audit, progress)


def _audit(job: Job, progress: Progress) -> str:
    if not job.config.audit:
        return "not made: it was switched off"
    clicks = DescribedClicks(job.config.model_config(), job.store.schema, job.store.hash_seed)
    return audit_run(clicks, job.params, job.mechanism, job.config.microbatch_size, progress)


def _refuse_one_class(store: Store) -> None:
    """Raises ValueError if there is no AUC of the validation or of the test rows."""
    for split in ("validation", "test"):
        found = {int(y) for block in store.blocks(split) for y in np.unique(block["label"])}
        if found != {0, 1}:
            raise ValueError(
                f"{store.path}: the {split} rows are not of both classes, so that they have no "
                "AUC; prepare more rows"
            )


def _refuse_other_data(
    config: TrainConfig, store: Store, record: Mapping[str, Any], mechanism: Mechanism
) -> None:
    """Raises ValueError if a run that was begun as `record` says cannot go on with these data."""
    where = f"{config.out / 'config.json'} is damaged"
    schema = build(Schema, record.get("schema"), f"{where}: schema")
    hash_seed = checked(record.get("hash_seed"), int, f"{where}: hash_seed")
    if (why := store.unlike(schema, hash_seed)) is not None:
        raise ValueError(
            f"{store.path} {why}: what {config.out} has learned from other data does not fit it"
        )
    if store.rows("train") != mechanism.sampler.num_examples:
        raise ValueError(
            f"{store.path} has {store.rows('train'):,} training examples, and {config.out} was "
            f"begun on {mechanism.sampler.num_examples:,}: its guarantee is for those"
        )


def _finish(
    job: Job,
    run: RunDirectory,
    ledger: Ledger,
    root: RootKey,
    checkpoint: Checkpoint | None,
    audit: str,
    progress: Progress,
) -> dict[str, Any]:
    """Trains from `checkpoint` to the end, evaluates, and writes model and report."""
    with _full_disk_explained(run):
        last = _train(job, run, ledger, root, checkpoint, progress)
        run.write_params(last.state.params)
        progress("evaluating")
        quality = {
            f"{split}_{name}": value if math.isfinite(value) else None  # undefined: it diverged
            for split in ("validation", "test")
            for name, value in dataclasses.asdict(
                evaluate(job.logit_fn, last.state.params, job.store.blocks(split))
            ).items()
        }
        sampler = job.mechanism.sampler
        record = {
            **proved(ledger.history),
            "ledger_head": ledger.history.head,
            "params_sha256": run.params_digest(),
            "audit": audit,
            **quality,
            "num_params": sum(leaf.size for leaf in jax.tree.leaves(job.params)),
            "training_seconds": last.seconds,
            "examples_per_second": sampler.num_steps * sampler.expected_batch_size / last.seconds,
        }
        run.write_json("guarantee.json", guarantee_of(ledger.history).record())
        run.write_text("report.md", report.markdown(record, run.read_json("config.json")))
        run.write_json("report.json", record)
        run.forget()
    return record


def _train(
    job: Job,
    run: RunDirectory,
    ledger: Ledger,
    root: RootKey,
    checkpoint: Checkpoint | None,
    progress: Progress,
) -> Checkpoint:
    """Takes the steps that are left, with a checkpoint now and then and one at the end."""
    generation: Generation = ledger.history.generations[-1]
    num_steps = job.mechanism.sampler.num_steps
    last = checkpoint or Checkpoint(job.start(), NO_HEAD, 0.0)
    first = int(last.state.step)
    before, started, saved = last.seconds, time.perf_counter(), time.perf_counter()
    progress(f"steps {first:,} to {num_steps:,}")
    with stop_requests() as stop:
        blocks = train_blocks(
            job.algorithm,
            job.mechanism,
            last.state,
            job.columns,
            root=root,
            generation=generation.key,
            data_on=job.config.data_on,
            declare=ledger.declare,
            donate=True,
        )
        done = first
        under_way: deque[Block] = deque()
        for block in blocks:
            under_way.append(block)
            stopping = stop()
            due = time.perf_counter() - saved >= job.config.checkpoint_seconds
            save = due or stopping or block.steps.stop == num_steps
            # One block stays under way while the one before is written down, but for a checkpoint.
            while len(under_way) > (0 if save else 1):
                past = under_way.popleft()
                run.append_diagnostics(past.steps.start, past.diagnostics)
                done = past.steps.stop
            elapsed = time.perf_counter() - started
            if done > first:
                left = elapsed / (done - first) * (num_steps - done)
                progress(f"step {done:,} of {num_steps:,}, {left:.0f} s left")
            if save:
                last = Checkpoint(block.state, ledger.history.head, before + elapsed)
                run.checkpoints.save(last)
                saved = time.perf_counter()
            if stopping and done < num_steps:
                raise Stopped(
                    f"stopped at step {done:,} of {num_steps:,}, all of it saved: "
                    f"`dpsgd resume {run.path}` goes on"
                )
    return last


@contextmanager
def _full_disk_explained(run: RunDirectory) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(
            f"the disk is full; nothing is lost: make room, and `dpsgd resume {run.path}` goes on"
        ) from None


def mechanism_for(config: TrainConfig, num_examples: int) -> Mechanism:
    """Returns the mechanism that `config` asks for on `num_examples` examples.

    Raises:
      ValueError: for a sampler that does not fit the data, or an epsilon out of reach.
    """
    sampler = config.sampler.build(Population(num_examples), config.target_delta)
    if config.non_private:
        return Mechanism(sampler, noise_multiplier=0.0, l2_clip_norm=float("inf"))
    noise = Secure() if config.secure_noise else Independent()
    if config.noise_multiplier is not None:
        sigma = config.noise_multiplier
        return Mechanism(sampler, sigma, config.l2_clip_norm, noise)
    assert config.target_epsilon is not None, "TrainConfig admits exactly one of the three"
    delta = config.target_delta or 1 / num_examples
    sigma = _calibrated(sampler, config.target_epsilon, delta)
    return Mechanism(sampler, sigma, config.l2_clip_norm, noise)


@functools.lru_cache
def _calibrated(sampler: BatchSampler, epsilon: float, delta: float) -> float:
    """Returns the smallest sufficient noise: once for all repetitions of a run in one process."""
    return calibrate(sampler.privacy, epsilon=epsilon, delta=delta)
