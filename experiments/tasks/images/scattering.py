"""Scattering features: a fixed, public function of one image, of which no row decides anything.

Moduli of Morlet wavelets at two scales and eight orientations, and moduli of these at the second
scale, are smoothed and kept at every fourth pixel: 1 + 16 + 64 maps. In each three neighbouring
maps mean and variance become 0 and 1. Of these numbers an image keeps its principal components
among drawn strokes: curves at public random places, generated here. Strokes tell which directions
matter before any row is read; to learn that from rows would cost privacy, and noise on directions
without signal is what private linear models lose by.

Sources: Bruna, Mallat, "Invariant Scattering Convolution Networks" (2013), section 2; Tramèr,
Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)" (ICLR 2021),
section 2, for private training on such maps. The strokes are ours.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from experiments.tasks.splitmix import outputs

ORIENTATIONS = 8
"""Over half a turn."""
STEP = 4
"""Pixels between features: twice the larger scale."""
GROUP = 3
"""Neighbouring maps that share a mean and a variance."""
COMPONENTS = 500
"""Features of a channel, at most."""
STROKES = 2_000
"""Generated images of which they are principal components."""
RANGE = 16.0
"""At which a feature is 255, and minus which it is 0. Components are divided by the root of their
standard deviations among strokes: halfway from principal components to whitened ones."""
BLOCK = 128
"""Images that are computed together, which bounds memory."""
WIDTH, FREQUENCY, SLANT = 0.8, 3 * np.pi / 4, 4 / ORIENTATIONS
"""Of the Morlet wavelet of scale 1: standard deviation in pixels, radians a pixel, and how much
longer it is across."""


class _Filters(NamedTuple):
    """In the frequencies of a padded side of n pixels."""

    fine: np.ndarray
    """Wavelets of scale 1, float32[orientations, n, n]."""
    coarse: np.ndarray
    """Those of scale 2, which have no high frequencies, of n / 2 pixels."""
    low: dict[int, np.ndarray]
    """Gaussian means at every fourth pixel of the image, by the pixels of a padded side."""


def scattering(images: np.ndarray, projected: bool = True) -> np.ndarray:
    """Returns the features of each image by itself, uint8[rows, 1, 1, features].

    Args:
      images: uint8[rows, side, side, channels], the side a multiple of 4 and at least 8.
      projected: Whether to components; else all numbers of the maps are features.

    Raises:
      ValueError: if images have another shape.
    """
    _, height, width, _ = images.shape
    if height != width or height % STEP or height < 2 * STEP:
        raise ValueError(
            f"scattering features are of square images whose side is a multiple of {STEP}, and at "
            f"least {2 * STEP} pixels: these have {height} x {width}"
        )
    found = []
    for start in range(0, max(1, len(images)), BLOCK):
        block = _normed(maps(images[start : start + BLOCK]))
        parts = block.reshape(-1, block.shape[-1])
        if projected:
            mean, directions = _components(height)
            parts = (parts.astype(np.float64) - mean) @ directions
        level = np.clip(np.rint(parts / RANGE * 127.5 + 127.5), 0, 255).astype(np.uint8)
        found.append(level.reshape(len(block), 1, 1, -1))
    return np.concatenate(found)


@functools.cache
def _components(side: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean of strokes, float64[numbers], and directions, float64[numbers, features].

    In double precision and with signs fixed, so that levels are the same on any machine.
    """
    drawn = _strokes(STROKES, side)[..., None]
    blocks = [drawn[start : start + BLOCK] for start in range(0, STROKES, BLOCK)]
    numbers = np.concatenate([_normed(maps(block))[:, 0] for block in blocks])
    mean = numbers.mean(axis=0, dtype=np.float64)
    apart = numbers - mean
    small = min(apart.shape)
    gram = apart @ apart.T if small == STROKES else apart.T @ apart
    values, vectors = np.linalg.eigh(gram)
    count = min(COMPONENTS, small - 1)
    values, vectors = values[::-1][:count] / STROKES, vectors[:, ::-1][:, :count]
    if small == STROKES:
        vectors = apart.T @ vectors / np.sqrt(values * STROKES)
    largest = np.abs(vectors).argmax(axis=0)
    signs = np.sign(vectors[largest, np.arange(count)])
    floor = 1e-6 * values[0]  # of what no stroke has
    directions = vectors * signs / np.maximum(values, floor) ** 0.25
    return mean, directions


