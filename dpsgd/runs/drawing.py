"""Digests of batches, noise matrices and own code, to notice that a mechanism has changed."""

from __future__ import annotations

import hashlib

import numpy as np

from dpsgd.core.mechanism import Mechanism
from dpsgd.core.noise import Independent
from dpsgd.noise.registry import NOISES
from samplers import BatchSource
from samplers.registry import code_digest
from samplers.settings import SAMPLERS

_PUBLIC_SEED = 0
_STEPS = 64  # most steps of an epoch, and columns of noise, in a digest
_MOST_ROWS = 2048  # most rows of the noise matrix in a digest


def own_code(mechanism: Mechanism) -> dict[str, str]:
    """Returns the `code_digest` of sampler and noise, by kind and name, if from another package."""
    registered = (SAMPLERS, mechanism.sampler), (NOISES, mechanism.noise)
    return {
        f"{registry.noun} {registry.name_of(type(component))}": code_digest(type(component))
        for registry, component in registered
        if registry.is_own(component)
    }


def drawing_digest(mechanism: Mechanism) -> str:
    """Returns a digest of batches drawn under a public seed, and of the noise matrix.

    It covers at most 64 steps in each of the first two epochs, the first data shard only, and at
    most 64 columns of the first 2,048 rows of a correlated noise's matrix. It reveals nothing about
    the draws of a run.
    """
    digest, sampler, noise = hashlib.sha256(), mechanism.sampler, mechanism.noise
    source = BatchSource(sampler, _PUBLIC_SEED, shards=range(1))
    length = sampler.steps_per_epoch
    for epoch in range(min(2, -(-sampler.num_steps // length))):
        for step in _spread(range(epoch * length, min((epoch + 1) * length, sampler.num_steps))):
            for passes in source.passes_by_shard(step):
                for examples in passes:
                    digest.update(len(examples).to_bytes(8, "little"))
                    digest.update(np.asarray(examples, np.int64).tobytes())
    if noise != Independent():
        size = min(sampler.num_steps, max(_STEPS, 2 * noise.bands), _MOST_ROWS)
        columns = np.arange(size)[:, None] == _spread(range(size))
        matrix = noise.whiten(columns.astype(np.float64))
        digest.update((np.round(matrix, 6) + 0.0).tobytes())  # processors differ in last digits
    return digest.hexdigest()


def _spread(steps: range) -> list[int]:
    chosen = np.unique(np.linspace(steps.start, steps.stop - 1, _STEPS).astype(np.int64))
    return [int(step) for step in chosen]
