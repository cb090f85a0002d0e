"""Exactly rounded Gaussian noise, by Karney's algorithm from SHAKE-256."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

KEY_BYTES = 32
"""Length of a secure noise key."""

MAX_CELLS = 2**20
"""Largest standard deviation, in cells."""

CHUNK = 2**16
"""Coordinates per stream; chunks are independent, so threads can work on them side by side."""

_DIGIT_BITS = 32  # of a uniform number, drawn at a time: the law is the same for 1 to 32


def rounded_gaussian(
    key: bytes, step: int, leaf: int, shape: tuple[int, ...], cells: int
) -> np.ndarray:
    """Return exact samples of round(s Z), Z standard normal, as int64 of `shape`.

    Args:
      key: 32 secret bytes, such as those of `secrets.token_bytes`.
      step: the training step, in [0, 2^64).
      leaf: the number of the array within its tree, in [0, 2^64).
      shape: of the result.
      cells: s, the standard deviation in grid cells; an integer in [1, 2^20].

    Raises:
      ValueError: if an argument is out of range.

    Source: Karney, "Sampling exactly from the normal distribution", 2016, algorithm N.

    >>> rounded_gaussian(bytes(32), 0, 0, (4,), 1000).shape
    (4,)
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"a secure noise key has {KEY_BYTES} bytes, got {len(key)}")
    if not 1 <= cells <= MAX_CELLS:
        raise ValueError(f"cells must be in [1, 2^20], got {cells}")
    flat = np.empty(math.prod(shape), np.int64)

    def fill(chunk: int) -> None:
        part = flat[chunk * CHUNK : (chunk + 1) * CHUNK]
        part[:] = _sample(_Source(key, step, leaf, chunk), part.size, cells)

    chunks = range(-(-flat.size // CHUNK))
    if len(chunks) <= 1:
        list(map(fill, chunks))
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy and SHAKE release the lock
            list(pool.map(fill, chunks))
    return flat.reshape(shape)


class _Source:
    """The random words of one chunk of coordinates, in the order of the reads."""

    def __init__(self, key: bytes, step: int, leaf: int, chunk: int) -> None:
        numbers = b"".join(number.to_bytes(8, "little") for number in (step, leaf, chunk))
        self._prefix = b"dpsgd secure noise 1" + key + numbers  # of one length: no two collide
        self._draws = 0

    def words(self, count: int) -> np.ndarray:
        message = self._prefix + self._draws.to_bytes(8, "little")
        self._draws += 1
        return np.frombuffer(hashlib.shake_256(message).digest(4 * count), "<u4")

    def digits(self, count: int) -> np.ndarray:
        return self.words(count) >> np.uint32(32 - _DIGIT_BITS)

    def below(self, bounds: np.ndarray) -> np.ndarray:
        """Return uniform integers in [0, bound), exactly, for each of the `bounds` (int64)."""
        result = np.empty(bounds.size, np.int64)
        open_ = np.arange(bounds.size)
        while open_.size:
            bound = bounds[open_]
            word = self.words(open_.size).astype(np.int64)
            good = word < (2**32 // bound) * bound
            result[open_[good]] = (word % bound)[good]
            open_ = open_[~good]
        return result


class _Uniforms:
    """Independent uniform reals in (0, 1), whose digits are drawn when they are read."""

    def __init__(self, source: _Source, count: int) -> None:
        self._source = source
        self._digits = [source.digits(count)]
        self._known = [np.ones(count, bool)]

    def digit(self, place: int, rows: np.ndarray) -> np.ndarray:
        """Return the digit at `place` (0 is the first) of the numbers at the indices `rows`."""
        if place == len(self._digits):
            self._digits.append(np.zeros(self._digits[0].size, np.uint32))
            self._known.append(np.zeros(self._digits[0].size, bool))
        unknown = rows[~self._known[place][rows]]
        if unknown.size:
            self._digits[place][unknown] = self._source.digits(unknown.size)
            self._known[place][unknown] = True
        return self._digits[place][rows]

    def take(self, rows: np.ndarray) -> _Uniforms:
        taken = object.__new__(_Uniforms)
        taken._source = self._source
        taken._digits = [digits[rows] for digits in self._digits]
        taken._known = [known[rows] for known in self._known]
        return taken

    def below_half(self) -> np.ndarray:
        return self._digits[0] < np.uint32(2 ** (_DIGIT_BITS - 1))


def _less(a: _Uniforms, a_rows: np.ndarray, b: _Uniforms, b_rows: np.ndarray) -> np.ndarray:
    """Return a[a_rows] < b[b_rows]; the digits that this draws stay known in `a` and `b`."""
    less = np.zeros(a_rows.size, bool)
    tied, place = np.arange(a_rows.size), 0
    while tied.size:
        first, second = a.digit(place, a_rows[tied]), b.digit(place, b_rows[tied])
        less[tied] = first < second
        tied = tied[first == second]
        place += 1
    return less


def _exp_minus_half(source: _Source, count: int) -> np.ndarray:
    """Return `count` coins of bias exp(-1/2): Karney's algorithm H."""
    coins = np.ones(count, bool)  # a run of length 0 is even
    last = _Uniforms(source, count)
    rows = np.flatnonzero(last.below_half())
    last = last.take(rows)
    while rows.size:
        coins[rows] ^= True
        link = _Uniforms(source, rows.size)
        every = np.arange(rows.size)
        longer = np.flatnonzero(_less(link, every, last, every))
        rows, last = rows[longer], link.take(longer)
    return coins


def _keep_fraction(source: _Source, k: np.ndarray, x: _Uniforms, rows: np.ndarray) -> np.ndarray:
    """Return coins of bias exp(-x (2k + x) / (2k + 2)), at `rows`: Karney's algorithm B."""
    coins = np.ones(rows.size, bool)
    runs = np.arange(rows.size)  # the coins whose runs go on
    last, last_rows = x, rows
    while runs.size:
        link = _Uniforms(source, runs.size)
        longer = np.flatnonzero(_less(link, np.arange(runs.size), last, last_rows))
        runs, link = runs[longer], link.take(longer)
        # The coin of bias (2k + x) / (2k + 2): f + U < 2k + x, with f uniform in {0, ..., 2k + 1}.
        twice = 2 * k[rows[runs]]
        f = source.below(twice + 2)
        heads = f < twice
        close = np.flatnonzero(f == twice)
        chance = _Uniforms(source, close.size)
        heads[close] = _less(chance, np.arange(close.size), x, rows[runs[close]])
        longer = np.flatnonzero(heads)
        runs, last = runs[longer], link.take(longer)
        last_rows = np.arange(runs.size)
        coins[runs] ^= True
    return coins


def _sample(source: _Source, count: int, cells: int) -> np.ndarray:
    """Return `count` samples of round(cells Z), int64: Karney's algorithm N."""
    result = np.empty(count, np.int64)
    pending = np.arange(count)
    while pending.size:
        # N1: k has P(k) proportional to exp(-k / 2).
        k = np.zeros(pending.size, np.int64)
        rows = np.arange(pending.size)
        while rows.size:
            rows = rows[_exp_minus_half(source, rows.size)]
            k[rows] += 1
        # N2: keep k with probability exp(-k (k - 1) / 2).
        kept = _all_succeed(k * (k - 1), lambda rows: _exp_minus_half(source, rows.size))
        k = k[kept]
        # N3, N4: keep x with probability exp(-x (2k + x) / 2).
        x = _Uniforms(source, k.size)
        good = _all_succeed(k + 1, partial(_keep_fraction, source, k, x))
        magnitude = _round_half_up(cells, k[good], x.take(good))
        done = kept[good]
        negative = (source.words(done.size) & 1).astype(bool)
        result[pending[done]] = np.where(negative, -magnitude, magnitude)
        pending = np.delete(pending, done)
    return result


def _all_succeed(trials: np.ndarray, toss: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return the indices i for which each of `trials[i]` coins from `toss(indices)` came up."""
    left = trials.copy()
    succeeded = np.ones(trials.size, bool)
    rows = np.flatnonzero(left > 0)
    while rows.size:
        coins = toss(rows)
        succeeded[rows[~coins]] = False
        rows = rows[coins]
        left[rows] -= 1
        rows = rows[left[rows] > 0]
    return np.flatnonzero(succeeded)


def _round_half_up(cells: int, k: np.ndarray, x: _Uniforms) -> np.ndarray:
    """Return floor(cells (k + x) + 1/2), drawing as many digits of x as it takes to know it."""
    bits = _DIGIT_BITS
    known = (k << bits) + x.digit(0, np.arange(k.size))  # k + x is in known 2^-bits + (0, 2^-bits)
    scaled = cells * known + (1 << (bits - 1))
    result = scaled >> bits
    for row in np.flatnonzero((scaled & ((1 << bits) - 1)) + cells > 1 << bits):
        longer, places = int(known[row]), 1
        while True:  # in Python's integers, which do not overflow
            longer = (longer << bits) + int(x.digit(places, np.array([row]))[0])
            places += 1
            one = 1 << (places * bits)
            low = cells * longer + one // 2
            if low // one == (low + cells - 1) // one:
                result[row] = low // one
                break
    return result
