"""Coefficients of correlated noise that disturb a run's iterates least.

The iterates of a linear optimizer are A g; noise n = S^{-1} z disturbs them by |A S^{-1}|_F^2 / N,
times (sigma C)^2. All of that is public (docs/explanation/correlated-noise.md). It imports no JAX.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from dpsgd.noise.base import Noise
from dpsgd.noise.buffered import BufferedToeplitz, exponentials, inverted
from dpsgd.noise.correlated import BandedToeplitz
from dpsgd.noise.sensitivity import overlapped

_CELLS = 2**22
"""Numbers of a table of columns that is made at once."""

_COLUMNS = 256
"""Columns of A S^{-1} that an optimisation looks at, where step sizes differ."""

_FEW_COLUMNS = 32
"""At least, of those of noise that does not end."""

_NEGLIGIBLE = 1e-10


@dataclass(frozen=True)
class Workload:
    """What a run's iterates are made of: gradients, summed by SGD.

    With momentum beta and step sizes eta_t it is v_t = beta v_{t-1} + g_t, and the iterate moves by
    -eta_t v_t: as `optax.sgd(schedule, momentum)` does.

    Attributes:
      num_steps: N >= 1.
      momentum: beta in [0, 1).
      step_sizes: All eta_t, by any factor; None where they are alike.

    Raises:
      ValueError: If one of them is out of range, or there are not N step sizes.
    """

    num_steps: int
    momentum: float = 0.0
    step_sizes: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}")
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.step_sizes is not None:
            sizes = tuple(map(float, self.step_sizes))
            object.__setattr__(self, "step_sizes", sizes)
            if len(sizes) != self.num_steps:
                raise ValueError(f"{self.num_steps} steps have {len(sizes)} step_sizes")
            if not (all(map(math.isfinite, sizes)) and any(sizes)):
                raise ValueError("step_sizes must be finite, and not all 0")

    def mean_square(self, noise: Noise, columns: int | None = None) -> float:
        """Returns |A S^{-1}|_F^2 / N: the mean square error of an iterate at sigma C = 1.

        >>> from dpsgd import Independent
        >>> Workload(num_steps=9).mean_square(Independent())
        5.0

        Args:
          noise: Its law.
          columns: How many columns of A S^{-1} stand for all where step sizes differ, by default
            all: with 256, and step sizes that change slowly, it is right to 1e-5.
        """
        if isinstance(noise, BufferedToeplitz):
            inverse = noise.inverse(self.num_steps)
        else:
            column = noise.whiten(np.eye(min(noise.bands, self.num_steps), 1))[:, 0]
            inverse = self._inverse(column)  # S is Toeplitz
        columns = self.num_steps if columns is None else columns
        squares, _ = self._squares(self._response(inverse), columns, gradient=False)
        return squares / self.num_steps

    def _inverse(self, column: np.ndarray) -> np.ndarray:
        """Returns the columns of S^{-1} where those of S are `column`: [N]."""
        return scipy.signal.lfilter([1.0], column, np.eye(1, self.num_steps)[0])

    def _response(self, inverse: np.ndarray) -> np.ndarray:
        """Returns how a unit of z in one step moves v in those from it on: [N]."""
        return scipy.signal.lfilter([1.0], [1.0, -self.momentum], inverse)

    def _by_column(
        self, by_response: np.ndarray, response: np.ndarray, inverse: np.ndarray
    ) -> np.ndarray:
        """Returns the gradient by the column c of S: -x^j h / c are derivatives of the response."""
        size = scipy.fft.next_fast_len(2 * self.num_steps, real=True)
        again = scipy.fft.irfft(
            scipy.fft.rfft(response, size) * scipy.fft.rfft(inverse, size), size
        )
        transformed = (
            scipy.fft.rfft(by_response, size) * scipy.fft.rfft(again[: self.num_steps], size).conj()
        )
        return -scipy.fft.irfft(transformed, size)[: self.num_steps]

    def _squares(
        self, response: np.ndarray, columns: int, *, gradient: bool = True
    ) -> tuple[float, np.ndarray]:
        """Returns |A S^{-1}|_F^2 and its gradient by the response.

        Args:
          response: Of v: h[N].
          columns: How many are looked at, evenly spaced and weighted; all, if at least N.
          gradient: Whether it is wanted, where it costs much; else 0.
        """
        steps = self.num_steps
        if self.step_sizes is None:
            # Column s, entry t: sum of the first t - s + 1 of h. There are N - k entries of k + 1.
            moved, counts = np.cumsum(response), np.arange(steps, 0.0, -1.0)
            by_moved = 2.0 * counts * moved
            return float(counts @ moved**2), np.cumsum(by_moved[::-1])[::-1]
        sizes = np.asarray(self.step_sizes)
        reach = np.flatnonzero(np.abs(response) > _NEGLIGIBLE * np.abs(response).max())[-1] + 1
        h = response[:reach]
        padded = np.concatenate([sizes, np.zeros(reach)])
        windows = np.lib.stride_tricks.sliding_window_view(padded, reach)
        chosen = np.arange(steps)
        if columns < steps:
            chosen = np.unique(np.linspace(0, steps - 1, columns).round().astype(int))
        weights = np.ones(chosen.size)
        if columns < steps:
            weights = np.gradient(chosen.astype(float))
            weights[[0, -1]] = (weights[[0, -1]] + 1.0) / 2.0  # each end is one of N as well
        weights *= steps / weights.sum()
        total, by_response = 0.0, np.zeros(steps)
        for part in np.array_split(np.arange(chosen.size), -(-chosen.size * reach // _CELLS)):
            s, weight = chosen[part], weights[part]
            moved = np.cumsum(windows[s] * h, axis=1)
            counts = (s[:, None] + np.arange(reach) < steps).astype(float)
            counts[:, -1] += np.maximum(0, steps - s - reach)  # and stays so to the end
            total += float(weight @ np.sum(counts * moved**2, axis=1))
            if not gradient:
                continue
            by_moved = 2.0 * weight[:, None] * counts * moved
            by_entry = np.cumsum(by_moved[:, ::-1], axis=1)[:, ::-1]
            by_response[:reach] += np.sum(by_entry * windows[s], axis=0)
        return total, by_response


def banded_square_root(bands: int) -> BandedToeplitz:
    """Returns the noise of the first coefficients of (1 - x)^{-1/2}, c_j = binom(2j, j) / 4^j.

    >>> banded_square_root(2).coefficients[1] / banded_square_root(2).coefficients[0]
    0.5

    Args:
      bands: b >= 1.

    Raises:
      ValueError: If `bands` is less.

    Source: N. Kalinin, C. Lampert, Banded Square Root Matrix Factorization for Differentially
    Private Model Training (NeurIPS 2024).
    """
    if bands < 1:
        raise ValueError(f"bands must be at least 1, got {bands}")
    j = np.arange(1, bands)
    return BandedToeplitz(np.cumprod([1.0, *((2 * j - 1) / (2 * j))]).tolist())


def optimized(workload: Workload, bands: int) -> BandedToeplitz:
    """Returns banded noise that disturbs the iterates of a run least, as far as descent finds.

    It minimises |A S^{-1}|_F times the norm of the column over c_1, ..., c_{b-1} by L-BFGS, from
    the banded square root.

    Args:
      workload: Of the run.
      bands: b >= 1; no more than N count.
    """
    start = np.array(banded_square_root(min(bands, workload.num_steps)).coefficients)
    start /= start[0]
    if start.size == 1:
        return BandedToeplitz((1.0,))

    def objective(tail: np.ndarray) -> tuple[float, np.ndarray]:
        column = np.concatenate([[1.0], tail])
        with np.errstate(all="ignore"):
            inverse = workload._inverse(column)
            response = workload._response(inverse)
            if not np.isfinite(response).all():
                return math.inf, np.zeros_like(tail)
            squares, by_response = workload._squares(response, _COLUMNS)
            by_column = workload._by_column(by_response, response, inverse)
            norm = float(column @ column)
            gradient = 2.0 * tail / norm + by_column[1 : tail.size + 1] / squares
            return math.log(squares) + math.log(norm), gradient

    column = np.concatenate([[1.0], _descent(objective, start[1:])])
    candidates = [BandedToeplitz(start.tolist())]
    # In a short run noise may grow, which is refused; this moves zeros outwards.
    for nearer in (1.0, 0.9999, 0.999, 0.99, 0.97, 0.9):
        with contextlib.suppress(ValueError):
            candidates.append(BandedToeplitz((column * nearer ** np.arange(column.size)).tolist()))
            break
    return min(candidates, key=lambda noise: workload.mean_square(noise, _COLUMNS))


def _descent(
    objective: Callable[[np.ndarray], tuple[float, np.ndarray]],
    start: np.ndarray,
    bounds: Sequence[tuple[float, float]] | None = None,
) -> np.ndarray:
    """Returns where L-BFGS comes to, which never goes up from `start`.

    Noise that explodes counts as a little above the start.
    """
    wall = objective(start)[0] + 1.0

    def walled(at: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective(at)
        if value < wall and np.isfinite(gradient).all():
            return value, gradient
        return wall, np.zeros_like(at)

    options = {"maxiter": 300}
    return scipy.optimize.minimize(
        walled, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options
    ).x


def optimized_buffers(workload: Workload, buffers: int, period: int) -> BufferedToeplitz:
    """Returns buffered noise that disturbs the iterates of a run in a known order least.

    It minimises |A S^{-1}|_F times the sensitivity of columns at a distance of an epoch, over the
    logarithms of weights and of lambda / (1 - lambda), by L-BFGS. No decay is above 1 - 2^-20.

    Args:
      workload: Of the run.
      buffers: m >= 1; with 4, more hardly help.
      period: Steps T of an epoch.

    Raises:
      ValueError: If `buffers` or `period` is less than 1.

    Source: H. B. McMahan, Z. Xu, Y. Zhang, A Hassle-free Algorithm for Strong Differential Privacy
    in Federated Learning Systems (2024).
    """
    for name, value in (("buffers", buffers), ("period", period)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    steps = workload.num_steps
    powers = np.arange(max(steps - 1, 1))
    columns = min(_COLUMNS, max(_FEW_COLUMNS, _CELLS // steps))

    def numbers(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weights, odds = np.exp(logs.reshape(2, buffers))
        return weights, odds / (1.0 + odds)

    def objective(logs: np.ndarray) -> tuple[float, np.ndarray]:
        weights, decays = numbers(logs)
        inverse_weights, inverse_decays = inverted(weights, decays)
        if not inverse_decays.min() > -1.0:
            return math.inf, np.zeros_like(logs)
        inverse = exponentials(-inverse_weights, inverse_decays, steps)
        column = exponentials(weights, decays, steps)
        response = workload._response(inverse)
        squares, by_response = workload._squares(response, columns)
        by_column = workload._by_column(by_response, response, inverse) / squares
        overlap = overlapped(column, period)
        square = float(overlap @ overlap)
        padded = np.pad(overlap, (0, -steps % period)).reshape(-1, period)
        by_column += 2.0 / square * padded[::-1].cumsum(axis=0)[::-1].ravel()[:steps]
        table = decays[:, None] ** powers[: steps - 1]
        slopes = np.zeros_like(table)
        slopes[:, 1:] = powers[1 : steps - 1] * table[:, :-1]
        by_weights, by_decays = table @ by_column[1:], weights * (slopes @ by_column[1:])
        gradient = np.concatenate([by_weights * weights, by_decays * decays * (1.0 - decays)])
        return math.log(squares) + math.log(square), gradient

    rates = np.geomspace(1.0, 2.0 / (steps + 1), 2 * buffers + 1)[1::2]  # one over odds
    start = np.concatenate([0.5 * np.log(rates / rates.sum()) - 1.0, -np.log(rates)])
    bounds = [(-16.0, 1.0)] * buffers + [(-7.0, math.log(2.0**20))] * buffers
    weights, decays = numbers(_descent(objective, start, bounds))
    while True:
        with contextlib.suppress(ValueError):
            return BufferedToeplitz(weights.tolist(), decays.tolist())
        weights *= 0.97  # in a short run noise may grow, which is refused
