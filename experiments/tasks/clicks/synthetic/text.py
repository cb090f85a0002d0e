"""Write drawn rows as lines of text: fields at their full width, and zero bytes taken out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from experiments.tasks.clicks.encoding import hash_text, words_of
from experiments.tasks.clicks.raw.format import RawFormat
from experiments.tasks.clicks.synthetic.planted import Chunk, Population


@dataclass(frozen=True, eq=False)
class Log:
    """A raw log that can be generated: what its rows are like, and how they are written."""

    population: Population
    format: RawFormat
    value: Callable[[np.ndarray, int], np.ndarray]
    """(ranks, feature) -> what the reader decodes from the field of that rank; uint64."""
    fields: Callable[[Chunk], list[np.ndarray]]
    """The characters of each column of the file, uint8 [n, width]; 0 where there is none."""


TEXT_ROWS = 1 << 13
"""Rows whose text, at full width, about fits in a cache."""


def text(log: Log, chunk: Chunk) -> bytes:
    """Return the rows as lines of `log`."""
    return b"".join(
        _lines(log.fields(chunk.rows(slice(begin, begin + TEXT_ROWS))))
        for begin in range(0, len(chunk.label), TEXT_ROWS)
    )


def _lines(fields: list[np.ndarray]) -> bytes:
    width = sum(field.shape[1] + 1 for field in fields)
    characters = np.empty((len(fields[0]), width), dtype=np.uint8)
    at = 0
    for field in fields:
        end = at + field.shape[1]
        characters[:, at:end] = field
        characters[:, end] = ord("\t")
        at = end + 1
    characters[:, -1] = ord("\n")
    flat = characters.ravel()
    return flat[flat != 0].tobytes()


def token(rank: np.ndarray, feature: int) -> np.ndarray:
    """Return the uint32 that stands for each rank; distinct ranks get distinct ones.

    Multiplying by an odd number and xoring with a shifted self are bijections modulo 2^32.
    """
    x = rank.astype(np.uint32) + np.uint32((feature + 1) * 0x9E3779B9 & 0xFFFFFFFF)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def decimal(values: np.ndarray, digits: int) -> np.ndarray:
    """Return non-negative integers below 10^digits, without leading zeros, uint8 [n, digits]."""
    characters = np.empty((len(values), digits), dtype=np.uint8)
    for i in range(digits):
        power = 10 ** (digits - 1 - i)
        shown = (values >= power) | (power == 1)
        characters[:, i] = shown * (values // power % 10 + ord("0"))
    return characters


_PAIRS = {
    case: np.array([list(f"{i:02{case}}".encode()) for i in range(256)], dtype=np.uint8)
    for case in "xX"
}


def hexadecimal(words: np.ndarray, case: str) -> np.ndarray:
    """Return uint32 `words` in eight digits, uint8 [n, 8]; `case` is "x" or "X"."""
    octets = words.astype(">u4").view(np.uint8).reshape(-1, 4)
    return _PAIRS[case][octets].reshape(-1, 8)


def where(condition: np.ndarray, one: np.ndarray, other: bytes) -> np.ndarray:
    """Return the characters of `one` where `condition` holds, else `other`."""
    width = max(one.shape[1], len(other))
    padded = np.frombuffer(other.ljust(width, b"\0"), np.uint8)
    return np.where(condition[:, None], np.pad(one, ((0, 0), (0, width - one.shape[1]))), padded)


def text_hash(characters: np.ndarray) -> np.ndarray:
    """Return what the reader makes of text: the hash of each row of uint8 [n, width]."""
    rows, width = characters.shape
    padded = np.zeros(rows * width + 8, dtype=np.uint8)
    padded[: rows * width] = characters.ravel()
    lengths = np.count_nonzero(characters, axis=1)
    return hash_text(words_of(padded.tobytes()), np.arange(rows) * width, lengths)
