"""Texts, wherever they lie in a buffer, as hashes of 64 bits: the same of a file and of a table."""

from __future__ import annotations

import numpy as np

from experiments.tasks.splitmix import GOLDEN, mix


def words_of(text: bytes) -> np.ndarray:
    """Return the eight bytes from each place of `text` on (but the last seven) as one integer."""
    return np.ndarray(len(text) - 7, dtype="<u8", buffer=text, strides=(1,))


def first_characters(words: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the first `lengths` (at most 8 count) characters of each word, zeros after them."""
    after = (64 - 8 * np.minimum(lengths, 8)).astype(np.uint64)
    return words << after >> after  # NumPy shifts by 64 to zero


def hash_text(words: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return a 64-bit hash of the `lengths` characters from each of `starts`.

    ``h = mix(h XOR word)`` over the words of eight characters, the last filled up with zeros, from
    ``h = length * golden ratio``. Every step is a bijection of h and of the word, so two texts of
    one length that differ in one word never collide, and others hardly ever.
    """
    hashes = lengths.astype(np.uint64) * np.uint64(GOLDEN)
    active, at = np.flatnonzero(lengths > 0), 0
    while len(active):
        left, word = lengths[active] - at, words[starts[active] + at]
        if left.min() < 8:
            word = first_characters(word, left)
        hashes[active] = mix(hashes[active] ^ word)
        at += 8
        active = active[left > 8]
    return hashes
