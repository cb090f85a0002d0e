"""What the numbers of a training step depend on: if any of it changes, noise is not used again."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import accounting
import dpsgd
import experiments
import samplers
from dpsgd import RootKey
from dpsgd.runs.config import config_digest
from dpsgd.runs.environment import environment
from experiments.tasks.clicks.store import Store

_JAX_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_disable_jit",
    # What a loss draws from its key, or from one that it makes.
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
    "jax_random_seed_offset",
    # How programs are compiled, beside XLA_FLAGS.
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_exec_time_optimization_effort",
)


def fingerprint(config: Mapping[str, Any], store: Store, root: RootKey) -> dict[str, Any]:
    """Returns what must be unchanged for a step to be repeated bit for bit, as JSON values.

    It tells nothing about the data to whoever has not the root secret: their digest is blinded.

    Args:
      config: The run's configuration, as JSON values.
      store: The data.
      root: The run's secret.
    """
    return {
        "config": config_digest(config),
        "data": root.blind(store.digest),
        "code": code_digest(),
        **environment(),
        "processor": _processor(),
        "cpus_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        **jax_options(),
    }


def jax_options() -> dict[str, Any]:
    """Returns the options of JAX on which numbers depend, as they are now."""
    return {name: jax.config.values.get(name) for name in _JAX_OPTIONS}


def differing(fingerprints: Sequence[Mapping[str, Any]], but: Collection[str] = ()) -> list[str]:
    """Returns the names of what is not alike in all of these fingerprints, but for some.

    Between runs, whose digests of the data are blinded each by its own secret, "data" says nothing.
    """
    names = dict.fromkeys(name for one in fingerprints for name in one if name not in but)
    return [n for n in names if any(one.get(n) != fingerprints[0].get(n) for one in fingerprints)]


@functools.cache
def code_digest() -> str:
    """Returns a digest of this project's source files, as they are when first asked."""
    digest = hashlib.sha256()
    for package in (accounting, samplers, dpsgd, experiments):
        for folder in package.__path__:
            for file in sorted(Path(folder).rglob("*.py")):
                name = f"{package.__name__}/{file.relative_to(folder).as_posix()}"
                digest.update(f"{name} {_digest(file.read_bytes())}\n".encode())
    return digest.hexdigest()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _processor() -> str:
    """Returns a digest of the processor's name and features, for which programs are compiled."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    kinds = ("model name", "flags", "Features", "CPU part")
    return _digest("\n".join(sorted({x for x in lines if x.startswith(kinds)})).encode())
