"""Optimizers as a command line names them."""

from __future__ import annotations


def momentum_of(optimizer: str) -> float | None:
    """Returns the momentum of an optimizer of SGD's kind, and None for Adam.

    >>> momentum_of("momentum:0.9"), momentum_of("sgd"), momentum_of("adam")
    (0.9, 0.0, None)

    Raises:
      ValueError: if it is none of these.
    """
    if optimizer in ("sgd", "adam"):
        return 0.0 if optimizer == "sgd" else None
    name, _, number = optimizer.partition(":")
    try:
        beta = float(number) if name == "momentum" else -1.0
    except ValueError:
        beta = -1.0
    if not 0.0 <= beta < 1.0:
        raise ValueError(
            f"--optimizer must be sgd, adam, or momentum:BETA with BETA in [0, 1), got {optimizer}"
        )
    return beta
