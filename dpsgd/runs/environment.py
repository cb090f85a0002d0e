"""Where a run happened: versions and hardware, for the record."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

PACKAGES = ["dpsgd", "jax", "jaxlib", "flax", "optax", "numpy", "scipy", "dp-accounting"]


def environment() -> dict[str, Any]:
    """Returns package versions, platform and devices of this process.

    What is not installed, as this project itself in a bare checkout, is left out.
    """
    devices = jax.devices()
    return {
        "packages": _versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in devices],
    }


def origin(what: str = "Finished") -> str:
    """Returns today's date and the command of this process, in a sentence that begins by `what`."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return f"{what} on {datetime.now(UTC):%Y-%m-%d at %H:%M} UTC by:\n\n    {command}"


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
