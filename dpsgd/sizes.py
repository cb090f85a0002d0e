"""Memory sizes in words, such as 8GB."""

import re

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{letter}i": 1024**power for power, letter in enumerate("KMGT", 1)}


def bytes_of(size: str, name: str) -> int:
    """Returns the number of bytes in a size such as "8GB".

    Args:
      size: Number with a unit.
      name: Name of the setting, for the error message.

    >>> bytes_of("8GB", "memory"), bytes_of("0.5 MiB", "memory")
    (8000000000, 524288)

    Raises:
      ValueError: If `size` has another form.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(|[KMGT]i?)B?", size.strip())
    if match is None:
        raise ValueError(f"{name} must be a size such as 8GB or 512MiB, got {size}")
    return int(float(match[1]) * _UNITS[match[2]])
