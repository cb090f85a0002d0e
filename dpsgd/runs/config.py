"""What a run was asked for, as its directory keeps it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_PLACES = ("data", "out")
"""Where things lie does not change what they are."""


def config_digest(record: Mapping[str, Any]) -> str:
    """Returns a digest of what `config.json` holds, wherever data and run lie."""
    asked = {name: value for name, value in record.items() if name not in _PLACES}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
