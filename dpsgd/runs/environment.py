"""Describes the versions, devices and code of a run for its records."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

import accounting
import samplers

PACKAGES = ["dpsgd", "jax", "jaxlib", "flax", "optax", "numpy", "scipy", "dp-accounting"]


def environment() -> dict[str, Any]:
    """Returns package versions, platform and devices of this process.

    Packages that are not installed, such as `dpsgd` in a bare checkout, are left out.
    """
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "packages": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in jax.devices()],
    }


def origin(what: str = "Finished") -> str:
    """Returns a sentence: `what`, UTC time and this process's command."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return f"{what} on {datetime.now(UTC):%Y-%m-%d at %H:%M} UTC by:\n\n    {command}"


@functools.cache
def code_digest() -> str:
    """Returns a digest of the library's source files."""
    digest = hashlib.sha256()
    package = str(Path(__file__).parents[1])
    for folder in map(Path, [*accounting.__path__, *samplers.__path__, package]):
        for file in sorted(folder.rglob("*.py")):
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(
                f"{folder.name}/{file.relative_to(folder).as_posix()} {content}\n".encode()
            )
    return digest.hexdigest()
