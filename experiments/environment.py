"""Where a run happened: versions and hardware, for the record."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any

import jax

PACKAGES = ["dpsgd", "jax", "jaxlib", "flax", "optax", "numpy", "scipy", "dp-accounting"]


def environment() -> dict[str, Any]:
    """Returns package versions, platform and devices of this process."""
    devices = jax.devices()
    return {
        "packages": {name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "backend": jax.default_backend(),
        "devices": [device.device_kind for device in devices],
    }
