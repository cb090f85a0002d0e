"""Bytes and hashes of texts."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from experiments.tasks.splits import GOLDEN, mix


def extents(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Returns offsets and lengths of texts, in bytes."""
    offsets = np.frombuffer(texts.buffers()[1] or b"\0\0\0\0", np.int32)
    offsets = offsets[texts.offset : texts.offset + len(texts) + 1]
    return offsets[:-1], np.diff(offsets)


def characters(texts: pa.Array) -> bytes:
    """Returns the concatenation of all texts."""
    starts, lengths = extents(texts)
    data = texts.buffers()[2]
    if data is None or not len(texts):
        return b""
    return data[int(starts[0]) : int(starts[-1] + lengths[-1])].to_pybytes()


def hashed(texts: pa.Array) -> np.ndarray:
    """Hashes texts to uint64[rows].

    Two texts collide with a probability of about 2^-64.

    Args:
        texts: Texts, Arrow strings or bytes: [rows].

    >>> hashed(pa.array(["Oslo", None])).tolist()
    [15021966542870490694, 0]
    """
    starts, lengths = extents(texts)
    padded = characters(texts) + b"\0" * 8
    words = np.ndarray(len(padded) - 7, dtype="<u8", buffer=padded, strides=(1,))
    return _hash(words, starts - starts[:1], lengths)


def _hash(words: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns a 64-bit hash of the `lengths` characters from each of `starts`.

    ``h = mix(h XOR word)`` over the words of eight characters, the last zero-padded, from ``h =
    length * golden ratio``. Every step is a bijection of h and of the word, so two texts of one
    length that differ in one word never collide, and others hardly ever.

    Args:
        words: The eight characters from each offset of the texts: uint64[offsets].
        starts: Offset of each text.
        lengths: Characters of each text.
    """
    hashes = lengths.astype(np.uint64) * np.uint64(GOLDEN)
    active, offset = np.flatnonzero(lengths > 0), 0
    while len(active):
        remaining, word = lengths[active] - offset, words[starts[active] + offset]
        if remaining.min() < 8:
            surplus = (64 - 8 * np.minimum(remaining, 8)).astype(np.uint64)
            word = word << surplus >> surplus  # NumPy shifts by 64 to zero
        hashes[active] = mix(hashes[active] ^ word)
        offset += 8
        active = active[remaining > 8]
    return hashes
