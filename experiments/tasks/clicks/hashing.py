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
    hashes, active = np.empty(len(lengths), np.uint64), np.arange(len(lengths))
    state = lengths.astype(np.uint64) * np.uint64(GOLDEN)
    while True:
        going = lengths > 0
        if not going.all():
            hashes[active[~going]] = state[~going]
            active, state = active[going], state[going]
            starts, lengths = starts[going], lengths[going]
        if not len(active):
            return hashes
        word = words[starts]
        state = mix(state ^ (word if lengths.min() >= 8 else first_characters(word, lengths)))
        starts, lengths = starts + 8, lengths - 8
