"""The simulated loss of banded noise, held against its certified cost, and of wrong samplers.

Who takes part, noise, and gradients chosen in view of what was released: the simulated delta is
never above the certified one, and attained by constant gradients. Samplers under which correlated
noise costs more are refused.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import special

from accounting import BallsAndBinsProfile
from dpsgd import BandedToeplitz

SURE, DRAWS = 5.4, 20_000
SIMULATED = BandedToeplitz((1.0, 0.5))
SIGMA, EPSILONS = 0.8, (0.25, 1.0)


def _ones(past: np.ndarray) -> np.ndarray:
    return np.ones(len(past))


GRADIENTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "constant": _ones,
    "alternating": lambda past: np.full(len(past), (-1.0) ** (past.shape[1] // 2)),
    "of the last release's sign": lambda past: (
        np.where(past[:, -1] < 0, -1.0, 1.0) if past.size else _ones(past)
    ),
    "large after large releases": lambda past: np.where(past.sum(axis=1) > 0, 1.0, 0.2),
    "small once it shows": lambda past: np.where(past.max(axis=1, initial=-9.0) > 1.2, 0.1, 1.0),
}
"""What an example contributes, given all releases before, as an adversary chooses it: in [-1, 1]"""


def mean_of(values: np.ndarray) -> tuple[float, float]:
    """Returns the mean of bounded draws, and an error that is exceeded once in 10^7 times."""
    return float(values.mean()), SURE * float(values.std()) / math.sqrt(values.size)


def surely(estimate: tuple[float, float]) -> float:
    return estimate[0] - estimate[1]


def whole_mechanism(
    gradient: Callable[[np.ndarray], np.ndarray], group: int, epochs: int, draws: int, seed: int
) -> dict:
    """Simulates cyclic balls-and-bins of 8 steps and 2 groups under noise of 2 bands.

    The loss of a run is a product over the possible steps of the example, by the chain rule; the
    bin of each epoch is averaged out. The gradient of an example of this group is made of all rows
    of M S + sigma z before the step, [draws, steps].
    """
    rng, steps = np.random.default_rng(seed), 8 * epochs
    matrix = SIMULATED.whiten(np.eye(steps))
    own = np.arange(group, steps, 2)
    found = {}
    for present in (True, False):
        chosen = 2 * rng.integers(4, size=(draws, epochs)) + group + 8 * np.arange(epochs)
        takes_part = np.zeros((draws, steps), bool)
        if present:
            np.put_along_axis(takes_part, chosen, True, axis=1)
        rows, given = np.zeros((draws, steps)), np.zeros((draws, steps))
        for t in range(steps):
            if t % 2 == group:
                given[:, t] = gradient(rows[:, :t])
            near = slice(max(0, t - 1), t + 1)
            moved = (given[:, near] * takes_part[:, near]) @ matrix[t, near]
            rows[:, t] = moved + SIGMA * rng.normal(size=draws)
        columns, sizes = matrix[:, own], given[:, own]
        lengths = sizes**2 * np.sum(columns**2, axis=0)
        logs = ((rows @ columns) * sizes - lengths / 2) / SIGMA**2
        bins = logs.reshape(draws, epochs, 4) - math.log(4)
        loss = special.logsumexp(bins, axis=2).sum(axis=1) * (1 if present else -1)
        for epsilon in EPSILONS:
            delta = np.maximum(0.0, -np.expm1(epsilon - loss))
            found[epsilon, "removed" if present else "added"] = mean_of(delta)
    return found


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("what", GRADIENTS)
def test_simulated_loss_of_adaptive_gradients_is_within_the_cost(what, epochs):
    simulated = [whole_mechanism(GRADIENTS[what], g, epochs, DRAWS, seed=g) for g in (0, 1)]
    for group, epsilon in itertools.product((0, 1), EPSILONS):
        certified = BallsAndBinsProfile(SIGMA, 4, epochs).delta(epsilon)
        both = [found for (at, _), found in simulated[group].items() if at == epsilon]
        assert max(map(surely, both)) <= certified.upper
        if (what, group) == ("constant", 0):
            assert max(mean + error for mean, error in both) >= certified.lower
