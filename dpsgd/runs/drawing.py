"""Digests of batches, noise matrices and own code, to notice that a mechanism has changed."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dpsgd.core.mechanism import Mechanism
from dpsgd.core.noise import Independent
from dpsgd.noise.registry import NOISES
from samplers import BatchSource
from samplers.settings import SAMPLERS

_PUBLIC_SEED = 0
_STEPS = 64  # most steps of an epoch, and columns of noise, in a digest
_MOST_ROWS = 2048  # most rows of the noise matrix in a digest
_PACKAGES = {"dpsgd", "samplers", "accounting", "abc", "typing", "builtins"}


def own_parts(mechanism: Mechanism) -> dict[str, Any]:
    """Returns sampler and noise, by kind and name, if they are from outside the package."""
    parts = (SAMPLERS, mechanism.sampler), (NOISES, mechanism.noise)
    return {
        f"{registry.noun} {registry.name_of(type(part))}": part
        for registry, part in parts
        if registry.is_own(part)
    }


def drawing_digest(mechanism: Mechanism) -> str:
    """Returns a digest of batches drawn under a public seed, and of the noise matrix.

    It covers at most 64 steps in each of the first two epochs, the first data shard only, and at
    most 64 columns of the first 2,048 rows of a correlated noise's matrix. Of samplers and noises
    from outside the package it also covers the source files. It reveals nothing about the draws of
    a run.
    """
    digest, sampler, noise = hashlib.sha256(), mechanism.sampler, mechanism.noise
    source = BatchSource(sampler, _PUBLIC_SEED, shards=range(1))
    length = sampler.steps_per_epoch
    for epoch in range(min(2, -(-sampler.num_steps // length))):
        for step in _spread(range(epoch * length, min((epoch + 1) * length, sampler.num_steps))):
            for parts in source.passes_by_shard(step):
                for examples in parts:
                    digest.update(len(examples).to_bytes(8, "little"))
                    digest.update(np.asarray(examples, np.int64).tobytes())
    if noise != Independent():
        size = min(sampler.num_steps, max(_STEPS, 2 * noise.bands), _MOST_ROWS)
        columns = np.arange(size)[:, None] == _spread(range(size))
        matrix = noise.whiten(columns.astype(np.float64))
        digest.update((np.round(matrix, 6) + 0.0).tobytes())  # processors differ in last digits
    for value in own_parts(mechanism).values():
        for path in _source_files(type(value)):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _spread(steps: range) -> list[int]:
    chosen = np.unique(np.linspace(steps.start, steps.stop - 1, _STEPS).astype(np.int64))
    return [int(step) for step in chosen]


def _source_files(kind: type) -> list[Path]:
    """Returns the source files of a class and its bases outside the package, if they have any."""
    modules = dict.fromkeys(base.__module__ for base in kind.__mro__)
    users = [name for name in modules if name.partition(".")[0] not in _PACKAGES]
    files = [getattr(sys.modules.get(name), "__file__", None) for name in users]
    return [Path(file) for file in files if file and Path(file).is_file()]
