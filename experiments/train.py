"""One training run: from a store of examples to a run directory with model and guarantee."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax

from accounting import calibrate
from dpsgd import Guarantee, Mechanism, RootKey, dpsgd, train_blocks
from experiments import report
from experiments.config import TrainConfig
from experiments.criteo.model import ModelConfig, functional
from experiments.criteo.store import Store
from experiments.environment import environment
from experiments.evaluate import evaluate
from experiments.run_directory import RunDirectory

Progress = Callable[[str], None]


def train(config: TrainConfig, progress: Progress = lambda line: None) -> dict[str, Any]:
    """Trains as `config` says, writes its run directory, and returns what `report.json` holds.

    Everything that can be refused is refused before the run directory is made.

    Args:
      config: The whole run.
      progress: Called with one line of text whenever there is something to tell.

    Raises:
      FileExistsError: if the run directory exists; it is left as it is.
      ValueError: for a configuration that cannot be run or cannot be guaranteed.
    """
    config.check()
    if config.out.exists():
        RunDirectory.create(config.out)  # refuses, before any work is done
    store = Store.open(config.data)
    columns = store.load("train")
    num_examples = len(columns["label"])
    sizes = config.model_config()
    mechanism = mechanism_for(config, num_examples)
    progress("pricing the run")
    guarantee = Guarantee.of(
        mechanism,
        config.target_delta or 1 / num_examples,
        reproducible_noise=config.insecure_seed is not None,
    )
    params, logit_fn, loss_fn = functional(sizes, store.schema, config.init_seed)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    num_steps = mechanism.sampler.num_steps
    algorithm = dpsgd(
        loss_fn,
        optax.adam(optax.cosine_decay_schedule(config.learning_rate, num_steps)),
        mechanism,
        microbatch_size=config.microbatch_size,
    )

    run = RunDirectory.create(config.out)
    run.write_json("config.json", describe(config, sizes, store))
    run.write_json("environment.json", environment())
    run.write_json("guarantee.json", guarantee.record())

    progress(f"{num_params:,} parameters, {num_steps:,} steps")
    if config.insecure_seed is None:
        root = RootKey.from_entropy()
    else:
        root = RootKey.from_insecure_seed(config.insecure_seed)
    started = time.perf_counter()
    state = algorithm.init(params)
    for block in train_blocks(algorithm, state, columns, root=root):
        state = block.state
        run.append_diagnostics(block.first_step, block.diagnostics)
        done = block.first_step + len(block.diagnostics.batch_size)
        elapsed = time.perf_counter() - started
        left = elapsed / done * (num_steps - done)
        progress(f"step {done:,} of {num_steps:,}, {left:.0f} s left")
    seconds = time.perf_counter() - started
    run.write_params(state.params)

    progress("evaluating")
    quality = {
        f"{split}_{name}": value
        for split in ("validation", "test")
        for name, value in dataclasses.asdict(
            evaluate(logit_fn, state.params, store.blocks(split))
        ).items()
    }
    record = {
        "sampler": config.sampler.name,
        **guarantee.record(),
        **quality,
        "num_examples": num_examples,
        "num_params": num_params,
        "num_steps": num_steps,
        "training_seconds": seconds,
        "examples_per_second": num_steps * mechanism.sampler.expected_batch_size / seconds,
    }
    run.write_text("report.md", report.markdown(record, run.read_json("config.json")))
    run.write_json("report.json", record)
    return record


def mechanism_for(config: TrainConfig, num_examples: int) -> Mechanism:
    """Returns the mechanism that `config` asks for on `num_examples` examples.

    Raises:
      ValueError: for a sampler that does not fit the data, or an epsilon out of reach.
    """
    sampler = config.sampler.build(num_examples, config.target_delta)
    if config.non_private:
        return Mechanism(sampler, noise_multiplier=0.0, l2_clip_norm=float("inf"))
    if config.noise_multiplier is not None:
        return Mechanism(sampler, config.noise_multiplier, config.l2_clip_norm)
    assert config.target_epsilon is not None, "TrainConfig admits exactly one of the three"
    delta = config.target_delta or 1 / num_examples
    sigma = calibrate(sampler.privacy, epsilon=config.target_epsilon, delta=delta)
    return Mechanism(sampler, sigma, config.l2_clip_norm)


def describe(config: TrainConfig, sizes: ModelConfig, store: Store) -> dict[str, Any]:
    """Returns the whole configuration of a run as JSON values, the data it read included."""
    return {
        **_plain(config),
        "sampler": {"name": config.sampler.name, **_plain(config.sampler)},
        "model_sizes": _plain(sizes),
        "schema": _plain(store.schema),
        "hash_seed": store.hash_seed,
        "data_digest": store.digest,
    }


def _plain(value: Any) -> Any:
    """Returns dataclasses, paths and tuples as JSON's own types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
