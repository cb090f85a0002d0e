"""Keeps a run's sampling seeds in memory; stores one at a clean stop."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from dpsgd.files import (
    DAMAGED,
    SECRET,
    destroy,
    fsync_folder,
    open_own,
    parse_json,
    reserve,
    unfinished_path,
    write_atomically,
)
from dpsgd.noise.keys import Keys, Seeds
from dpsgd.runs.decision import Continue, Decision, Stop
from dpsgd.runs.records import checked
from samplers import BatchSampler, BatchSource
from samplers.randomness import check_seed
from samplers.settings import name_of

STOP = "secret.json"
"""File of a clean stop, with its sampling seed."""

_RESERVED = ".secret.reserved"
_PUBLIC_SEED = 0
_MOST_BYTES = 1024
_STEPS = 64  # most steps of an epoch whose batches `drawing_digest` covers


class EpochSeeds:
    """Function that returns an independent sampling seed for each drawn epoch.

    >>> seeds = EpochSeeds(7, {1: 5})
    >>> seeds(1), seeds(0) == seeds(2), seeds
    (5, False, EpochSeeds(<secret>))
    """

    def __init__(self, secret: int, known: dict[int, int]) -> None:
        """Derives the seeds from a 256-bit secret, except for the epochs in `known`."""
        self._secret, self._known = secret.to_bytes(32, "little"), dict(known)

    def __call__(self, epoch: int) -> int:
        if epoch in self._known:
            return self._known[epoch]
        hash_options: Any = {"key": self._secret, "digest_size": 32, "person": b"dpsgd epoch"}
        return int.from_bytes(hashlib.blake2b(epoch.to_bytes(8, "little"), **hash_options).digest())

    def __repr__(self) -> str:
        return "EpochSeeds(<secret>)"


def keys_of(decision: Decision, sampler: BatchSampler, insecure_seed: int | None) -> Keys:
    """Returns the keys with which a run begins or resumes.

    Args:
      decision: Decision how the run resumes; a clean stop brings its sampling seed.
      sampler: Sampler of the run.
      insecure_seed: Seed of all keys, for debugging; None for fresh keys.
    """
    keys = Keys.of(insecure_seed)
    if insecure_seed is not None:
        return keys
    stop = decision.stop if isinstance(decision, Continue) else None
    # Processes that did not read the file come here, too: all must have the same seeds.
    if stop is not None and stop.seed is not None and stop.epoch is None:
        return Keys(keys.root, seeds=stop.seed)
    if not _by_epoch(sampler):
        return keys
    known_seeds = {stop.epoch: stop.seed} if stop and stop.seed is not None else {}
    return Keys(keys.root, seeds=EpochSeeds(keys.root.sampling_seed(), known_seeds))  # type: ignore[arg-type]


def _by_epoch(sampler: BatchSampler) -> bool:
    return ":" not in name_of(type(sampler))  # users' samplers may draw all epochs by one seed


def _no_seeds(epoch: int) -> int:
    return 0


def stop_at(step: int, attempt: str, sampler: BatchSampler, seeds: Seeds) -> Stop:
    """Returns the clean stop at `step`.

    Args:
      step: Number of steps done.
      attempt: Hash of the ledger's line that begins the attempt.
      sampler: Sampler of the run.
      seeds: Sampling seeds of this process; the next one gets the seed that it needs, if any.
    """
    if step >= sampler.num_steps:
        return Stop(attempt, step)
    if not callable(seeds):
        return Stop(attempt, step, None, seeds)
    following = sampler.drawn_epoch(step // sampler.steps_per_epoch)
    epoch_began = (
        step > 0 and sampler.drawn_epoch((step - 1) // sampler.steps_per_epoch) == following
    )
    if not epoch_began or sampler.as_entered([range(1)]) == [[range(1)]]:  # steps are independent
        return Stop(attempt, step)
    return Stop(attempt, step, following, seeds(following))


def constant_seed(sampler: BatchSampler, seeds: Seeds, step: int) -> int:
    """Returns the sampling seed of one epoch.

    Args:
      sampler: Sampler of the run.
      seeds: Sampling seeds of the attempt.
      step: Step whose epoch is meant.
    """
    if not callable(seeds):
        return seeds
    return seeds(sampler.drawn_epoch(min(step, sampler.num_steps - 1) // sampler.steps_per_epoch))


def reserve_stop(folder: Path) -> None:
    """Reserves disk space for a clean stop."""
    if not (folder / _RESERVED).exists():
        reserve(folder / _RESERVED, _MOST_BYTES)


def write_stop(folder: Path, stop: Stop) -> None:
    """Writes a clean stop, which only its owner can read.

    Args:
      folder: Run directory.
      stop: Clean stop with its seed.
    """
    record = {**stop._asdict(), "seed": None if stop.seed is None else f"{stop.seed:x}"}
    record["sha256"] = _digest(record)
    content = json.dumps(record).encode() + b"\n"
    options: Any = {"mode": SECRET, "reserved": folder / _RESERVED}
    write_atomically(folder / STOP, lambda file: file.write(content), **options)


def read_stop(folder: Path, sampler: BatchSampler) -> Stop | None:
    """Reads a clean stop; None if missing or damaged.

    Args:
      folder: Run directory.
      sampler: Sampler of the run; a stop without the seed that it needs counts as damaged.

    Raises:
      ValueError: If the file is a link or has other names, under which the seed would remain.
    """
    try:
        descriptor = open_own(folder / STOP, os.O_RDONLY, SECRET)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(_MOST_BYTES)
    try:
        record = checked(parse_json(content), dict[str, Any], STOP)
        if record.pop("sha256") != _digest(record):
            return None
        kinds = {"attempt": str, "step": int, "epoch": int | None, "seed": str | None}
        attempt, step, epoch, seed = (checked(record[name], kinds[name], STOP) for name in kinds)
        stop = Stop(attempt, step, epoch, None if seed is None else check_seed(int(seed, 16)))
    except DAMAGED:
        return None
    needed = stop_at(step, attempt, sampler, _no_seeds if _by_epoch(sampler) else 0)
    seeded = stop.seed is not None or (needed.seed is None and epoch is None)
    return stop if seeded and epoch in (None, needed.epoch) else None


def stop_files(folder: Path) -> tuple[Path, Path, Path]:
    """Returns the three paths that a clean stop may use."""
    return folder / _RESERVED, folder / STOP, unfinished_path(folder / STOP)


def destroy_stop(folder: Path) -> None:
    """Destroys the files of a clean stop.

    These include the temporary file of a process that died while it wrote the stop.
    """
    reserved, *seeds = stop_files(folder)
    reserved.unlink(missing_ok=True)
    if remaining := [path for path in seeds if os.path.lexists(path)]:
        for path in remaining:
            destroy(path)
        fsync_folder(folder)


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def drawing_digest(sampler: BatchSampler) -> str:
    """Returns a digest of batches drawn under a public seed.

    It covers at most 64 steps in each of the first two epochs, and the first data shard only. It
    reveals nothing about the draws of a run; a change shows that the sampler's code has changed.
    """
    digest = hashlib.sha256()
    source = BatchSource(sampler, _PUBLIC_SEED, shards=range(1))
    length = sampler.steps_per_epoch
    for epoch in range(min(2, -(-sampler.num_steps // length))):
        first, stop = epoch * length, min((epoch + 1) * length, sampler.num_steps)
        for step in np.unique(np.linspace(first, stop - 1, _STEPS).astype(np.int64)).tolist():
            for parts in source.passes_by_shard(step):
                for examples in parts:
                    digest.update(len(examples).to_bytes(8, "little"))
                    digest.update(np.asarray(examples, np.int64).tobytes())
    return digest.hexdigest()
