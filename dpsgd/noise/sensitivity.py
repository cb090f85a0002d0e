r"""What noise costs in a known order, where its columns reach over several steps of an example.

Let an example take part in steps that are T apart, r, r + T, r + 2T, ..., and let the order be
known. Let M be Toeplitz and without negative coefficients, M_{ts} = c_{t-s} >= 0. Then N
consecutive steps of a run, from the one on at which noise began, cost what *one* Gaussian release
of sensitivity Delta does, at the same sigma:

.. math:: \Delta^2 = \Big| \sum_k m_{kT} \Big|^2 = \sum_{t<N} \Big( \sum_{kT \le t} c_{t-kT} \Big)^2

with m_s column s of M, cut off after N steps. *Proof.*

1. Given who else takes part, let x_t be row t of M S + sigma C z without what others add, which is
   a function of earlier releases. If the example is zeroed out, all x_t are independent N(0, (sigma
   C)^2 I). If it takes part in s_1, s_2, ..., with clipped gradients u_1, u_2, ..., each chosen in
   view of what was released before its step, the mean of x_t given the rows before is mu_t = sum_k
   M_{t s_k} u_k: a function of them, as s_k <= t where M_{t s_k} is not 0.
2. Surely, sum_t |mu_t|^2 = sum_{jk} <m_{s_j}, m_{s_k}> <u_j, u_k> <= C^2 |sum_k m_{s_k}|^2, as no
   two columns have a negative product. (If they had, gradients of opposite signs would add up to
   more.) And |sum_k m_{s_k}| <= Delta: the sum is that of r = 0, shifted by r steps and cut off.
3. The likelihood ratio is L = exp(sum_t w_t - v_t / 2), w_t = <mu_t, x_t> / (sigma C)^2 and
   v_t = |mu_t|^2 / (sigma C)^2, where sum_t v_t <= a = (Delta / sigma)^2. Take a further normal
   number Y, and multiply L by exp(sqrt(v) Y - v / 2) with v = a - sum_t v_t. Given all rows that
   has mean 1, so that no mean of a convex function of the ratio becomes smaller (Jensen).
4. If the example is zeroed out, w_t is N(0, v_t) given the rows before, and the mean of exp(i theta
   w_t + theta^2 v_t / 2) is 1. So is that of the product, Y's factor included, and all v add up to
   a, a constant: W = sum_t w_t + sqrt(v) Y has the characteristic function exp(-theta^2 a / 2). It
   is N(0, a), and the ratio exp(W - a / 2) is that of N(Delta, sigma^2) to N(0, sigma^2). In both
   directions delta(epsilon) is the mean of a convex function of it: (X - e^eps)_+, (1 - e^eps X)_+.

An example of the run's first step attains it with constant gradients. Where noise is begun anew,
under other keys, rows are new: in 2. and 3. the squares of all such stretches add up, each with
the N of its own, whatever steps it begins and ends with and whether or not its order is the one of
before. Which steps an example takes part in need not be the same in two stretches.

Source: S. Denisov, H. B. McMahan, K. Rush, A. Smith, A. Thakurta, Improved Differential Privacy for
SGD via Optimal Private Linear Operators on Adaptive Streams (NeurIPS 2022), on gradients that
depend on earlier releases; H. B. McMahan, Z. Xu, Y. Zhang, A Hassle-free Algorithm for Strong
Differential Privacy in Federated Learning Systems (2024), on several participations.
"""

from __future__ import annotations

import math

import numpy as np

_ROUNDING = 2.0**-52


def overlapped(column: np.ndarray, period: int) -> np.ndarray:
    """Returns the sum of the columns of one example's steps, the first of which is step 0: [N].

    >>> overlapped(np.array([1.0, 0.5, 0.25, 0.0]), 2).tolist()
    [1.0, 0.5, 1.25, 0.5]

    Args:
      column: c_0, ..., c_{N-1}.
      period: T >= 1.
    """
    steps = len(column)
    padded = np.pad(column, (0, -steps % period))
    return padded.reshape(-1, period).cumsum(axis=0).ravel()[:steps]


def squared_sensitivity(column: np.ndarray, period: int) -> float:
    """Returns Delta^2, within `relative_error` of itself; the module says of what.

    >>> squared_sensitivity(np.array([1.0, 0.5, 0.25, 0.0]), 2)
    3.0625

    Args:
      column: c_0, ..., c_{N-1}, none negative.
      period: T >= 1.

    Raises:
      ValueError: If a coefficient is negative: then another sum of columns may be longer.
    """
    if not (column >= 0).all():
        raise ValueError("coefficients must not be negative")
    return float(np.sum(np.square(overlapped(column, period))))


def relative_error(num_steps: int, period: int) -> float:
    """Returns how far rounding may move `squared_sensitivity`, relative to it.

    All that is summed is not negative: E terms one after another, then N of them in pairs.
    """
    return _ROUNDING * (2 * -(-num_steps // period) + math.log2(num_steps) + 64)
