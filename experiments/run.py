"""One training run, from a store of examples to a run directory with model, guarantee and report."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from accounting import calibrate
from dpsgd import Diagnostics, Mechanism, RootKey, dpsgd, train_blocks
from dpsgd.guarantee import Guarantee
from dpsgd.metrics import BinaryMetrics, binary_metrics
from experiments import report
from experiments.config import SAMPLER_NAMES, TrainConfig
from experiments.criteo.model import PRESETS, ModelConfig, functional, predict
from experiments.criteo.store import Store
from experiments.environment import environment

PyTree = Any
Progress = Callable[[str], None]


def model_config(config: TrainConfig) -> ModelConfig:
    """Returns the preset named by `config` with the user's overrides."""
    overrides = {
        "embedding_dim": config.embedding_dim,
        "max_buckets": config.max_buckets,
        "hidden": config.hidden,
    }
    given = {name: value for name, value in overrides.items() if value is not None}
    return dataclasses.replace(PRESETS[config.model], **given)


def mechanism_for(config: TrainConfig, num_examples: int) -> Mechanism:
    """Returns the mechanism that `config` asks for on `num_examples` examples."""
    sampler = config.sampler.build(num_examples, config.target_delta)
    if config.non_private:
        return Mechanism(sampler, noise_multiplier=0.0, l2_clip_norm=float("inf"))
    sigma = config.noise_multiplier
    if config.target_epsilon is not None:
        delta = config.target_delta or 1 / num_examples
        sigma = calibrate(sampler.privacy, epsilon=config.target_epsilon, delta=delta)
    assert sigma is not None
    return Mechanism(sampler, sigma, config.l2_clip_norm)


def train(config: TrainConfig, progress: Progress = lambda line: None) -> dict[str, Any]:
    """Trains as `config` says, writes its run directory, and returns what `report.json` holds.

    Args:
      config: The whole run.
      progress: Called with one line of text whenever there is something to tell.

    Raises:
      FileExistsError: if the run directory exists; it is left as it is.
      ValueError: for a configuration that cannot be run or cannot be guaranteed.
    """
    if config.out.exists():
        raise FileExistsError(f"{config.out} exists already: name another --out, or remove it")
    store = Store.open(config.data)
    columns = store.load("train")
    num_examples = len(columns["label"])
    mechanism = mechanism_for(config, num_examples)
    delta = config.target_delta or 1 / num_examples
    guarantee = Guarantee.of(mechanism, delta, reproducible_noise=config.insecure_seed is not None)
    progress(guarantee.sentence())

    config.out.mkdir(parents=True)
    sizes = model_config(config)
    write_json(config.out / "config.json", _plain(config) | {"model_sizes": _plain(sizes)})
    write_json(config.out / "environment.json", environment())
    write_json(config.out / "guarantee.json", guarantee.record())

    params, logit_fn, loss_fn = functional(sizes, store.schema, config.init_seed)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    schedule = optax.cosine_decay_schedule(config.learning_rate, mechanism.sampler.num_steps)
    algorithm = dpsgd(
        loss_fn, optax.adam(schedule), mechanism, microbatch_size=config.microbatch_size
    )
    root = (
        RootKey.from_entropy()
        if config.insecure_seed is None
        else RootKey.from_insecure_seed(config.insecure_seed)
    )
    progress(f"{num_params:,} parameters, {mechanism.sampler.num_steps:,} steps")
    started = time.perf_counter()
    state = algorithm.init(params)
    with open(config.out / "diagnostics_not_private.jsonl", "w") as log:
        for block in train_blocks(algorithm, state, columns, root=root):
            state = block.state
            append_diagnostics(log, block.first_step, block.diagnostics)
            done = block.first_step + len(block.diagnostics.loss_sum)
            progress(f"step {done:,} of {mechanism.sampler.num_steps:,}")
    seconds = time.perf_counter() - started
    save_params(config.out / "params.npz", state.params)

    metrics = {
        split: evaluate(logit_fn, state.params, store.load(split))
        for split in ("validation", "test")
    }
    processed = mechanism.sampler.num_steps * mechanism.sampler.expected_batch_size
    record = {
        "sampler": SAMPLER_NAMES[type(config.sampler)],
        **guarantee.record(),
        "notes": [],
        **{
            f"{split}_{name}": value
            for split, quality in metrics.items()
            for name, value in _plain(quality).items()
        },
        "num_examples": num_examples,
        "num_params": num_params,
        "num_steps": mechanism.sampler.num_steps,
        "training_seconds": seconds,
        "examples_per_second": processed / seconds,
    }
    write_json(config.out / "report.json", record)
    (config.out / "report.md").write_text(report.markdown(record, _plain(config)))
    return record


def evaluate(
    logit_fn: Callable[[PyTree, PyTree], jax.Array], params: PyTree, columns: dict[str, np.ndarray]
) -> BinaryMetrics:
    """Returns the metrics of the model on the labelled rows of `columns`."""
    return binary_metrics(predict(logit_fn, params, columns), columns["label"])


def append_diagnostics(log, first_step: int, diagnostics: Diagnostics) -> None:
    """Writes one JSON line a step; these numbers are not covered by the guarantee."""
    for j in range(len(diagnostics.loss_sum)):
        values = {name: float(x[j]) for name, x in diagnostics._asdict().items()}
        log.write(json.dumps({"step": first_step + j, **values}) + "\n")


def save_params(path: Path, params: PyTree) -> None:
    """Writes every parameter leaf under its path in the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    np.savez(path, **{jax.tree_util.keystr(at): np.asarray(leaf) for at, leaf in leaves})


def load_params(path: Path, like: PyTree) -> PyTree:
    """Returns the parameters saved at `path`, in the structure of `like`."""
    with np.load(path) as saved:
        return jax.tree_util.tree_map_with_path(
            lambda at, leaf: jnp.asarray(saved[jax.tree_util.keystr(at)], leaf.dtype), like
        )


def write_json(path: Path, content: Any) -> None:
    """Writes `content` as indented JSON with a final newline, durably."""
    with open(path, "w") as file:
        json.dump(content, file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _plain(value: Any) -> Any:
    """Returns dataclasses, paths and tuples as JSON's own types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