def _strokes(count: int, side: int) -> np.ndarray:
    """Returns images of one to three curves, uint8[count, side, side], the same everywhere."""
    drawn = (outputs(np.arange(count * 20)) >> np.uint64(11)).reshape(count, 20) / 2.0**53
    t, unit = np.linspace(0, 1, 40)[:, None], side / 28
    pixels = np.indices((side, side)).reshape(2, -1).T
    images = np.empty((count, side, side), np.uint8)
    for image, (curves, width, *places) in zip(images, drawn, strict=True):
        points, start = [], places[0:2]
        for one in range(int(1 + 3 * curves)):
            goes_on, *ends = places[2 + 5 * one : 7 + 5 * one]
            first = np.array(start if goes_on < 0.7 else places[17 - one : 15 - one : -1])
            middle, last = np.array(ends[:2]), np.array(ends[2:])
            points.append((1 - t) ** 2 * first + 2 * t * (1 - t) * middle + t**2 * last)
            start = last
        line = np.concatenate(points)
        size = max(np.ptp(line, axis=0).max(), 1e-3)
        line = (line - line.mean(axis=0)) * (19 * unit / size) + (side - 1) / 2
        far = np.sqrt(((pixels[:, None] - line) ** 2).sum(axis=-1)).min(axis=1)
        ink = np.clip((1.2 + 1.35 * width) * unit - far + 0.5, 0, 1)
        image[:] = (255 * ink).reshape(side, side)
    return images


def maps(images: np.ndarray) -> np.ndarray:
    """Returns the smoothed moduli, float32[rows, channels, 81, side / 4, side / 4].

    The first is of the image, 16 of its wavelets, scale by scale, and 64 of the moduli of the first
    eight of these.
    """
    import scipy.fft

    filters = _filters(images.shape[1])

    margin = (0, 0), (0, 0), (STEP, STEP), (STEP, STEP)
    x = np.pad(np.moveaxis(images, -1, 1).astype(np.float32) / 255, margin, mode="reflect")
    side = x.shape[-1]

    def low(a: np.ndarray) -> np.ndarray:
        g = filters.low[a.shape[-1]]
        return np.swapaxes(np.swapaxes(a @ g, -1, -2) @ g, -1, -2)

    def moduli(spectrum: np.ndarray, wavelets: np.ndarray) -> np.ndarray:
        return np.abs(scipy.fft.ifft2(spectrum[..., None, :, :] * wavelets))

    def halved(spectrum: np.ndarray) -> np.ndarray:
        kept = np.r_[0 : side // 4, side - side // 4 : side]
        return spectrum[..., kept, :][..., kept] / 4

    spectrum = scipy.fft.fft2(x)
    first = moduli(spectrum, filters.fine)
    second = moduli(halved(scipy.fft.fft2(first)), filters.coarse)
    found = [x[:, :, None], first, moduli(halved(spectrum), filters.coarse)]
    found.append(second.reshape(*x.shape[:2], -1, side // 2, side // 2))
    return np.concatenate([low(a) for a in found], axis=2)


def _normed(found: np.ndarray) -> np.ndarray:
    """Returns maps after the group norm, float32[rows, channels, numbers]."""
    rows, channels, count, *shape = found.shape
    groups = found.reshape(rows, channels, count // GROUP, GROUP, *shape)
    mean = groups.mean(axis=(3, 4, 5), keepdims=True)
    variance = groups.var(axis=(3, 4, 5), keepdims=True)
    return ((groups - mean) / np.sqrt(variance + 1e-5)).reshape(rows, channels, -1)


@functools.cache
def _filters(side: int) -> _Filters:
    n = side + 2 * STEP
    turns = np.arange(ORIENTATIONS) * np.pi / ORIENTATIONS
    fine, coarse = ([_wavelet(n, scale, turn) for turn in turns] for scale in (1, 2))
    kept = np.r_[0 : n // 4, n - n // 4 : n]
    low = {}
    for pixels in (n, n // 2):
        at, centres = np.arange(pixels) * (n / pixels), np.arange(STEP, n - STEP, STEP)
        apart = np.abs(at[:, None] - centres)
        bell = np.exp(-(np.minimum(apart, n - apart) ** 2) / (2 * (2 * WIDTH) ** 2))
        low[pixels] = (bell / bell.sum(axis=0)).astype(np.float32)
    return _Filters(np.stack(fine), np.stack(coarse)[:, kept][:, :, kept], low)


def _wavelet(n: int, scale: int, turn: float) -> np.ndarray:
    """Returns the spectrum of a periodic Morlet wavelet of mean 0, float32[n, n]."""
    copies = np.arange(-2 * n, 3 * n)  # of the wavelet, a period apart
    x, y = np.meshgrid(copies, copies, indexing="ij")
    along, across = (
        np.cos(turn) * x + np.sin(turn) * y,
        np.cos(turn) * y - np.sin(turn) * x,
    )
    sigma = WIDTH * scale
    bell = np.exp(-(along**2 + (SLANT * across) ** 2) / (2 * sigma**2))
    wave = np.exp(1j * FREQUENCY / scale * along)
    offset = (bell * wave).sum() / bell.sum()
    whole = bell * (wave - offset) * SLANT / (2 * np.pi * sigma**2)
    return np.fft.fft2(whole.reshape(5, n, 5, n).sum(axis=(0, 2))).real.astype(np.float32)
